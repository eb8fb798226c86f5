"""The reader: within the run's limits and little memory, decoding and packing beside the training thread."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from redis import Redis
from support.private_server import wait_until
from support.reference_returns import make_fragment

from ddrl import codec
from ddrl.replay import reader as reader_module
from ddrl.replay.reader import Decoded, FragmentLimits, Reader, decode, decode_range
from ddrl.store import keys, stream
from ddrl.types import EnvSpec, Fragment

RUN = "reader"
SPACES = EnvSpec(
    env_id="test",
    observation_shape=(4,),
    observation_dtype="float32",
    action_kind="discrete",
    action_shape=(),
    action_sizes=(3,),
)
MIB = 1024**2
LIMITS = FragmentLimits(num_steps=8, num_envs=3, context=2)


def fragment(seq: int, *, num_steps: int = 8, num_envs: int = 3, context: int = 2) -> Fragment:
    made = make_fragment(seq, num_steps=num_steps, num_envs=num_envs, context=context)
    action = np.zeros(made.reward.shape, np.int64)
    return replace(made, run=RUN, incarnation=7, seq=seq, action=action, extras={})


def entry(fields: dict[bytes, bytes]) -> stream.Entry:
    return stream.Entry(b"1-0", fields)


def append(client: Redis, made: Fragment, **further: bytes) -> None:
    fields = codec.encode(made) | {name.encode(): value for name, value in further.items()}
    client.xadd(keys.experience(RUN), fields)


@pytest.fixture
def client(server) -> Redis:
    return server.client


def make_reader(client: Redis, **options: Any) -> Reader:
    return Reader(client, RUN, b"0-0", functools.partial(decode, run=RUN, spaces=SPACES, **options))


def test_the_largest_fragment_of_the_run_passes_and_a_larger_one_does_not() -> None:
    assert decode(entry(codec.encode(fragment(0))), RUN, SPACES, limits=LIMITS).reason == ""
    for larger in ({"num_steps": 9}, {"num_envs": 4}, {"context": 3}):
        decoded = decode(entry(codec.encode(fragment(0, **larger))), RUN, SPACES, limits=LIMITS)
        assert decoded.fragment is None
        assert decoded.reason.startswith("T, N, C: (") and decoded.reason.endswith("at most (8, 3, 2)")


def test_every_step_may_be_truncated_and_extras_have_room() -> None:
    """Bytes are bounded so that no fragment that a collector can make is refused."""
    made, spaces = fragment(0), replace(SPACES, observation_shape=(5000,))
    everywhere = np.ones_like(made.truncated)
    index = np.argwhere(everywhere).astype(np.int32)
    widest = replace(
        made,
        observation=np.zeros((11, 3, 5000), np.float32),
        truncated=everywhere,
        terminated=np.zeros_like(everywhere),
        final_index=index,
        final_observation=np.zeros((len(index), 5000), np.float32),
        episode_return=np.zeros(len(index), np.float32),
        episode_length=np.ones(len(index), np.int32),
        extras={
            "wide": np.zeros((*everywhere.shape, 1000), np.float32),
            "memory_index": index,
            "memory": np.zeros((len(index), 9000), np.float16),
        },
    )
    fields = entry(codec.encode(widest))
    assert decode(fields, RUN, spaces, limits=replace(LIMITS, state_size=9000)).reason == ""
    assert "uncompressed, at most" in decode(fields, RUN, spaces, limits=LIMITS).reason


def test_an_entry_that_is_too_large_is_refused_before_it_is_decompressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = codec.encode(fragment(0, num_steps=40_000))
    monkeypatch.setattr(codec.blosc2, "decompress2", lambda *a, **k: pytest.fail("decompressed"))
    decoded = decode(entry(fields), RUN, SPACES, limits=LIMITS)
    assert "bytes uncompressed, at most" in decoded.reason
    assert decoded.memory_bytes < 4096


def test_decoding_ahead_is_bounded_whatever_size_entries_claim(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros compress to next to nothing: all came in one reply. Entries claim to have no byte."""
    monkeypatch.setattr(reader_module, "MAX_DECODED_BYTES", 3 * MIB)
    spaces = replace(SPACES, observation_shape=(128, 1024), observation_dtype="uint8")
    blank = fragment(0, num_steps=7, num_envs=1, context=0)
    none = np.zeros_like(blank.terminated)
    for seq in range(12):
        made = replace(
            blank,
            seq=seq,
            observation=np.zeros((8, 1, 128, 1024), np.uint8),
            final_observation=np.zeros((0, 128, 1024), np.uint8),
            **dict.fromkeys(("terminated", "truncated"), none),
            final_index=np.zeros((0, 2), np.int32),
        )
        append(client, made, s=b"0")
    monkeypatch.setattr(reader_module.stream, "read_count", lambda *a: 100)
    found: list[Decoded] = []
    ahead: list[int] = []  # entries decoded and not taken, after each

    def count(one: Fragment) -> None:
        ahead.append(one.seq + 1 - len(found))

    reader = Reader(client, RUN, b"0-0", functools.partial(decode, run=RUN, spaces=spaces, pack=count))
    reader.start()
    try:
        wait_until(lambda: len(ahead) == 3)  # 1 MiB and a little each: the third passes the bound
        assert not threading.Event().wait(0.1) and len(ahead) == 3
        while len(found) < 12:
            found += reader.take(0.0)
        assert [decoded.fragment.seq for decoded in found] == list(range(12))
        assert max(ahead) <= 4  # one may be decoded between a take and its count here
    finally:
        reader.stop()


