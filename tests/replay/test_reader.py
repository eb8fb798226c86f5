"""The reader: within the run's limits and little memory, decoding and packing beside the training thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from redis import Redis
from support.private_server import PrivateServer, until
from support.reference_items import Player

from ddrl import codec
from ddrl.replay import reader as reader_module
from ddrl.replay.reader import Decoded, FragmentLimits, Reader, decode, decode_range, largest_value
from ddrl.store import connection, keys, stream
from ddrl.types import EnvSpec, Fragment

RUN = "reader"
SPACES = EnvSpec("test", (4,), "float32", "discrete", (), (6,))
MIB = 1024**2
LIMITS = FragmentLimits(num_steps=8, num_envs=3, context=2)
DECODE = functools.partial(decode, run=RUN, spaces=SPACES, limits=LIMITS, pack=lambda made: made)


def fragment(
    seq: int = 0, *, num_steps: int = 8, num_envs: int = 3, context: int = 2, **options: Any
) -> Fragment:
    player = Player(seq, num_envs=num_envs, **options)
    player.fragment(context)
    return replace(player.fragment(num_steps, context), run=RUN, seq=seq)


def decoded(made: Fragment, **options: Any) -> Decoded:
    return DECODE(stream.Entry(b"1-0", codec.encode(made)), **options)


def append(client: Redis, *fragments: Fragment, **further: bytes) -> None:
    for made in fragments:
        fields = codec.encode(made) | {name.encode(): value for name, value in further.items()}
        client.xadd(keys.experience(RUN), fields)


@contextlib.contextmanager
def reading(client: Redis, **options: Any) -> Iterator[Reader]:
    """A reader that runs inside the block."""
    mends = {name: options.pop(name) for name in ("drop_next", "lower_ids") if name in options}
    cursor = options.pop("cursor", b"0-0")
    reader = Reader(client, RUN, cursor, functools.partial(DECODE, **options), **mends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "BLOCK_MS", 200)
        reader.start()
        try:
            yield reader
        finally:
            reader.stop()


def seqs(entries: Iterator[Decoded]) -> list[int]:
    return [one.fragment.seq for one in entries if one.fragment is not None]


FRAGMENT = fragment()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (fragment(num_steps=9), "T, N, C: (9, 3, 2), those of the run are at most (8, 3, 2)"),
        (fragment(num_envs=4), "T, N, C: (8, 4, 2), those of the run are at most (8, 3, 2)"),
        (fragment(context=3), "T, N, C: (8, 3, 3), those of the run are at most (8, 3, 2)"),
        (replace(FRAGMENT, run="other"), "run: 'other' does not belong into the stream of 'reader'"),
        (fragment(observation=(3,)), "spaces: observation and action are ('float32', (3,), ())"),
        (fragment(dtype="uint8"), "spaces: observation and action are ('uint8', (4,), ())"),
        (fragment(continuous=True), "spaces: observation and action are ('float32', (4,), (2,))"),
        (
            replace(FRAGMENT, action=FRAGMENT.action.astype("f4")),
            "action: float32, but actions of the run are",
        ),
        (replace(FRAGMENT, action=FRAGMENT.action + 6), "action: outside the choices of the run, (6,)"),
        (replace(FRAGMENT, action=FRAGMENT.action - 6), "action: outside the choices of the run, (6,)"),
        (
            replace(FRAGMENT, extras={"raw_action": FRAGMENT.action + 6}),
            "action: outside the choices of the run, (6,)",
        ),
        (replace(FRAGMENT, truncated=FRAGMENT.truncated ^ ~FRAGMENT.terminated), "final_index: not the"),
    ],
)
def test_a_fragment_outside_the_run_is_refused(made: Fragment, reason: str) -> None:
    """The replay relies on this check and makes none of its own."""
    found = decoded(made, pack=lambda made: pytest.fail("packed"))
    assert found.fragment is None and found.reason.startswith(reason) and found.memory_bytes < 8192


def test_a_short_fragment_may_not_be_as_large_as_the_longest() -> None:
    """1 kB of a worker's that takes a second to decode would hold up all others."""
    short = fragment(num_steps=1, num_envs=1, context=0)
    wide = np.zeros((1, 1, LIMITS.num_bytes(SPACES) // 2), np.uint8)
    found = decoded(replace(short, extras={"padding": wide}))
    assert "bytes uncompressed, at most" in found.reason


def test_what_packing_makes_of_a_fragment_counts_as_memory() -> None:
    """Episodes of one step make many items of few bytes."""
    assert decoded(FRAGMENT, pack=lambda made: SimpleNamespace(num_bytes=10**6)).memory_bytes > 10**6
    # A column that is left out is held until the learner takes the entry.
    packed = decoded(FRAGMENT, pack=lambda made: SimpleNamespace(num_bytes=0))
    assert packed.memory_bytes > FRAGMENT.num_bytes


def test_who_sent_a_fragment_is_what_its_append_wrote() -> None:
    made = replace(fragment(), producer=10**6, incarnation=1, seq=5)
    fields = codec.encode(made) | {b"p": b"3", b"i": b"7", b"q": b"4"}
    found = DECODE(stream.Entry(b"1-0", fields)).fragment
    assert found is not None and (found.producer, found.incarnation, found.seq) == (3, 7, 4)


def test_an_action_outside_the_bounds_is_refused() -> None:
    spaces = EnvSpec(
        "test", (4,), "float32", "continuous", (2,), action_low=(-2.0, 0.0), action_high=(2.0, 1.0)
    )
    made = fragment(continuous=True)
    action = np.zeros_like(made.action)
    action[..., 0] = -2.0
    assert decoded(replace(made, action=action), spaces=spaces).reason == ""
    for place, value in [(0, -2.1), (0, 2.1), (1, -0.1), (1, 3e38)]:
        broken = action.copy()
        broken[-1, 0, place] = value
        found = decoded(replace(made, action=broken), spaces=spaces)
        assert found.fragment is None
        assert found.reason == "action: outside the bounds of the run, (-2.0, 0.0) to (2.0, 1.0)"


def test_a_mask_that_is_none_or_allows_nothing_is_refused() -> None:
    """Of [2, 4] choices, also in a final observation."""
    spaces = EnvSpec("test", (7,), "float32", "multi_discrete", (2,), (2, 4), has_mask=True)
    made = fragment(observation=(7,))
    made = replace(made, action=np.zeros((*made.action.shape, 2), np.int64))
    final = np.ones((1, 7), np.float32)
    truncated = np.zeros_like(made.truncated)
    truncated[3, 0] = True
    made = replace(
        made,
        truncated=truncated,
        terminated=np.zeros_like(truncated),
        final_index=np.array([[3, 0]], np.int32),
        observation=np.ones_like(made.observation),
        final_observation=final,
    )
    assert decoded(made, spaces=spaces).reason == ""
    for place, value in [((slice(1, 3),), 0), ((slice(3, 7),), 0), ((2,), 0.5), ((2,), -1), ((2,), 2)]:
        for column in ("observation", "final_observation"):
            broken = getattr(made, column).copy()
            broken[-1, ..., *place] = value
            found = decoded(replace(made, **{column: broken}), spaces=spaces)
            assert found.fragment is None
            assert found.reason == "observation: a mask that is none, or allows nothing"


@pytest.mark.parametrize("column", ["observation", "final_observation"])
def test_a_number_beside_images_that_is_not_finite_is_refused(column: str) -> None:
    spaces = EnvSpec("test", (14,), "uint8", "discrete", (), (6,), image_shapes=((2, 3, 1),))
    made = fragment(observation=(14,), dtype="uint8")
    is_end = np.arange(made.truncated.size).reshape(made.truncated.shape) == 4
    made = replace(
        made,
        truncated=is_end,
        terminated=np.zeros_like(is_end),
        final_index=np.argwhere(is_end).astype(np.int32),
        observation=np.zeros_like(made.observation),
        final_observation=np.zeros((1, 14), np.uint8),
    )
    assert decoded(made, spaces=spaces).reason == ""
    broken = getattr(made, column).copy()
    broken[-1, ..., 10:] = np.float32([np.nan]).view(np.uint8)
    found = decoded(replace(made, **{column: broken}), spaces=spaces)
    assert found.reason == "observation: a number beside its images is not finite"
    broken[-1, ..., 10:] = np.float32([3e38]).view(np.uint8)
    assert spaces.numbers(broken).max() == np.float32(3e38)


def test_of_sequences_whole_strides_are_taken() -> None:
    limits = replace(LIMITS, stride=3)
    assert [decoded(fragment(num_steps=num), limits=limits).reason for num in (6, 7)] == [
        "", "T: 7, those of the run are multiples of 3",
    ]  # fmt: skip


def test_every_step_may_be_truncated_and_extras_have_room() -> None:
    """Bytes are bounded so that no fragment that a collector can make is refused."""
    made = fragment(observation=(5000,))
    everywhere = np.ones_like(made.truncated)
    index = np.argwhere(everywhere).astype(np.int32)
    extras = {
        "wide": np.zeros((*everywhere.shape, 1000), np.float32),
        "memory_index": index,
        "memory": np.zeros((len(index), 9000), np.float16),
    }
    widest = replace(
        made,
        truncated=everywhere,
        terminated=~everywhere,
        final_index=index,
        final_observation=np.zeros((len(index), 5000), np.float32),
        episode_return=np.zeros(len(index), np.float32),
        episode_length=np.ones(len(index), np.int32),
        extras=extras,
    )
    spaces = replace(SPACES, observation_shape=(5000,))
    assert decoded(widest, spaces=spaces, limits=replace(LIMITS, state_size=9000)).reason == ""
    assert "uncompressed, at most" in decoded(widest, spaces=spaces).reason


def test_decoding_ahead_is_bounded_whatever_size_entries_claim(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that resemble each other compress to next to nothing: all came in one reply, and claim to have no byte."""
    monkeypatch.setattr(reader_module, "MAX_DECODED_BYTES", 3 * MIB)
    image = {"observation": (128, 1024), "dtype": "uint8", "end_probability": 0.0}
    blank = fragment(num_steps=7, num_envs=1, context=0, **image)
    append(client, *(replace(blank, seq=seq) for seq in range(12)), s=b"0")
    found: list[int] = []
    ahead: list[int] = []  # entries decoded and not taken, after each
    spaces = replace(SPACES, observation_shape=(128, 1024), observation_dtype="uint8")
    with reading(
        client, spaces=spaces, pack=lambda one: ahead.append(one.seq + 1 - len(found)) or one
    ) as reader:
        until(lambda: len(ahead) == 3)  # 1 MiB and a little each: the third passes the bound
        assert not threading.Event().wait(0.1) and len(ahead) == 3
        until(lambda: found.extend(seqs(reader.take(0.0))) or len(found) == 12)
    assert found == list(range(12))
    assert max(ahead) <= 4  # one may be decoded between a take and its count here


def test_an_entry_that_is_longer_than_a_reply_may_be_is_deleted_unread(server: PrivateServer) -> None:
    """However many there are; the others are read."""
    client = connection.connect(server.url)
    client.ping()  # a connection of before would not be bounded
    connection.bound_replies(client, 10 * MIB)
    client.hset(keys.state(RUN), mapping={"status": "active", "fence": 1})
    append(client, fragment(0))
    for num, size in ((3, 12 * MIB), (20, MIB)):
        for _ in range(num):
            client.xadd(keys.experience(RUN), {"h": b"x" * size})
    client.xadd(keys.experience(RUN), {n: "" for n in range(2_000_000)})
    append(client, fragment(1))
    found: list[int] = []
    drop = functools.partial(stream.drop_next, server.client, RUN, 1, 10 * MIB)
    with reading(client, drop_next=drop) as reader:
        until(lambda: found.extend(seqs(reader.take(0.0))) or len(found) == 2)
    assert found == [0, 1] and client.xlen(keys.experience(RUN)) == 22
    reasons = [fields[b"reason"] for _, fields in client.xrange(keys.dead(RUN))]
    assert reasons == [b"too long to be read"] * 3  # that of more fields than an append writes has no record


def test_pages_of_a_bounded_client_are_as_short_as_its_replies(server: PrivateServer) -> None:
    """Entries claim to have no byte; one of them is longer than a reply may be."""
    client = connection.connect(server.url)
    connection.bound_replies(client, 3 * MIB)
    ids = [client.xadd(keys.experience(RUN), {"h": b"x" * MIB}) for _ in range(10)]
    pages = stream.pages(client, RUN, b"0-0", ids[-1])
    assert [entry.entry_id for page in pages for entry in page] == ids
    longest = client.xadd(keys.experience(RUN), {"h": b"x" * 4 * MIB})
    with pytest.raises(connection.ReplyTooLongError):
        list(stream.pages(client, RUN, b"0-0", longest))


def test_more_junk_than_the_server_holds_for_its_clients_is_read(server: PrivateServer) -> None:
    """The server closes the connection of a reader that asks for too much at once."""
    writer, client = server.client, connection.connect(server.url)
    connection.bound_replies(client, 100 * MIB)
    append(writer, *map(fragment, range(130)))  # after these, the reader asks for as many as it ever does
    for _ in range(130):
        writer.xadd(keys.experience(RUN), {"h": b"x" * MIB})
    append(writer, fragment(130))
    writer.config_set("maxmemory-clients", "32mb")
    found: list[int] = []
    with reading(client) as reader:
        until(lambda: found.extend(seqs(reader.take(0.0))) or len(found) == 131)
    assert found == list(range(131))
    pages = stream.pages(client, RUN, b"0-0", b"+")
    assert sum(map(len, pages)) == 261
    assert writer.info("stats")["evicted_clients"] > 0


def test_an_entry_counts_until_it_is_admitted(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_DECODED_BYTES", 1)
    append(client, *map(fragment, range(3)))
    with reading(client) as reader:
        until(lambda: reader.ready)
        taken = reader.take(60.0)
        assert next(taken).fragment.seq == 0
        assert not threading.Event().wait(0.1) and not reader.ready  # nothing is decoded meanwhile
        taken.close()


def test_a_take_ends_in_time_and_gives_one_at_least(client: Redis) -> None:
    append(client, *map(fragment, range(6)))
    packed: list[int] = []
    with reading(client, pack=lambda one: packed.append(one.seq) or one) as reader:
        until(lambda: len(packed) == 6)  # of which five are surely there to take
        assert seqs(reader.take(0.0)) == [0]
        assert seqs(reader.take(60.0))[:4] == [1, 2, 3, 4]
        until(lambda: list(reader.take(60.0)) == [])


def test_fragments_are_packed_in_the_readers_thread_and_a_value_error_refuses_them(client: Redis) -> None:
    threads: list[str] = []

    def pack(made: Fragment) -> Fragment:
        threads.append(threading.current_thread().name)
        if made.seq == 1:
            raise ValueError("odd")
        return replace(made, seq=10 * made.seq)

    append(client, *map(fragment, range(3)))
    found: list[Decoded] = []
    with reading(client, pack=pack) as reader:
        until(lambda: found.extend(reader.take(60.0)) or len(found) == 3)
    assert threads == ["reader"] * 3
    assert [one.packed and one.packed.seq for one in found] == [0, None, 20]
    assert (
        [one.reason for one in found] == ["", "odd", ""]
        and found[1].fragment is None
        and found[1].head.startswith(b"{")
    )


def test_a_range_is_decoded_once_from_first_to_last(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    append(client, *map(fragment, range(9)))
    ids = [one.entry_id for one in stream.read(client, RUN, b"0-0", count=9)]
    monkeypatch.setattr(stream, "MOST_AT_ONCE", 2)
    assert seqs(decode_range(client, RUN, ids[2], ids[7], DECODE)) == [2, 3, 4, 5, 6, 7]


def test_the_error_that_ended_the_reader_is_raised_after_all_before_it(client: Redis) -> None:
    def fail(made: Fragment) -> Fragment:
        if made.seq == 1:
            raise KeyError("broken")
        return made

    append(client, *map(fragment, range(3)))
    with reading(client, pack=fail) as reader:
        until(lambda: reader.error is not None)
        assert seqs(reader.take(60.0)) == [0]
        with pytest.raises(KeyError, match="broken"):
            list(reader.take(60.0))


@pytest.mark.parametrize(
    ("dtype", "value", "size"),
    [("bool", True, 1.0), ("uint8", 255, 255.0), ("int64", -(2**63), 2.0**63), ("float16", -9.0, 9.0)],
)
def test_the_largest_value_is_found_in_columns_of_any_type(dtype: str, value: Any, size: float) -> None:
    made = fragment()
    column = np.full(made.reward.shape, value, dtype)
    none = {name: 0 * getattr(made, name) for name in ("observation", "final_observation", "reward")}
    forged = replace(made, extras={"forged": column, "episode_metrics": column * 100.0}, **none)
    assert largest_value(forged, SPACES) == (size, "forged")


def test_entries_after_a_cursor_that_is_ahead_of_the_clock_are_read(client: Redis) -> None:
    """The server's clock was set back, or the run was restored from a server whose clock was ahead."""
    key, cursor = keys.experience(RUN), b"99999999999999-3"
    client.xdel(key, client.xadd(key, {"x": ""}, id=cursor))
    append(client, fragment(0), fragment(1))
    client.xadd(key, codec.encode(fragment(2)), id=b"99999999999999999-0")  # of a worker's
    lower_ids = functools.partial(stream.lower_ids, client, RUN, 0)
    with reading(client, cursor=cursor, lower_ids=lower_ids) as reader:
        found: list[int] = []
        until(lambda: found.extend(seqs(reader.take(1.0))) or len(found) == 3, 20.0)
    assert found == [0, 1, 2]
    (_, _, (last, _)) = client.xrange(key)
    assert last == b"99999999999999-6"
