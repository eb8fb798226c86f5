"""The service thread: servers that cannot serve are waited out, replaced learners write nothing, settings count."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from redis import Redis
from support.runs import play_steps, start, target_config
from test_learner import make_learner, take, training, until

from ddrl.config import RunConfig, validate
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, connection, keys, ledger, metrics, runs, stream, weights
from ddrl.store import leases as lease
from ddrl.store.checkpoints import Counters


@pytest.fixture
def client(server) -> Iterator[Redis]:
    """The server's, which serves again afterwards."""
    yield server.client
    server.client.execute_command("REPLICAOF", "NO", "ONE")
    server.client.config_set("maxmemory", 0)


def config(**sections: Any) -> RunConfig:
    replay = {"capacity": 400, "warmup_steps": 100, "slack_steps": 10_000, "samples_per_insert": 4}
    return target_config(**{"stop": {"return": None}, "replay": replay, **sections})


@contextmanager
def served(learner: Learner) -> Iterator[list[str]]:
    """Both threads; what hinders the server is noted and waited out, as a session does."""
    said: list[str] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def train() -> None:
        try:
            learner.train()
        except BaseException as error:
            failed.append(error)

    def serve() -> None:
        while not over.wait(0.02):
            try:
                learner.serve()
            except connection.OUTAGES as error:
                text = connection.outage(error)
                if text is None:
                    failed.append(error)
                    return
                said.append(text)

    threads = [threading.Thread(target=train), threading.Thread(target=serve)]
    for thread in threads:
        thread.start()
    try:
        yield said
    finally:
        learner.stopping.set()
        threads[0].join()
        over.set()
        threads[1].join()
    assert not failed, failed


# --- hindrances ----------------------------------------------------------------------------------------


def append_large(client: Redis, run: str, num: int) -> None:
    """Fragments of a player who says no more, each with 50 kB that mean nothing."""
    fields = stream.read(client, run, b"0-0", count=1)[0].fields
    kept = {name: value for name, value in fields.items() if len(name) > 1 or name == b"h"}
    producer = stream.new_producer(client)
    for seq in range(num):
        padded = {**kept, b"padding": random.randbytes(50_000)}
        stream.append(client, run, padded, producer=producer, incarnation=1, seq=seq, num_transitions=1)


def fill_memory(client: Redis) -> Callable[[], None]:
    """Leave the server no memory: what others hold is more than its limit."""
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 20_000)  # type: ignore[index]
    return lambda: client.config_set("maxmemory", 0) and None


def refuse_writes(client: Redis) -> Callable[[], None]:
    """As in a failover: the server becomes a replica."""
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    return lambda: client.execute_command("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize(
    ("hinder", "sentence"), [(fill_memory, "memory is full"), (refuse_writes, "takes no writes")]
)
def test_what_hinders_the_server_is_waited_out_and_nothing_is_lost(
    hinder: Callable[[Redis], Callable[[], None]], sentence: str, client: Redis, server
) -> None:
    run = start(client, config())
    token = take(client, run)
    players = play_steps(client, run, token, 300)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with served(learner) as said:
        until(lambda: learner.num_updates > 10)
        undo = hinder(client)
        until(lambda: any(sentence in text for text in said))
        until(lambda: learner.accounts.consumed == runs.state(client, run).appended_fragments)
        time.sleep(1.0)
        undo()
        until(lambda: any(row["server_wait_s"] >= 1.0 for row in metrics.read(client, run)[0]))
        waited = [row["server_wait_s"] for row in metrics.read(client, run)[0]]
        play_steps(client, run, token, 300, players=players)
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
    assert sum(value > 0 for value in waited) == 1 and set(said) == {
        text for text in said if sentence in text
    }
    learner.finish()
    audit = ledger.audit(client, run)
    assert audit.is_balanced
    assert audit.total("consumed") == audit.total("appended") == learner.counters.admitted


def test_a_server_that_is_frozen_is_waited_for(make_server) -> None:
    frozen = make_server()
    client = frozen.client
    run = start(client, config())
    token = take(client, run)
    play_steps(client, run, token, 300)
    learner = make_learner(client, run, token, frozen.url)
    learner.restore()
    with served(learner):
        until(lambda: learner.num_updates > 5)
        frozen.process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)  # longer than the lease
        frozen.process.send_signal(signal.SIGCONT)
        until(lambda: any(row["server_wait_s"] > 2.0 for row in metrics.read(client, run)[0]))
    learner.finish()
    assert ledger.audit(client, run).is_balanced


