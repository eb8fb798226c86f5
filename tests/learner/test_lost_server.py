"""A server comes back empty or older: learners restore their runs, and play goes on."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.learners import Run, endless_config, finished, pick_config, playing, training, until, within
from support.private_server import PrivateServer
from support.processes import Processes
from support.runs import target_config
from support.store import end

from ddrl.config import RunConfig
from ddrl.learner import loop
from ddrl.learner import run as run_module
from ddrl.learner.core import Core
from ddrl.learner.loop import Learner
from ddrl.replay import reader
from ddrl.store import checkpoints, connection, keys, leases, local_checkpoints, runs, weights
from ddrl.store.local_checkpoints import Snapshot


def on_policy_config() -> RunConfig:
    return pick_config(stop={"time": 3600}, evaluation={"every_s": 3600, "near": 0})


def go_on(run: Run, after: runs.RunState) -> None:
    """Wait for more updates, fragments and versions than there were."""

    def has_gone_on() -> bool:
        with contextlib.suppress(runs.UnknownRunError, *connection.UNREACHABLE):
            now = run.state
            pairs = ((now.updates, after.updates), (now.appended_fragments, after.appended_fragments))
            return now.version > after.version and all(new > old for new, old in pairs)
        return False

    until(has_gone_on, 60.0)


def saved(learner: Learner, run: Run, runs_folder: Path) -> Snapshot:
    """Return the snapshot of a learner that has finished, which is in the run's folder too; release the run."""
    learner.finish()
    blob, meta = checkpoints.load(run.client, run.id)
    snapshot = Snapshot(run.id, run.token, local_checkpoints.record(run.client, run.id), meta, blob)
    local_checkpoints.write(runs_folder / run.id, snapshot)
    leases.release(run.client, run.id, run.token)
    return snapshot


def beginnings(text: str) -> list[str]:
    """Return where a learner's attempts began, by its log."""
    return [line.partition("starts at ")[2] for line in text.splitlines() if "starts at update" in line]


# --- a learner restores its run --------------------------------------------------------------------------


def empty(server: PrivateServer) -> Callable[[], object]:
    """The server comes back empty."""

    def come_back() -> None:
        server.kill()
        server.start()

    return come_back


def older(server: PrivateServer) -> Callable[[], object]:
    """The server comes back as it is now."""
    server.client.save()

    def come_back() -> None:
        server.kill()
        server.start()
        (server.folder / "dump.rdb").unlink()

    return come_back


@pytest.mark.faults
@pytest.mark.parametrize("lose", [empty, older])
@pytest.mark.parametrize("make_config", [endless_config, on_policy_config])
def test_a_learner_restores_its_run_on_a_server_that_lost_data(
    server, learn, log, lose: Callable[..., Any], make_config: Callable[..., RunConfig]
) -> None:
    run = Run(server, make_config())
    submitted, config = run.state, runs.config(run.client, run.id)
    learning = learn(run)
    with playing(run.url, run.id):
        go_on(run, submitted)
        lose_now, version = lose(server), run.state.version
        until(lambda: run.state.version > version + 3 and run.meta)
        before = run.state
        lose_now()
        with within(10.0, "server lost data -> play and updates beyond those of before"):
            until(lambda: "restored" in run.journal)  # a busy machine may play on before it is noticed
            go_on(run, before)
    assert (run.state.created_s, run.state.first_step_s) == (before.created_s, before.first_step_s)
    assert run.state.status == "active" and runs.config(run.client, run.id) == config
    assert run.journal.count("restored") == 1 and "restored" in log.text and learning.thread.is_alive()
    learning.end()
    lost = range(version + 1, before.version + 1)
    assert not {*lost} & run.index.sizes.keys()  # no version names two weights
    audit = run.audit()
    assert audit.total("consumed") > 0 and audit.total("refused") == 0
    if lose is empty:
        assert "holding 0 transitions" in beginnings(log.text)[-1]  # the replay is lost


def test_a_server_that_came_back_older_is_noticed_however_much_is_appended_since(run, server) -> None:
    learner = run.learner()
    run.play(200)
    come_back = older(server)
    run.play(200)
    with training(learner, serves=False):
        run.catch_up(learner)
    learner.stopping.clear()
    lost = learner.shared.ledger.fragments
    come_back()
    run.play(800)
    assert run.state.appended_fragments > lost
    limit = threading.Timer(60.0, learner.stopping.set)
    limit.start()
    with pytest.raises(
        connection.RunGoneError, match=f"the server came back older, fragment \\d+ came after {lost}"
    ):
        learner.train()
    limit.cancel()
    learner.close()