def test_an_entry_counts_until_it_is_admitted(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_DECODED_BYTES", 1)
    for seq in range(3):
        append(client, fragment(seq))
    reader = make_reader(client)
    reader.start()
    try:
        wait_until(lambda: reader.ready)
        taken = reader.take(60.0)
        assert next(taken).fragment.seq == 0
        assert not threading.Event().wait(0.2) and not reader.ready  # nothing is decoded meanwhile
        taken.close()
    finally:
        reader.stop()


def test_a_take_ends_in_time_and_gives_one_at_least(client: Redis) -> None:
    for seq in range(6):
        append(client, fragment(seq))
    packed: list[int] = []
    reader = make_reader(client, pack=lambda one: packed.append(one.seq))
    reader.start()
    try:
        wait_until(lambda: len(packed) == 6)  # of which five are surely there to take
        assert [decoded.fragment.seq for decoded in reader.take(0.0)] == [0]
        assert [decoded.fragment.seq for decoded in reader.take(60.0)][:4] == [1, 2, 3, 4]
        wait_until(lambda: list(reader.take(60.0)) == [])
    finally:
        reader.stop()


def test_fragments_are_packed_in_the_readers_thread_and_a_value_error_refuses_them(
    client: Redis,
) -> None:
    threads: list[str] = []

    def pack(made: Fragment) -> int:
        threads.append(threading.current_thread().name)
        if made.seq == 1:
            raise ValueError("odd")
        return 10 * made.seq

    for seq in range(3):
        append(client, fragment(seq))
    reader = make_reader(client, pack=pack)
    reader.start()
    try:
        found: list[Decoded] = []
        wait_until(lambda: found.extend(reader.take(60.0)) or len(found) == 3)
    finally:
        reader.stop()
    assert threads == ["reader"] * 3
    assert [(decoded.packed, decoded.reason) for decoded in found] == [(0, ""), (None, "odd"), (20, "")]
    assert found[1].fragment is None and found[1].head.startswith(b"{")


def test_a_range_is_decoded_once_from_first_to_last(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq in range(9):
        append(client, fragment(seq))
    ids = [one.entry_id for one in stream.read(client, RUN, b"0-0", count=9)]
    monkeypatch.setattr(stream, "read_count", lambda *a: 2)
    found = decode_range(client, RUN, ids[2], ids[7], functools.partial(decode, run=RUN, spaces=SPACES))
    assert [decoded.fragment.seq for decoded in found] == [2, 3, 4, 5, 6, 7]


def test_the_error_that_ended_the_reader_is_raised_after_all_before_it(client: Redis) -> None:
    def fail(made: Fragment) -> None:
        if made.seq == 1:
            raise KeyError("broken")

    for seq in range(3):
        append(client, fragment(seq))
    reader = make_reader(client, pack=fail)
    reader.start()
    wait_until(lambda: reader.error is not None)
    assert [decoded.fragment.seq for decoded in reader.take(60.0)] == [0]
    with pytest.raises(KeyError, match="broken"):
        list(reader.take(60.0))
    reader.stop()