def test_a_full_server_gets_memory_back_from_the_stream(client: Redis, server) -> None:
    """Others fill it: nobody but the learner can free anything, and nothing may be written before."""
    run = start(client, config(replay={"capacity": 20_000, "slack_steps": 20_000, "warmup_steps": 100}))
    token = take(client, run)
    play_steps(client, run, token, 300)
    append_large(client, run, 60)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with served(learner) as said:
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
        learner.service._checkpoint_at = 0.0
        until(lambda: learner.service.retention.checkpoint is not None)
        until(lambda: learner.service.retention.checkpoint.cursor == learner.counters.cursor)
        entries = client.xlen(keys.experience(run))
        used = int(client.info("memory")["used_memory"])  # type: ignore[index]
        client.config_set("maxmemory", used - 600_000)
        until(lambda: any("memory is full" in text for text in said))
        rows = len(metrics.read(client, run)[0])
        until(lambda: len(metrics.read(client, run)[0]) > rows + 1)  # it writes again
        assert client.xlen(keys.experience(run)) < entries
        assert learner.accounts.consumed == entries and learner.experience.view.first == 0, (
            "the view has them still"
        )
    client.config_set("maxmemory", 0)
    learner.finish()
    assert ledger.audit(client, run).is_balanced


def test_a_learner_that_begins_on_a_full_server_frees_what_it_can(client: Redis, server) -> None:
    run = start(client, config(replay={"capacity": 20_000, "slack_steps": 20_000, "warmup_steps": 100}))
    token = take(client, run)
    play_steps(client, run, token, 300)
    append_large(client, run, 60)
    first = make_learner(client, run, token, server.url)
    first.restore()
    with served(first):
        until(lambda: first.num_steps == runs.state(client, run).appended_steps)
    first.finish()
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 600_000)  # type: ignore[index]
    second = make_learner(client, run, take(client, run), server.url)
    second.restore()
    assert second.version == first.version + 1
    assert second.accounts.consumed == first.accounts.consumed > client.xlen(keys.experience(run))
    client.config_set("maxmemory", 0)
    second.finish()


# --- who was replaced ------------------------------------------------------------------------------------


def everything(client: Redis, run: str) -> dict[bytes, bytes]:
    """All keys of a run, byte by byte."""
    return {key: client.dump(key) for key in client.scan_iter(match=keys.run_pattern(run))}


def test_a_learner_that_was_replaced_writes_nothing(client: Redis, server) -> None:
    """It stalled with everything yet to be told: versions, a checkpoint, refusals, losses, ledger, figures, room."""
    run = start(client, config())
    token = take(client, run)
    players = play_steps(client, run, token, 200)
    entries = stream.read(client, run, b"0-0", count=1000)
    client.xadd(keys.experience(run), dict(entries[-1].fields))
    client.xdel(keys.experience(run), entries[1].entry_id)
    play_steps(client, run, token, 600, players=players)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    copied: list[bytes] = []
    learner.service.copy_to = lambda blob, _: copied.append(blob)
    board, service = learner._board, learner.service
    with training(learner, serve=False):
        until(lambda: learner.num_steps == runs.state(client, run).appended_steps)
        until(lambda: board.weights is not None and bool(board.refused and board.gone))
        service.retention.checkpoint = learner.snapshot()[0]
        service.retention.told = learner.counters.cursor.encode()
        board.wants_state.set()
        until(lambda: board.state is not None)
    take(client, run)
    client.delete(keys.lease(run))  # the new one's has lapsed too: still the old one must write nothing
    before = everything(client, run)
    service.adopt(config(replay={"capacity": 400, "max_bytes": 65536}))
    writes = [
        learner.serve,
        learner.finish,
        service._tell_ledger,
        service._tell_refused,
        service._publish_or_allow,
        lambda: service._save(*board.state),
        lambda: metrics.add(client, run, token, {"late": 1.0}),
        lambda: service.retention.trim(learner.counters.cursor.encode()),
        lambda: stream.allow(client, run, token, 10**9, updates=1),
    ]
    for write in writes:
        for renews in (True, False):  # also where the lease was renewed right before the pause
            service._renew_at = time.monotonic() + (0.0 if renews else 60.0)
            service._metrics_at = 0.0
            with pytest.raises(lease.LeaseLostError):
                write()
    assert everything(client, run) == before
    assert not copied


def test_many_players_are_woken_less_often(client: Redis, server) -> None:
    run = start(client, config())
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    service, told = learner.service, []
    service._experience.players = 200_000  # for a long time
    for refilled in (10**6, 2 * 10**6, 3 * 10**6):
        learner._board.refilled = refilled
        service._raise_allowance()
        told.append(int(client.hget(keys.state(run), "allowance")))
    assert 10**6 <= told[0] == told[1] == told[2]
    service._allow_at = 0.0
    service._raise_allowance()
    assert int(client.hget(keys.state(run), "allowance")) >= 3 * 10**6


