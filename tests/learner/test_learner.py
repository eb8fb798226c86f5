"""The learner against a real server: replay out of the stream, the ledger, pace, resume, trimming, bad entries."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from redis import Redis
from support.replays import gather_all
from support.runs import play_steps, start, target_config

from ddrl import codec
from ddrl.algorithms import base
from ddrl.learner import loop as learner_module
from ddrl.learner import publisher as service_module
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, keys, metrics, runs, stream, weights
from ddrl.store import leases as lease


@pytest.fixture
def client(server) -> Redis:
    return server.client


def make_learner(client: Redis, run: str, token: int, url: str) -> Learner:
    config = runs.config(client, run)
    resolved = base.resolve(config, runs.spaces(client, run))
    from ddrl.store import connection

    blocking = connection.connect_blocking(url)
    return Learner(client, blocking, run, token, config, resolved, device=torch.device("cpu"))


def take(client: Redis, run: str) -> int:
    client.delete(keys.lease(run))
    token = lease.acquire(client, run, host="here", folder="/tmp")
    assert token is not None
    return token


@contextmanager
def training(learner: Learner, *, serve: bool = True) -> Iterator[None]:
    """The learner's two threads, for as long as the context lasts."""
    failed: list[BaseException] = []

    def train() -> None:
        try:
            learner.train()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    stop = threading.Event()

    def service() -> None:
        while not stop.wait(0.02):
            learner.serve()

    server = threading.Thread(target=service) if serve else None
    if server:
        server.start()
    try:
        yield
    finally:
        learner.stopping.set()
        thread.join()
        stop.set()
        if server:
            server.join()
    assert not failed, failed


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_everything_appended_is_admitted_once_and_the_view_holds_what_was_played(
    client: Redis, server
) -> None:
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 1000)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    learner.finish()
    state = runs.state(client, run)
    counters = learner.counters
    assert counters.admitted == state.appended_fragments and counters.dead == 0
    assert len(learner.experience) == counters.env_steps == state.appended_steps
    learner.experience.check_valid()
    batch = gather_all(learner.experience)
    # Reward -(action - target)^2 with one-step returns: every row of the view can be checked by hand.
    expected = -np.square(batch.action[:, 0] - batch.observation[:, 0])
    np.testing.assert_allclose(batch.n_step_return, expected, rtol=1e-4, atol=1e-5)
    assert np.all(batch.bootstrap_discount == np.float32(0.5))  # the end is a truncation: it bootstraps


def test_updates_keep_the_ratio_and_the_allowance_follows(client: Redis, server) -> None:
    config = target_config(replay={"warmup_steps": 200, "samples_per_insert": 8, "slack_steps": 100})
    run = start(client, config)
    token = take(client, run)
    play_steps(client, run, token, 600)
    steps = runs.state(client, run).appended_steps
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    most = (steps - 200) * 8 // 32
    with training(learner):
        until(lambda: learner.num_updates >= most)
        time.sleep(0.2)
        assert learner.num_updates == most  # it waits for more play
        allowance = runs.state(client, run).allowance
        assert 200 + most * 32 / 8 + 100 - 100 / 8 - 1 <= allowance <= 200 + most * 32 / 8 + 100
    row = metrics.last(client, run)
    assert row["samples_per_insert"] <= 8 and row["env_steps"] == steps


def test_a_resumed_learner_goes_on_bit_equal_from_the_checkpoint_and_the_stream(
    client: Redis, server
) -> None:
    run = start(client, target_config(stop={"return": None}))
    token = take(client, run)
    play_steps(client, run, token, 800)
    first = make_learner(client, run, token, server.url)
    first.restore()
    with training(first):
        until(lambda: first.num_updates >= 50)
    first.finish()
    second = make_learner(client, run, take(client, run), server.url)
    second.restore()
    assert second.counters.updates == first.num_updates and second.counters.cursor == first.counters.cursor
    assert second.counters.elapsed_s == pytest.approx(first.counters.elapsed_s, abs=1.0)
    for name, array in vars(gather_all(first.experience)).items():
        np.testing.assert_array_equal(array, getattr(gather_all(second.experience), name), err_msg=name)
    for name, tensor in first.algorithm.state().items():
        assert torch.equal(tensor, second.algorithm.state()[name]), name
    assert (
        second.service._row(time.monotonic() + 1)["updates_per_s"] == 0
    )  # rates do not count what was restored
    assert second.version == first.version + 1  # the restored weights are published as the next version
    with pytest.raises(lease.LeaseLostError):  # at the latest when it renews
        until(lambda: first.serve() is not None)
    second.stopping.set(), second.finish()


def test_without_checkpoint_the_replay_still_comes_from_the_stream_and_without_stream_there_is_none(
    client: Redis, server
) -> None:
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 500)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    until(lambda: learner._feed is not None and learner._feed.ready)
    with training(learner, serve=False):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    assert len(learner.experience) >= 500
    learner.finish()

    client.delete(keys.experience(run))
    empty = make_learner(client, run, take(client, run), server.url)
    empty.restore()
    assert empty.counters.updates == learner.num_updates  # the weights are there
    assert len(empty.experience) == 0  # the replay was only in the stream
    empty.finish()


