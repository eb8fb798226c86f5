"""What a learner begins with: a run planted again, experience that was rescued or none; and sessions gone wrong."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from redis import Redis
from support.runs import play_steps, start, target_config
from support.sessions import Learning
from test_learner import make_learner, take, training, until
from test_on_policy_learner import pick_config, playing

from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.learner import run as runner
from ddrl.learner import session
from ddrl.learner.dispatcher import Dispatcher
from ddrl.learner.loop import Learner
from ddrl.replay.fifo import Fifo
from ddrl.replay.replay import Replay
from ddrl.store import checkpoints, connection, copies, keys, ledger, runs, seeds, stream, weights
from ddrl.store import leases as lease
from ddrl.store.checkpoints import Counters


@pytest.fixture
def client(server) -> Redis:
    return server.client


def seed_of(client: Redis, run: str, token: int, learner: Learner) -> seeds.Seed:
    """What a learner holds."""
    known = seeds.known(client, run)
    counters, state = learner.snapshot()
    blob = weights.encode_weights({name: tensor.numpy() for name, tensor in state.items()})
    return seeds.Seed(run, token, known, asdict(counters), blob)


def planted(client: Redis, seed: seeds.Seed) -> int:
    """Lose the run, and plant it again; the next learner's token."""
    client.flushall()
    assert seeds.plant(client, seed)
    return take(client, seed.run)


def successor(client: Redis, url: str, run: str, token: int, held: Replay | Fifo | None) -> Learner:
    config = runs.config(client, run)
    resolved = base.resolve(config, runs.spaces(client, run))
    blocking, device = connection.connect_blocking(url), torch.device("cpu")
    learner = Learner(client, blocking, run, token, config, resolved, device=device, held=held)
    learner.restore()
    return learner


def off_policy() -> RunConfig:
    return target_config(replay={"warmup_steps": 200, "samples_per_insert": 8, "slack_steps": 100})


def learned(client: Redis, url: str) -> tuple[str, int, Learner]:
    """A run that has learned all that it may from 600 steps."""
    run = start(client, off_policy())
    token = take(client, run)
    play_steps(client, run, token, 600)
    learner = make_learner(client, run, token, url)
    learner.restore()
    most = (runs.state(client, run).appended_steps - 200) * 8 // 32
    with training(learner):
        until(lambda: learner.num_updates == most)
    return run, token, learner


def test_rescued_experience_goes_on_as_if_nothing_had_happened(client: Redis, server) -> None:
    run, token, first = learned(client, server.url)
    seed = seed_of(client, run, token, first)
    first.leave(keep_experience=True)
    token = planted(client, seed)
    second = successor(client, server.url, run, token, first.experience)
    assert second.num_updates == first.num_updates and second.num_steps == first.num_steps
    assert len(second.experience) == second.num_steps and second.version == first.version + 1
    with training(second):
        play_steps(client, run, token, 80)
        most = (runs.state(client, run).appended_steps - 200) * 8 // 32
        until(lambda: second.num_updates == most)  # the pace goes on
    second.finish()
    assert len(second.experience) == second.num_steps == runs.state(client, run).appended_steps
    assert ledger.audit(client, run).is_balanced


def test_without_it_the_view_is_warmed_up_anew_before_updates_go_on(client: Redis, server) -> None:
    run, token, first = learned(client, server.url)
    seed = seed_of(client, run, token, first)
    first.leave()
    token = planted(client, seed)
    second = successor(client, server.url, run, token, None)
    before, lost = second.num_updates, second.num_steps
    assert len(second.experience) == 0 and before == first.num_updates
    allowance = runs.state(client, run).allowance
    assert lost + 200 <= allowance <= lost + 200 + 100  # room for the warm-up, and for the slack
    with training(second):
        players = play_steps(client, run, token, 150)
        until(lambda: second.num_steps == runs.state(client, run).appended_steps)
        assert second.num_updates == before
        play_steps(client, run, token, 250, players=players)
        most = (runs.state(client, run).appended_steps - 200 - 200) * 8 // 32
        until(lambda: second.num_updates == most)
    second.finish()
    third = make_learner(client, run, take(client, run), server.url)
    third.restore()  # what was refilled once stays so
    assert third.counters.refilled == 200 and third.num_updates == most
    third.leave()


