"""What is staged of the stream: within the run's bounds and little memory, prepared beside the training thread."""

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
from ddrl.replay import reader as feed_module
from ddrl.replay.reader import Bounds, Feed, Staged, stage, stored
from ddrl.store import keys, stream
from ddrl.types import EnvSpec, Fragment

RUN = "feed"
SPACES = EnvSpec(
    env_id="test",
    observation_shape=(4,),
    observation_dtype="float32",
    action_kind="discrete",
    action_shape=(),
    action_sizes=(3,),
)
MIB = 1024**2
BOUNDS = Bounds(num_steps=8, num_envs=3, context=2)


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


def make_feed(client: Redis, **options: Any) -> Feed:
    return Feed(client, RUN, b"0-0", functools.partial(stage, run=RUN, spaces=SPACES, **options))


def test_the_largest_fragment_of_the_run_passes_and_a_larger_one_does_not() -> None:
    assert stage(entry(codec.encode(fragment(0))), RUN, SPACES, bounds=BOUNDS).reason == ""
    for larger in ({"num_steps": 9}, {"num_envs": 4}, {"context": 3}):
        staged = stage(entry(codec.encode(fragment(0, **larger))), RUN, SPACES, bounds=BOUNDS)
        assert staged.fragment is None
        assert staged.reason.startswith("T, N, C: (") and staged.reason.endswith("at most (8, 3, 2)")


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
    assert stage(fields, RUN, spaces, bounds=replace(BOUNDS, memory_size=9000)).reason == ""
    assert "uncompressed, at most" in stage(fields, RUN, spaces, bounds=BOUNDS).reason


def test_what_is_far_too_large_is_refused_before_anything_is_decompressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = codec.encode(fragment(0, num_steps=40_000))
    monkeypatch.setattr(codec.blosc2, "decompress2", lambda *a, **k: pytest.fail("decompressed"))
    staged = stage(entry(fields), RUN, SPACES, bounds=BOUNDS)
    assert "bytes uncompressed, at most" in staged.reason
    assert staged.held_bytes < 4096


def test_no_more_than_the_bound_is_decoded_ahead_whatever_entries_say_of_their_size(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros compress to next to nothing: all came in one reply. Entries claim to have no byte."""
    monkeypatch.setattr(feed_module, "MAX_STAGED_BYTES", 3 * MIB)
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
    feed = Feed(client, RUN, b"0-0", functools.partial(stage, run=RUN, spaces=spaces))
    monkeypatch.setattr(feed_module.stream, "read_count", lambda *a: 100)
    held: list[int] = []

    def note(staged: Staged) -> Staged:
        held.append(len(feed._staged))
        return staged

    feed._stage = lambda one, make=feed._stage: note(make(one))
    feed.start()
    try:
        wait_until(lambda: len(feed._staged) == 3)  # 1 MiB and a little each: the third passes the bound
        found: list[Staged] = []
        while len(found) < 12:
            found += feed.take(0.0)
        assert [staged.fragment.seq for staged in found] == list(range(12))
        assert max(held) <= 2  # before each was decoded
    finally:
        feed.stop()


def test_what_is_being_admitted_still_counts(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAGED_BYTES", 1)
    for seq in range(3):
        append(client, fragment(seq))
    feed = make_feed(client)
    feed.start()
    try:
        wait_until(lambda: feed.ready)
        taken = feed.take(60.0)
        assert next(taken).fragment.seq == 0
        assert not threading.Event().wait(0.2) and not feed.ready  # nothing is decoded meanwhile
        taken.close()
    finally:
        feed.stop()


def test_a_take_ends_in_time_and_gives_one_at_least(client: Redis) -> None:
    for seq in range(5):
        append(client, fragment(seq))
    feed = make_feed(client)
    feed.start()
    try:
        wait_until(lambda: len(feed._staged) == 5)
        assert [staged.fragment.seq for staged in feed.take(0.0)] == [0]
        assert [staged.fragment.seq for staged in feed.take(60.0)] == [1, 2, 3, 4]
        assert list(feed.take(60.0)) == []
    finally:
        feed.stop()


def test_fragments_are_prepared_in_the_feeds_thread_and_what_prepare_refuses_is_refused(
    client: Redis,
) -> None:
    threads: list[str] = []

    def prepare(made: Fragment) -> int:
        threads.append(threading.current_thread().name)
        if made.seq == 1:
            raise ValueError("odd")
        return 10 * made.seq

    for seq in range(3):
        append(client, fragment(seq))
    feed = make_feed(client, prepare=prepare)
    feed.start()
    try:
        wait_until(lambda: len(feed._staged) == 3)
        found = list(feed.take(60.0))
    finally:
        feed.stop()
    assert threads == ["feed"] * 3
    assert [(staged.prepared, staged.reason) for staged in found] == [(0, ""), (None, "odd"), (20, "")]
    assert found[1].fragment is None and found[1].head.startswith(b"{")


def test_what_is_stored_is_staged_once_from_first_to_last(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seq in range(9):
        append(client, fragment(seq))
    ids = [one.entry_id for one in stream.read(client, RUN, b"0-0", count=9)]
    monkeypatch.setattr(stream, "read_count", lambda *a: 2)
    found = stored(client, RUN, ids[2], ids[7], functools.partial(stage, run=RUN, spaces=SPACES))
    assert [staged.fragment.seq for staged in found] == [2, 3, 4, 5, 6, 7]


def test_what_ended_the_feed_is_raised_after_all_before_it(client: Redis) -> None:
    def fail(made: Fragment) -> None:
        if made.seq == 1:
            raise KeyError("broken")

    for seq in range(3):
        append(client, fragment(seq))
    feed = make_feed(client, prepare=fail)
    feed.start()
    wait_until(lambda: feed.error is not None)
    assert [staged.fragment.seq for staged in feed.take(60.0)] == [0]
    with pytest.raises(KeyError, match="broken"):
        list(feed.take(60.0))
    feed.stop()