def test_a_server_that_lost_nothing_is_no_older_one_because_an_entry_is_repeated(
    run, server, log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LATEST_S", 0.0)
    learner = run.learner()
    with training(learner, serves=False):
        run.play(200)
        run.catch_up(learner)
        older(server)()
        for _ in range(2):  # the reader may have looked up which server it is before, and read from this one
            run.play(200)
            run.catch_up(learner)
        run.client.xadd(keys.experience(run.id), run.entries[-2].fields)
        run.catch_up(learner)
    learner.close()
    assert "is repeated, its newest is" in log.text


@pytest.mark.parametrize("kept_steps", [0, 100])
def test_the_audit_counts_what_was_read_of_a_producer_that_did_not_live_to_see_the_server_again(
    run, server, tmp_path: Path, kept_steps: int
) -> None:
    learner = run.learner()
    if kept_steps:
        run.play(kept_steps)
    come_back = older(server)
    run.play(200)
    with training(learner, serves=False):
        run.catch_up(learner)
    counters, state = learner.checkpoint()
    learner.close()
    record = local_checkpoints.record(run.client, run.id)
    snapshot = Snapshot(run.id, run.token, record, asdict(counters), weights.encode_weights(state))
    local_checkpoints.write(tmp_path, snapshot)
    come_back()
    assert local_checkpoints.restore_newer(run.client, run.id, run.take(after=snapshot.token), tmp_path)
    assert run.state.appended_fragments == counters.fragments
    with finished(run) as second:
        run.play(100, anew=True)
        run.catch_up(second)
    audit = run.audit()
    assert len(audit.accounts) == 2 and audit.total("consumed") == run.state.appended_fragments


def test_a_standby_leaves_the_restoring_to_the_holder(run, learn, log) -> None:
    holder = learn(run)
    until(lambda: holder.holds_after(0) and run.index.sizes)
    standby, token = learn(run), run.token
    until(lambda: "waits for it" in log.text)
    run.client.flushall()
    until(lambda: holder.holds_after(token) and "restored from" in log.text)
    threads = [record.threadName for record in log.records if "restored from" in record.message]
    assert threads == [holder.thread.name] and standby.thread.is_alive()


def test_after_a_loss_the_former_replay_is_gone_before_anything_collects_it(
    run, learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, replays = Core.__init__, weakref.WeakSet[Any]()

    def note(core: Core, *arguments: Any) -> None:
        make(core, *arguments)
        replays.add(core.replay)

    monkeypatch.setattr(Core, "__init__", note)
    learning = learn(run)
    gc.disable()
    try:
        for _ in range(3):
            until(lambda: learning.holds_after(0) and run.index.sizes)
            token = run.token
            run.client.flushall()
            until(lambda token=token: learning.holds_after(token) and run.index.sizes)
            until(lambda: run.client.hexists(keys.state(run.id), "needed_bytes"))
            assert len(replays) == 1
    finally:
        gc.enable()


def test_a_run_that_is_deleted_while_its_lease_is_taken_stays_deleted(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = run.learner()
    saved(learner, run, tmp_path)
    acquire = local_checkpoints.acquire

    def acquire_too_late(*args: Any, **options: Any) -> int | None:
        end(run.client, run.id)
        runs.delete(run.client, run.id)
        return acquire(*args, **options)

    monkeypatch.setattr(local_checkpoints, "acquire", acquire_too_late)
    monkeypatch.setattr(run_module, "RETURN_S", 0.5)
    with pytest.raises(connection.StoreError, match="was deleted"):
        run_module.learn(run.client, run.id, tmp_path, threading.Event())


def test_a_learner_or_resume_restores_a_run_from_its_folder(run, learn, processes: Processes, log) -> None:
    before = run.state
    for restored_by in ("nobody", "learner", "resume"):
        if restored_by == "resume":
            done = processes.ddrl(run.url, "resume", run.id, "--detach", "--json")
            assert json.loads(done.stdout)["run"] == run.id
            assert f"{run.id}: the server does not know it; restored from" in done.stderr
        learning = learn(run)
        until(lambda one=learning: one.holds_after(0))
        with playing(run.url, run.id):
            go_on(run, before)
        learning.end()
        begin = beginnings(log.text)[-1]
        assert begin.startswith(f"update {before.updates},") and "holding 0" in begin
        before = run.state
        run.client.flushall()
    assert log.text.count("restored from") == 1
    warmup = target_config().replay.warmup_steps
    assert f"updates go on after {warmup} more steps" in log.text


def test_a_paused_run_is_restored_paused_and_waited_for(run, learn, tmp_path: Path) -> None:
    learning = learn(run)
    until(lambda: local_checkpoints.token(tmp_path / "runs" / run.id, run.id))
    runs.set_status(run.client, run.id, "paused", "by the test")
    token = run.token
    learning.thread.join(1.0)
    run.client.flushall()
    until(lambda: runs.status(run.client, run.id))
    assert run.state.status == "paused"
    runs.reactivate(run.client, run.id)
    until(lambda: learning.holds_after(token))


@pytest.mark.parametrize(("module", "name"), [(leases, "acquire"), (loop, "Reader")])
def test_a_run_that_is_lost_while_its_attempt_begins_is_restored(
    run, learn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    snapshot, call = saved(run.learner(), run, tmp_path / "runs"), getattr(module, name)

    def lost_after(*arguments: Any, **options: Any) -> Any:
        answer = call(*arguments, **options)
        run.client.flushall()
        monkeypatch.setattr(module, name, call)
        return answer

    monkeypatch.setattr(module, name, lost_after)
    learning = learn(run)
    until(lambda: getattr(module, name) is call and learning.holds_after(snapshot.token + 1))
    until(lambda: run.index.latest == 1 and set(run.index.sizes) == {1})  # as another version


def test_a_failed_save_leaves_the_checkpoint_before(server, learn, tmp_path: Path, monkeypatch, log) -> None:
    run = Run(server, endless_config(learner={"checkpoint_every_s": 3600}))
    saved(run.learner(), run, tmp_path / "runs")
    learning = learn(run)
    until(lambda: run.client.hexists(keys.state(run.id), "needed_bytes"))  # written once it is restored
    token = run.token

    def fail(_: Learner) -> None:
        raise MemoryError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "checkpoint", fail)
        run.client.flushall()
        until(lambda: learning.holds_after(token))
    assert "state cannot be saved" in log.text


@pytest.mark.parametrize("excess", [0, 3000], ids="{} steps beyond the budget".format)
def test_a_lost_replay_is_warmed_up_again_before_updates_go_on(
    server, tmp_path: Path, monkeypatch, excess: int
) -> None:
    pace = {"warmup_steps": 200, "samples_per_insert": 8, "slack_steps": 100}
    run = Run(server, endless_config(replay=pace))
    run.play(600)
    first, most = run.learner(), (run.state.appended_steps - 200) * 8 // 32
    with training(first):
        until(lambda: first.shared.updates == most)
        monkeypatch.setattr(
            first, "_update", lambda: False
        )  # many processes may each append a fragment too many
        run.play(excess)
        run.catch_up(first)
    snapshot = saved(first, run, tmp_path)
    run.client.flushall()
    assert local_checkpoints.restore(run.client, snapshot)
    second = run.learner()
    shared, lost = second.shared, second.shared.env_steps
    assert len(second.replay) == 0 and shared.updates == most
    assert lost + 200 <= run.state.allowance <= lost + 200 + 100  # for the warm-up, and the slack
    with training(second):
        run.play(150, anew=True)
        run.catch_up(second)
        assert shared.updates == most
        run.play(250)
        refilled = shared.refilled
        assert excess <= refilled - 200 < excess + 16
        most = (run.state.appended_steps - 200 - refilled) * 8 // 32
        until(lambda: shared.updates == most)
    second.finish()
    third = run.learner()  # what was refilled once stays so
    assert third.counters.refilled == refilled and third.shared.updates == most
    third.close()


def test_steps_that_left_the_stream_unread_do_not_fill_the_allowance(server) -> None:
    run = Run(
        server, endless_config(replay={"warmup_steps": 200, "samples_per_insert": 8, "slack_steps": 100})
    )
    run.play(600)
    with finished(run) as first:
        run.catch_up(first)
    run.play(3000)
    run.client.xtrim(keys.experience(run.id), maxlen=0, approximate=False)
    second = run.learner()
    with training(second):
        until(lambda: run.state.appended_steps == second.shared.env_steps)
        assert run.state.allowance >= run.state.appended_steps + 200


# --- with processes --------------------------------------------------------------------------------------


@pytest.mark.faults
def test_processes_go_on_after_a_restart_and_leave_a_deleted_run(server, run, processes: Processes) -> None:
    folder, submitted = processes.folder / "runs", run.state
    processes.worker(run.url)
    learner = processes.learner(run.url, run.id)
    go_on(run, submitted)
    until(lambda: local_checkpoints.token(folder / run.id, run.id))
    before = run.state
    server.kill()
    server.start()
    with within(10.0, "server restarted empty -> play and updates beyond those of before"):
        go_on(run, before)
    assert runs.names(run.client) == [run.id] and run.journal.count("restored") == 1 and learner.running

    learner.send_signal(signal.SIGSTOP)  # the run is deleted while its learner is stalled, and stays deleted
    end(run.client, run.id)
    until(lambda: not run.state.leased)
    runs.delete(run.client, run.id)
    learner.send_signal(signal.SIGCONT)
    assert learner.wait() != 0
    assert f"run {run.id}: was deleted" in learner.text().splitlines()[-1]
    assert runs.names(run.client) == [] and not run.client.keys(keys.run_pattern(run.id))
    with pytest.raises(connection.StoreError, match="was deleted"):
        run_module.learn(run.client, run.id, folder, threading.Event())
    assert leases.acquire(run.client, run.id, host="here", folder="/tmp") is None