def test_a_run_lost_before_its_first_update_publishes_again(client: Redis, server) -> None:
    run = start(client, off_policy())
    token = take(client, run)
    first = make_learner(client, run, token, server.url)
    first.restore()
    seed = seed_of(client, run, token, first)
    first.leave()
    second = successor(client, server.url, run, planted(client, seed), None)
    index = weights.index(client, run)
    assert index.latest == second.version == 1 and set(index.sizes) == {1}
    second.leave()


@pytest.mark.parametrize("is_rescued", [True, False])
def test_an_on_policy_run_goes_on_with_its_next_version(client: Redis, server, is_rescued: bool) -> None:
    run = start(client, pick_config())
    token = take(client, run)
    first = make_learner(client, run, token, server.url)
    first.restore()
    with training(first), playing(server.url, run):
        until(lambda: first.version >= 3)
    seed = seed_of(client, run, token, first)
    version = first.version
    first.leave(keep_experience=is_rescued)
    token = planted(client, seed)
    second = successor(client, server.url, run, token, first.experience if is_rescued else None)
    assert second.version == weights.index(client, run).latest == version + 1
    with training(second), playing(server.url, run):
        until(lambda: second.version >= version + 4)
    second.finish()
    assert ledger.audit(client, run).is_balanced


def test_a_run_that_the_servers_memory_cannot_hold_fails_before_it_begins(
    client: Redis, server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    run = start(client, target_config())
    client.config_set("maxmemory", 550 * 1024**2)  # replay.max_bytes alone is 512 MiB
    try:
        with pytest.raises(
            ConfigError, match="needs up to 6.. MiB of the server, but its maxmemory is 550 MiB"
        ):
            runner.learn(client, run, tmp_path, runner.Interrupt())
    finally:
        client.config_set("maxmemory", 0)
    state = runs.state(client, run)
    assert state.status == "failed" and "lower replay.max_bytes, or raise maxmemory" in state.reason
    assert not state.leased


# --- sessions that go wrong --------------------------------------------------------------------------------


@pytest.fixture
def learn(client: Redis, server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts what learns a run, and ends it."""
    monkeypatch.setattr(runner, "RETURN_S", 0.5)
    begun: list[Learning] = []

    def learn(run: str) -> Learning:
        begun.append(Learning(client, server.url, run, tmp_path, monkeypatch))
        return begun[-1]

    yield learn
    for learning in begun:
        learning.end()


def endless() -> RunConfig:
    return target_config(
        stop={"return": None, "time": 3600}, evaluation={"every_s": 3600, "near": 0}, env={"num_envs": 1}
    )


def test_a_run_that_goes_while_its_session_begins_is_planted_again(
    client: Redis, learn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, endless())
    token = take(client, run)
    counters = Counters(updates=3, ledger={})
    copies.write(
        tmp_path / run,
        seeds.Seed(run, token, seeds.known(client, run), asdict(counters), blob_of(client, run)),
    )
    lease.release(client, run, token)
    acquire = lease.acquire

    def lost_at_once(*arguments, **options):
        found = acquire(*arguments, **options)
        monkeypatch.setattr(lease, "acquire", acquire)
        client.flushall()
        return found

    monkeypatch.setattr(lease, "acquire", lost_at_once)
    learning = learn(run)
    until(lambda: learning.error is not None or learning.held_with(token + 1))
    assert learning.error is None and runs.state(client, run).updates == 3


def blob_of(client: Redis, run: str) -> bytes:
    """The tensors with which a learner of a run begins."""
    algorithm = base.resolve(runs.config(client, run), runs.spaces(client, run)).learner(
        device=torch.device("cpu"), seed=1
    )
    return weights.encode_weights({name: value.numpy() for name, value in algorithm.state().items()})


def test_a_learner_that_can_keep_nothing_of_a_lost_run_goes_on_from_its_copy(
    client: Redis, learn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, endless())
    learning = learn(run)
    until(lambda: (tmp_path / run / "checkpoint" / "checkpoint.json").exists())
    fence, taken = learning.fence, Learner._taken
    failed: list[Learner] = []

    def fail_once(learner: Learner):
        if client.exists(keys.state(run)) or failed:
            return taken(learner)
        failed.append(learner)
        raise MemoryError("no memory for a copy")

    monkeypatch.setattr(Learner, "_taken", fail_once)
    client.flushall()
    until(lambda: learning.held_with(fence))
    assert failed and learning.error is None


def test_a_snapshot_that_fails_leaves_the_learner_to_others(client: Redis, server, monkeypatch) -> None:
    run = start(client, off_policy())
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    taken: list[Counters] = []
    with monkeypatch.context() as patch:
        patch.setattr(learner, "_taken", lambda: {}["damaged"])
        with pytest.raises(KeyError):
            learner.snapshot()
    thread = threading.Thread(target=lambda: taken.append(learner.snapshot()[0]), daemon=True)
    thread.start()
    thread.join(10.0)
    assert taken
    learner.leave()


def test_a_learner_whose_service_thread_hangs_loses_its_run(
    client: Redis, learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENT_S", 1.0)
    run, freed = start(client, endless()), threading.Event()
    monkeypatch.setattr(Dispatcher, "tick", lambda _: freed.wait())
    learning = learn(run)
    try:
        until(lambda: learning.held_with(0))
        until(lambda: not runs.state(client, run).leased)
        assert lease.acquire(client, run, host="there", folder="/tmp")
    finally:
        freed.set()
    learning.thread.join(30.0)
    assert isinstance(learning.error, lease.LeaseLostError)


def test_a_run_that_ends_while_its_stream_fills_the_server_ends(
    client: Redis, learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, endless())
    token, append = take(client, run), stream.append
    with monkeypatch.context() as patch:
        patch.setattr(
            stream,
            "append",
            lambda a, b, fields, **more: append(a, b, {**fields, b"x": bytes(10**5)}, **more),
        )
        play_steps(client, run, token, 1_000)
    lease.release(client, run, token)
    entries = stream.read(client, run, b"0-0", count=1_000)
    learning = learn(run)
    until(lambda: (checkpoints.meta(client, run) or {}).get("cursor") == entries[-1].entry_id.decode())
    num = client.xlen(keys.experience(run))
    assert num == len(entries) > 40
    close = session.Session._close

    def close_when_full(ending: session.Session) -> str | None:
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 2_000_000)
        return close(ending)

    monkeypatch.setattr(session.Session, "_close", close_when_full)
    try:
        runs.set_status(client, run, "stopped", "by the test")
        learning.thread.join(30.0)
        assert learning.status == "stopped" and not runs.state(client, run).leased
        assert 0 < client.xlen(keys.experience(run)) < num  # room was made, of no more than was needed
        assert ledger.audit(client, run).is_balanced
    finally:
        client.config_set("maxmemory", 0)


def test_who_waits_for_a_paused_run_waits_on_when_its_learner_has_died(
    client: Redis, learn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = start(client, endless())
    token = take(client, run)
    client.persist(keys.lease(run))
    learning = learn(run)
    until(lambda: "waits for it" in caplog.text)
    runs.set_status(client, run, "paused", "by the test")
    lease.release(client, run, token)
    learning.thread.join(1.5)
    assert learning.thread.is_alive() and learning.error is None
    runs.reactivate(client, run)
    until(lambda: learning.held_with(token))