def test_a_checkpoint_during_which_the_learner_is_replaced_leaves_no_part(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PART_BYTES", 4096)
    run = start(client, config())
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    learner.finish()
    good = checkpoints.load(client, run)
    assert good is not None and len(good[0]) > 5 * 4096
    calls: list[int] = []

    def between() -> None:
        calls.append(len(calls))
        if len(calls) == 4:
            take(client, run)

    stray = set(client.scan_iter(match=keys.checkpoint_pattern(run)))
    with pytest.raises(lease.LeaseLostError):
        checkpoints.save(client, run, learner.service._token, good[0], good[1], between=between)
    assert set(client.scan_iter(match=keys.checkpoint_pattern(run))) == stray
    assert checkpoints.load(client, run) == good


def test_the_lease_is_kept_between_the_parts_of_a_large_checkpoint(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PART_BYTES", 1024)
    run = start(client, config())
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    left: list[int] = []
    store = checkpoints.fenced

    def slow(*args: Any) -> Any:
        time.sleep(0.07)
        left.append(client.pttl(keys.lease(run)))
        return store(*args)

    monkeypatch.setattr(checkpoints, "fenced", slow)
    learner.finish()
    assert (
        70 * len(left) > lease.TTL_MS > min(left) > lease.TTL_MS - 2000
    )  # it took longer than a lease lasts


# --- asked of the training thread ------------------------------------------------------------------------


def test_a_snapshot_is_whole_whenever_it_is_asked_for(client: Redis, server) -> None:
    run = start(client, config())
    token = take(client, run)
    play_steps(client, run, token, 300)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    taken: list[tuple[Counters, Mapping[str, torch.Tensor]]] = [learner.snapshot()]  # before training
    with training(learner, serve=False):
        for _ in range(20):
            taken.append(learner.snapshot())
        until(lambda: learner.num_updates > 20)
        taken.append(learner.snapshot())
    taken.append(learner.snapshot())  # and after it
    for counters, state in taken:
        assert int(state["num_updates"]) == counters.updates
        rows = [list(row) for row in counters.ledger.values()]
        assert sum(row[0] for row in rows) == counters.admitted and counters.fragments >= counters.admitted
        json.dumps(vars(counters))
    assert [one.updates for one, _ in taken] == sorted(one.updates for one, _ in taken)
    assert taken[-1][0].updates > 20
    learner.finish()


def test_the_copy_of_a_checkpoint_is_the_one_that_the_server_has(client: Redis, server) -> None:
    run = start(client, config())
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    copied: list[tuple[bytes, Mapping[str, Any]]] = []
    learner.service.copy_to = lambda blob, meta: copied.append((blob, meta))
    learner.finish()
    found = checkpoints.load(client, run)
    assert found is not None and len(copied) == 1
    assert copied[0][0] == found[0] and json.loads(json.dumps(copied[0][1])) == found[1]
    assert weights.decode_weights(found[0]).keys() == learner.algorithm.state().keys()


def test_settings_that_change_while_it_learns_take_effect(client: Redis, server) -> None:
    slow = {"publish_every_s": 3600, "checkpoint_every_s": 3600, "metrics_every_s": 3600}
    run = start(client, config(learner=slow, weights={"keep_last": 50}))
    token = take(client, run)
    players = play_steps(client, run, token, 300)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    tree = runs.config(client, run).model_dump(by_alias=True, mode="json")
    tree["learner"] |= {"publish_every_s": 0.01, "checkpoint_every_s": 1, "metrics_every_s": 0.1}
    tree["weights"] |= {"keep_last": 2, "keep_every": 1000}
    tree["replay"] |= {"max_bytes": 70_000}
    tree["algorithm"] |= {"learning_rate": 1e-5}
    with training(learner):
        until(lambda: learner.num_updates > 10)
        assert learner.version == 0 and learner.service.retention.checkpoint is None
        learner.adopt(validate(tree))
        while learner.version < 6:
            play_steps(client, run, token, 100, players=players)
        until(lambda: learner.service.retention.checkpoint is not None)
        until(lambda: len(metrics.read(client, run)[0]) > 3)
    learner.finish()
    assert len(weights.index(client, run).sizes) <= 4  # the newest two, the one before pruning, version 0
    assert learner.service.retention.max_bytes == 70_000
    assert learner.algorithm._optimizers["actor"].param_groups[0]["lr"] == 1e-5