def test_the_lease_is_renewed_while_the_view_is_rebuilt(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million images take longer than a lease lasts: whoever takes over meanwhile ends it, at the next entry."""
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 500)
    first = make_learner(client, run, token, server.url)
    first.restore()
    with training(first):
        until(lambda: first.num_steps == runs.state(client, run).appended_steps)
    first.finish()
    assert first.counters.admitted > 5
    monkeypatch.setattr(service_module, "RENEW_S", 0.0)
    second = make_learner(client, run, take(client, run), server.url)
    admit, admitted = second.experience.admit, []

    def slow(fragment: object, entry_id: bytes, *, version: int) -> None:
        if not admitted:
            client.delete(keys.lease(run))  # as if it had expired
        else:
            assert client.exists(keys.lease(run))
        admitted.append(entry_id)
        admit(fragment, entry_id, version=version)
        if len(admitted) == 3:
            take(client, run)

    monkeypatch.setattr(second.experience, "admit", slow)
    with pytest.raises(lease.LeaseLostError):
        second.restore()
    assert len(admitted) == 3


def test_updates_go_on_while_a_backlog_is_admitted(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "ADMIT_S", 0.0)  # one entry, then perhaps an update
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 1000)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    backlog = runs.state(client, run).appended_fragments
    until(lambda: learner._feed is not None and len(learner._feed) == backlog)
    at_update: list[int] = []
    update = learner._update

    def noted(batch: object) -> None:
        at_update.append(learner.accounts.consumed)
        update(batch)

    monkeypatch.setattr(learner, "_update", noted)
    with training(learner):
        until(lambda: learner.accounts.consumed == backlog and len(at_update) > 5)
    learner.finish()
    assert at_update[0] < backlog - 5  # the warm-up is a fifth of the backlog
    assert learner.counters.admitted == backlog


def test_no_fragment_larger_than_those_of_the_run_is_taken(client: Redis, server) -> None:
    run = start(client, target_config())
    token = take(client, run)
    players = play_steps(client, run, token, 300)
    fragment = codec.decode(stream.read(client, run, b"0-0", count=1)[0].fields)
    doubled = {
        name: np.concatenate([getattr(fragment, name)] * 2, axis=1)
        for name in ("observation", "action", "reward", "terminated", "truncated")
    }
    index = np.argwhere(doubled["truncated"]).astype(np.int32)
    finals = np.zeros((len(index), *fragment.observation.shape[2:]), np.float32)
    wide = dataclasses.replace(fragment, **doubled, final_index=index, final_observation=finals)
    fields = codec.encode(wide)
    stream.append(client, run, fields, producer=99, incarnation=1, seq=0, num_transitions=8)
    play_steps(client, run, token, 100, players=players)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    learner.finish()
    assert learner.counters.dead == 1
    ((_, told),) = client.xrange(keys.dead(run))
    assert told[b"reason"].endswith(b"those of the run are at most (20, 4, 0)")


def test_bad_entries_go_to_dead_with_the_reason_and_learning_goes_on(client: Redis, server) -> None:
    run = start(client, target_config())
    token = take(client, run)
    players = play_steps(client, run, token, 300)
    for number, poison in enumerate((b"{}", b"\xff\xfe", b"not json")):
        stream.append(client, run, {b"h": poison}, producer=99, incarnation=1, seq=number, num_transitions=8)
    foreign = dict(stream.read(client, run, b"0-0", count=1)[0].fields)
    foreign[b"h"] = foreign[b"h"].replace(run.encode(), b"other-0101-000000-0000")
    client.xadd(keys.experience(run), foreign)  # not by the append: no counters that could be believed
    play_steps(client, run, token, 300, players=players)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
        until(lambda: learner.num_updates >= 20)
    learner.finish()
    dead = client.xrange(keys.dead(run))
    assert learner.counters.dead == len(dead) == 4
    again = make_learner(client, run, take(client, run), server.url)
    again.restore()  # the refused ones do not stand in the way
    assert len(again.experience) == len(learner.experience)
    again.finish()
    assert (
        learner.counters.admitted == runs.state(client, run).appended_fragments - 3
    )  # the fourth was never appended
    assert any(b"does not belong" in fields[b"reason"] for _, fields in dead)


def test_a_flood_of_bad_entries_waits_until_it_is_told_and_updates_go_on(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddrl.learner.loop.MOST_REFUSED", 100)
    run = start(client, target_config())
    token, num = take(client, run), 5_000
    play_steps(client, run, token, 300)
    with client.pipeline() as pipe:
        for _ in range(num):
            pipe.xadd(keys.experience(run), {b"h": b"{}"})
        pipe.execute()
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner, serve=False):
        until(lambda: len(learner._board.refused) >= 100 and learner.num_updates >= 20)
        waiting = len(learner._board.refused)
        time.sleep(0.3)
        assert len(learner._board.refused) == waiting < num
        learner.serve()
        assert waiting - 100 <= len(learner._board.refused)  # other things are told too
        until(lambda: learner.serve() or learner.counters.dead == num)
    learner.finish()
    assert runs.state(client, run).dead == num and not learner._board.refused


def test_a_fragment_of_other_spaces_is_refused_even_as_the_first_one(client: Redis, server) -> None:
    from dataclasses import replace

    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 40)
    first = stream.read(client, run, b"0-0", count=1)[0]
    fragment = codec.decode(first.fields)
    wide = replace(
        fragment,
        producer=77,
        observation=np.repeat(fragment.observation, 2, axis=-1),
        final_observation=np.repeat(fragment.final_observation, 2, axis=-1),
    )
    client.delete(keys.experience(run))
    stream.append(client, run, codec.encode(wide), producer=77, incarnation=1, seq=0, num_transitions=8)
    play_steps(client, run, token, 300)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    learner.finish()
    assert learner.counters.dead == 1 and len(learner.experience) >= 300
    reason = client.xrange(keys.dead(run))[0][1][b"reason"]
    assert reason.startswith(b"spaces: observation and action are ('float32', (2,), (1,))")


def test_a_learner_without_checkpoint_keeps_the_weights_that_were_there(client: Redis, server) -> None:
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 40)
    weights.publish(client, run, token, version=1, blob=b"learned", allowance=0, updates=9)
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    assert learner.version == 1 and weights.index(client, run).latest == 1
    assert runs.state(client, run).allowance > 0
    learner.finish()


def test_large_fragments_do_not_block_the_budget(client: Redis, server) -> None:
    run = start(client, target_config(stop={"return": None}))
    client.hset(keys.state(run), "max_bytes", 12_000)  # eight fragments
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.service.retention.max_bytes = 12_000
    learner.restore()
    with training(learner):
        players = None
        for _ in range(20):
            players = play_steps(client, run, token, 80, players=players)
    learner.finish()
    state = runs.state(client, run)
    assert state.appended_bytes > 2 * 12_000 and state.live_bytes <= 12_000


def test_trimming_keeps_what_view_and_checkpoint_need_and_memory_below_the_budget(
    client: Redis, server
) -> None:
    config = target_config(
        replay={"capacity": 400, "warmup_steps": 100, "slack_steps": 400, "max_bytes": 10**6},
        rollout={"max_fragment_steps": 10},
    )
    run = start(client, config)
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        players = play_steps(client, run, token, 600)
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
        play_steps(client, run, token, 600, players=players)
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
        until(lambda: client.xlen(keys.experience(run)) < runs.state(client, run).appended_fragments)
    learner.finish()
    found = checkpoints.load(client, run)
    assert found is not None
    oldest = stream.read(client, run, b"0-0", count=1)[0].entry_id
    assert oldest.decode() <= found[1]["oldest"]
    again = make_learner(client, run, take(client, run), server.url)
    again.restore()
    assert len(again.experience) == len(learner.experience)
    again.finish()


def test_a_full_stream_forces_a_checkpoint_and_a_trim_and_play_goes_on(client: Redis, server) -> None:
    config = target_config(
        replay={"capacity": 100_000, "max_bytes": 65536, "samples_per_insert": 1, "slack_steps": 4000},
        learner={"checkpoint_every_s": 3600},
        rollout={"max_fragment_steps": 10},
    )
    run = start(client, config)
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        players = None
        for _ in range(12):
            players = play_steps(client, run, token, 400, players=players)
            assert runs.state(client, run).live_bytes <= 65536
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    learner.finish()
    state = runs.state(client, run)
    assert state.appended_bytes > 2 * 65536, "the budget was used several times over"
    assert learner.counters.admitted == state.appended_fragments


def test_versions_are_published_in_time_and_pruned(client: Redis, server) -> None:
    run = start(client, target_config(learner={"publish_every_s": 0.02}))
    tree = runs.config(client, run).model_dump(by_alias=True, mode="json") | {
        "weights": {"keep_last": 3, "keep_every": 10}
    }
    from ddrl.config import validate

    client.set(keys.spec(run), validate(tree).model_dump_json(by_alias=True))
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    assert weights.index(client, run).latest == 0  # version 0 has learned nothing
    with training(learner):
        players = play_steps(client, run, token, 400)
        until(lambda: learner.version >= 1)
        while learner.version < 25:
            players = play_steps(client, run, token, 100, players=players)
    learner.finish()
    index = weights.index(client, run)
    newest = set(sorted(index.sizes)[-4:])  # three, and the one published since the last pruning
    spaced = {version for version in range(index.latest) if version % 10 == 0}
    assert index.latest in newest and set(index.sizes) <= newest | spaced and {0, 10, 20} <= set(index.sizes)
