"""A run's life on a learner's machine: it changes hands, and it is refused, ended early or waited for."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.algorithms import CPU
from support.learners import Run, endless_config, fields_of, in_threads, playing, until, within
from support.processes import EXACT, SLOW_S, Processes, bound
from support.runs import target_config

from ddrl import celery
from ddrl.algorithms import base
from ddrl.config import ConfigError
from ddrl.learner import core as core_module
from ddrl.learner import evaluations as scheduler
from ddrl.learner import run as run_module
from ddrl.learner.dispatcher import Dispatcher
from ddrl.learner.loop import Learner
from ddrl.runs import artifacts, records, submit
from ddrl.store import (
    checkpoints,
    connection,
    evaluations,
    keys,
    learners,
    leases,
    local_checkpoints,
    logs,
    runs,
    weights,
    workers,
)
from ddrl.worker.tasks import play_evaluation


@contextmanager
def held(run: Run) -> Iterator[list[connection.LeaseLostError]]:
    """Hold the run's lease as the learner on `elsewhere`, which then dies; yield the refusal if it loses the run."""
    token, stop, refused = run.take(host="elsewhere", ttl_ms=leases.TTL_MS), threading.Event(), []

    def hold() -> None:
        while not refused and not stop.wait(0.2):
            try:
                leases.renew(run.client, run.id, token)
            except connection.LeaseLostError as error:
                refused.append(error)

    with in_threads(hold, stop=stop.set):
        yield refused


def learns(run: Run, taken: int) -> None:
    """Wait for updates by the learner that was the `taken`-th to take the run."""
    until(lambda: run.token >> 16 == taken, SLOW_S)
    before = run.state.updates
    until(lambda: run.state.updates > before, SLOW_S)


def test_all_steps_of_a_fleet_that_begins_together_count(server, learn) -> None:
    run = Run(server, endless_config(env={"num_envs": 16}, learner={"metrics_every_s": 0.1}))
    queues, stop = (run.state.queue,), threading.Event()

    def beat() -> None:
        while not stop.wait(0.2):
            workers.beat(run.client, workers.Heartbeat("node", "host", 1, 200, queues, {}))

    with in_threads(beat, stop=stop.set):
        learning = learn(run)
        until(lambda: run.client.hget(keys.state(run.id), "processes") == b"200", SLOW_S)
        run.begin_together(200)
        until(lambda: run.rows and run.rows[-1]["admitted"] == 200)
    learning.end()
    assert run.rows[-1]["env_steps"] == run.state.appended_steps == 51_200


# --- a run changes hands ---------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_standby_takes_over_soon_and_hands_over_on_request(run, learn, processes: Processes, log) -> None:
    with held(run):
        second = processes.learner(run.url, run.id)
        held_by = f"{run.id} is held by the learner on elsewhere; waits for it"
        processes.until(lambda: held_by in second.text())
    with playing(run.url, run.id):
        with within(5.0, "learner death -> next update with a standby waiting"):
            learns(run, 2)
        third = learn(run, take_over=True)
        until(lambda: run.state.handover or run.token >> 16 == 3)
        with within(5.0, "requested -> next update by the requester"):
            learns(run, 3)
        assert second.wait() == 0
    who = rf"\S+ \(process {os.getpid()}\)"
    assert re.search(rf"hands {run.id} over to the learner on {who}, which requested it", second.text())
    begun = re.search(r"starts at update (\d+)", log.text)
    assert begun is not None and int(begun[1]) > 0  # where the second ended
    assert run.state.handover == ""
    third.end()
    assert third.error is None and f"leaves {run.id} active for the next learner" in log.text
    assert run.journal == ["created", "handover"]
    audit = run.audit()
    assert audit.total("consumed") > 0 and audit.total("refused") == 0


@pytest.mark.faults
def test_a_learner_that_does_not_hand_over_is_replaced_and_can_write_no_more(run, learn, log) -> None:
    with held(run) as refused:
        token, second = run.token, learn(run, take_over=True)
        until(lambda: run.state.handover)
        began = time.monotonic()
        until(lambda: second.holds_after(token))
        assert 4.0 < time.monotonic() - began < bound(6.0)  # it waited for a handover
        until(lambda: refused)
    until(lambda: run.state.version >= 0)  # it learns
    assert f"{run.id} is held by the learner on elsewhere; requests it" in log.text
    assert f"takes {run.id} from the learner on elsewhere, which did not hand it over" in log.text


@pytest.mark.faults
def test_a_stalled_learner_whose_run_was_taken_writes_nothing(run, learn, processes: Processes) -> None:
    folder = processes.folder / "runs" / run.id
    first = processes.learner(run.url, run.id)
    with playing(run.url, run.id):
        until(lambda: local_checkpoints.token(folder, run.id), SLOW_S)
        first.send_signal(signal.SIGSTOP)
        while list(folder.rglob("*.part")):  # it is writing a checkpoint
            first.send_signal(signal.SIGCONT)
            time.sleep(0.05)
            first.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
        second = learn(run)
        learns(run, 2)
        second.end()

    def files() -> set[tuple[Path, int]]:
        return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}

    before, files_before = run.keys(), files()  # whatever changes now is the work of the first
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 1
    assert run.keys() == before
    assert files() <= files_before  # it may remove what it had begun itself
    (error,) = (line for line in first.text().splitlines() if "error" in line.lower())
    assert re.search(rf"run {run.id}: the learner on \S+ took it over", error)
    run.audit()


@pytest.mark.faults
def test_a_service_that_loses_a_run_learns_another_and_takes_back_the_first(server, run, learn, log) -> None:
    service = learn(run, serves=True)
    with playing(run.url, run.id):
        learns(run, 1)
        token = run.take()
        until(lambda: re.search(f"run {run.id}: the learner on .* took it over", log.text))
        other = Run(server, endless_config(name="other"))
        with playing(run.url, other.id):
            until(lambda: other.state.updates > 0)
        assert run.token == token
        runs.set_status(run.client, other.id, "stopped", "by the test")
        until(lambda: f"{other.id}: stopped" in log.text)
        leases.release(run.client, run.id, token)
        learns(run, 3)
    service.end()
    run.audit()


WRITER = """
import sys
from ddrl.store import checkpoints, connection, weights
run, token = sys.argv[1], int(sys.argv[2])
client = connection.connect()
number = 0
while True:
    number += 1
    version = weights.index(client, run).latest + 1
    blob = bytes([version % 256]) * (1 << 20)
    weights.publish(
        client, run, token, version=version, blob=blob, allowance=version, updates=version, drop=(version - 2,)
    )
    checkpoints.save(client, run, token, blob * 9, {"number": number})
"""


def test_a_service_leaves_a_run_to_each_learner_that_requests_it(monkeypatch, tmp_path: Path) -> None:
    # Seconds of a service's rounds, and the learner that requests the free run; None: a learner holds it.
    rounds = iter([(0.0, "a"), (5.0, None), (100.0, "b"), (109.0, "b"), (111.0, "b")])
    interrupt, learned, now_s = threading.Event(), [], 0.0

    def free(*_: Any) -> list[tuple[str, str]]:
        nonlocal now_s
        now_s, requester = next(rounds, (200.0, None))
        if now_s == 200.0:
            interrupt.set()
        return [("x-1", requester)] if requester else []

    monkeypatch.setattr(run_module, "POLL_S", 0.0)
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(runs, "active_names", lambda *_: ["x-1"])
    monkeypatch.setattr(leases, "free", free)
    monkeypatch.setattr(learners, "wanting", lambda *_: [])
    monkeypatch.setattr(run_module, "learn", lambda *_, **__: learned.append(now_s))
    run_module.serve(None, tmp_path, interrupt)
    assert learned == [111.0], "b did not come"


@pytest.mark.faults
def test_writers_killed_at_random_leave_whole_versions_and_checkpoints(run, processes: Processes) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    latest, strays = -1, 0
    for _ in range(20 if EXACT else 4):
        writer = processes.start("writer", run.url, "-c", WRITER, run.id, str(run.take()))
        processes.until(lambda before=latest: run.index.latest > before)
        time.sleep(draw.uniform(0.0, 0.3))
        writer.kill()
        index = run.index
        assert index.latest >= latest
        latest = index.latest
        assert latest < 0 or weights.get(run.client, run.id, latest) == bytes([latest % 256]) * (1 << 20)
        stored = run.client.keys(keys.of_run(run.id, "weights:*"))
        assert len(stored) == len(index.sizes) <= 2  # no blob without its pointer
        assert run.state.version == latest
        strays += checkpoints.sweep(run.client, run.id, run.take())
        found = checkpoints.load(run.client, run.id)
        assert found is None or (len(found[0]) == 9 << 20 and len(set(found[0])) == 1)
        parts = run.client.keys(keys.checkpoint_pattern(run.id))
        assert len(parts) == (0 if found is None else 3)
    print(f"{strays} stray parts of checkpoints were swept")


# --- attempts that are not the usual ones ------------------------------------------------------------------


def test_a_run_that_the_servers_memory_cannot_hold_fails_at_once(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, run.url)
    run.client.config_set("maxmemory", 550 * 1024**2)  # replay.max_bytes alone is 512 MiB
    message = "needs up to 6.. MiB of the server, but its maxmemory is 550 MiB"
    try:
        with pytest.raises(ConfigError, match=message):
            run_module.learn(run.client, run.id, tmp_path, threading.Event())
    finally:
        run.client.config_set("maxmemory", 0)
    config = target_config(replay={"max_bytes": "100MB"}, weights={"max_bytes": "1MB"})
    kept = 100_000_000 + 2 * 20_000_000 + 13 * 1_000_000 + 1_000_000
    needed = run_module.needed_bytes(config, checkpoint_bytes=20_000_000, weights_bytes=1_000_000)
    assert needed == kept + run_module.OTHER_BYTES
    assert run.state.status == "failed" and not run.state.leased
    assert "lower replay.max_bytes, or raise maxmemory" in run.state.reason
    assert json.loads((tmp_path / run.id / "summary.json").read_text())["reason"] == run.state.reason


def test_a_run_that_learns_goes_on_where_the_servers_memory_could_no_longer_hold_it(run, learn) -> None:
    with playing(run.url, run.id):
        first = learn(run)
        learns(run, 1)
        first.end()
        run.client.config_set("maxmemory", 550 * 1024**2)
        try:
            learn(run)
            learns(run, 2)
        finally:
            run.client.config_set("maxmemory", 0)


def test_a_learner_that_starts_on_a_full_server_says_so_once_and_waits(run, learn, log) -> None:
    run.client.config_set("maxmemory", 1)
    try:
        learning = learn(run)
        until(lambda: "memory is full" in log.text)
        time.sleep(3 * run_module.RETRY_S)  # in which it tries again
        assert log.text.count("memory is full") == 1 and "serves again" not in log.text
    finally:
        run.client.config_set("maxmemory", 0)
    until(lambda: "starts at update" in log.text)
    assert run.state.version >= 0 and learning.thread.is_alive()


def test_a_new_learner_keeps_the_weights_of_open_evaluations(server, learn) -> None:
    """Nobody plays them while versions go on."""
    run = Run(server, endless_config(weights={"keep_last": 2}, learner={"publish_every_s": 0.05}))
    with playing(run.url, run.id):
        first = learn(run)
        until(lambda: evaluations.opened(run.client, run.id), SLOW_S)
        (opened,) = evaluations.opened(run.client, run.id).values()
        until(lambda: run.state.version > opened.version + 4, SLOW_S)
        first.end()
        learn(run)
        learns(run, 2)
    assert opened.version in run.index.sizes and opened.id in evaluations.opened(run.client, run.id)


def test_a_run_that_fails_leaves_its_folder(run, learn, monkeypatch, tmp_path: Path) -> None:
    def fail(_: Learner) -> None:
        raise ValueError("bad luck")

    monkeypatch.setattr(Learner, "train", fail)
    learning = learn(run)
    learning.thread.join(30.0)
    assert str(learning.error) == "bad luck" and run.state.ended
    folder = tmp_path / "runs" / run.id
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "ValueError: bad luck")
    assert (folder / "policy.safetensors").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_is_ending_until_its_results_are_complete_and_any_learner_completes_them(
    server, learn, monkeypatch, tmp_path: Path
) -> None:
    run, write, seen = Run(server, endless_config(stop={"updates": 20})), artifacts.write, []

    def die(*_: Any) -> None:
        seen.append(run.state)
        raise SystemExit("the learner dies here")

    monkeypatch.setattr(artifacts, "write", die)
    run.play(400)
    learn(run).thread.join(60.0)
    (state,) = seen
    assert (state.status, state.outcome, state.reason) == ("ending", "time", "limit of 20 updates")
    assert state.evaluation["version"] == state.version and state.updates >= 20
    assert run.state.status == "ending"
    monkeypatch.setattr(artifacts, "write", write)
    service = learn(run, serves=True)
    until(lambda: run.state.ended, SLOW_S)
    service.end()
    assert run.state.status == "time" and run.journal == ["created", "time"]
    summary = json.loads((tmp_path / "runs" / run.id / "summary.json").read_text())
    assert summary == records.summary(run.client, run.id) and summary["evaluation"] is not None


def test_the_time_limit_counts_from_the_first_step(server, learn) -> None:
    run = Run(server, endless_config(stop={"time": 1.5}))
    learning = learn(run)
    until(lambda: run.state.version >= 0)
    time.sleep(3.0)  # in which no worker plays
    assert run.state.status == "active"
    with playing(run.url, run.id):
        learning.thread.join(SLOW_S)
    state = run.state
    assert (state.status, state.reason) == ("time", "time limit of 1.5 s")
    assert state.appended_steps and state.train_s(state.ended_s) >= 1.0


def test_a_learner_leaves_a_run_whose_device_it_lacks_to_another_machine(
    server, learn, log, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_module, "SKIP_S", 0.05)
    run, other = Run(server, endless_config(learner={"device": "cuda:63"})), Run(server, endless_config())
    message = "learner.device: 'cuda:63' is not on this machine; use auto or cpu, or a learner on a machine"
    service = learn(other, serves=True)
    until(lambda: other.state.leased)
    runs.set_status(other.client, other.id, "stopped", "by the test")
    until(lambda: f"{other.id}: stopped" in log.text)
    time.sleep(0.5)  # some rounds
    assert log.text.count(f"{run.id}: {message}") == log.text.count(message) == 1
    (line,) = logs.read(run.client, run.id)[0]
    assert line["source"] == f"learner {socket.gethostname()}" and message in line["text"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_module.learn(run.client, run.id, tmp_path, threading.Event())
    assert run.state.status == "active" and run.token == 0 and run.journal == ["created"]
    for module in (run_module, core_module):
        monkeypatch.setattr(module, "set_up", lambda _: CPU)  # a machine that has it
    until(lambda: run.state.version >= 0)
    service.end()


def test_a_learner_leaves_a_run_whose_module_it_may_not_import_to_another_machine(
    server, learn, log, monkeypatch
) -> None:
    monkeypatch.setattr(run_module, "SKIP_S", 0.05)
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.own_networks")
    run = Run(server, endless_config(algorithm={"network": "support.own_networks:Good"}))
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    service = learn(run, serves=True)
    message = f"{run.id}: host {socket.gethostname()}: support.own_networks:Good: module support.own_networks may not"
    until(lambda: message in log.text)
    assert "Traceback" not in log.text
    assert run.state.status == "active" and run.token == 0 and run.journal == ["created"]
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.own_networks")
    until(lambda: run.state.version >= 0)
    service.end()


HANGS = """
import logging, sys, threading
from pathlib import Path
from ddrl.learner import loop, run
from ddrl.store import connection
update = loop.Learner._update
def hang(self):
    return update(self) if not Path("hang").exists() else threading.Event().wait()
loop.Learner._update = hang
logging.basicConfig()
run.learn(connection.connect(), sys.argv[1], Path("runs"), threading.Event())
"""


@pytest.mark.faults
def test_a_learner_whose_training_hangs_ends_and_a_standby_goes_on(server, processes: Processes) -> None:
    run = Run(server, endless_config(learner={"stall_s": 5}))
    first = processes.start("first", run.url, "-c", HANGS, run.id)
    with playing(run.url, run.id):
        learns(run, 1)
        second = processes.learner(run.url, run.id)
        processes.until(lambda: "waits for it" in second.text())
        with within(5.0 + 8.0, "training hangs -> next update elsewhere"):
            (processes.folder / "hang").touch()
            learns(run, 2)
    processes.until(lambda: not first.running)
    assert first.returncode == 1 and re.search(
        r"training hangs, no step for \d+ s \(learner.stall_s\)", first.text()
    )
    text = " ".join(line["text"] for line in logs.read(run.client, run.id)[0])
    assert "training hangs" in text
    run.audit()


def test_a_learner_whose_service_thread_hangs_loses_its_run(run, learn, monkeypatch) -> None:
    monkeypatch.setattr(run_module, "HANG_S", 1.0)
    freed = threading.Event()
    monkeypatch.setattr(Dispatcher, "tick", lambda *_: freed.wait())
    learning = learn(run)
    try:
        until(lambda: learning.holds_after(0))
        until(lambda: leases.acquire(run.client, run.id, host="there", folder="/tmp"))
    finally:
        freed.set()
    learning.thread.join(30.0)
    assert isinstance(learning.error, connection.LeaseLostError)


def test_a_run_that_ends_while_its_stream_fills_the_server_ends(run, learn, monkeypatch) -> None:
    run.play(200)
    fields = fields_of(run.entries[0])
    for seq in range(60):
        run.append({**fields, b"padding": bytes(10**5)}, producer=99, seq=seq)
    entries = run.entries
    learning = learn(run)
    until(lambda: run.meta.get("cursor") == entries[-1].entry_id.decode())
    finish = Learner.finish
    assert len(run.entries) == len(entries)

    def finish_when_full(learner: Learner, **options: bool) -> None:
        run.client.config_set("maxmemory", run.client.info("memory")["used_memory"] - 2_000_000)
        monkeypatch.setattr(Learner, "finish", finish)
        learner.finish(**options)

    monkeypatch.setattr(Learner, "finish", finish_when_full)
    runs.set_status(run.client, run.id, "stopped", "by the test")
    learning.thread.join(30.0)
    run.client.config_set("maxmemory", 0)
    assert learning.status == "stopped" and not run.state.leased
    assert 0 < len(run.entries) < len(entries)  # room was made, of no more than was needed
    run.audit()


def test_weights_are_published_also_when_play_has_stopped(server, learn) -> None:
    run = Run(server, endless_config(learner={"publish_every_s": 2.0}))
    run.play(400)
    learn(run)  # all updates that 400 steps allow are made before the 2 s are over
    until(lambda: run.state.updates and run.state.version > 0)


def test_steps_beyond_the_allowance_count_once_they_are_allowed(server, learn) -> None:
    """A worker may append as much as it likes, and the run does not end by it before it has learned as much."""
    run = Run(server, endless_config(stop={"return": None, "env_steps": 4_000}))
    run.play(8_000)
    learn(run)
    until(lambda: run.state.ended)
    assert run.state.reason == "limit of 4000 env steps"
    assert run.state.updates >= (4_000 - 200 - 200) * 4 // 32  # without warm-up and slack


def test_a_paused_run_is_not_evaluated_and_its_time_stands_still(server, learn, monkeypatch) -> None:
    def send(run: str, message: str, queue: str) -> None:
        play_evaluation(server.client, run, message)

    monkeypatch.setattr(run_module, "SIGNALS_S", 0.01)
    monkeypatch.setattr(celery, "send_evaluation", send)
    run = Run(server, endless_config())
    run.play(400)
    learn(run)
    until(lambda: run.state.ended or run.rows and evaluations.results(run.client, run.id)[0])
    assert run.state.status == "active", run.state.reason
    assert len(evaluations.results(run.client, run.id)[0]) == 1
    runs.set_status(run.client, run.id, "paused", "by the test")
    due = endless_config(evaluation={"every_s": 0.1})
    runs.change(run.client, run.id, due, {"evaluation.every_s": (3600, 0.1)}, version=0)
    num_rows = len(run.rows)
    until(lambda: len(run.rows) > num_rows + 1)
    before_s = run.rows[-1]["elapsed_s"]
    time.sleep(2.0)
    assert run.rows[-1]["elapsed_s"] - before_s < 1.0
    assert len(evaluations.results(run.client, run.id)[0]) == 1
    runs.reactivate(run.client, run.id)
    run.play(400)
    until(lambda: len(evaluations.results(run.client, run.id)[0]) > 1)


def test_a_run_whose_first_policy_reaches_the_target_is_solved_without_a_step(
    server, learn, monkeypatch
) -> None:
    def send(run: str, message: str, queue: str) -> None:
        play_evaluation(server.client, run, message)

    sent: list[Dispatcher] = []
    monkeypatch.setattr(celery, "send_evaluation", send)
    monkeypatch.setattr(Dispatcher, "tick", lambda self: sent.append(self))
    monkeypatch.setattr(scheduler, "FIRST_S", 1e9)
    config = target_config(stop={"return": -100})
    spaces = submit.prepare(config)
    policy = weights.encode_weights(base.resolve(config, spaces).learner(device=CPU, seed=9).weights())
    run = Run(server, run=submit.create(server.client, config, spaces, initial=("other@3", policy)))
    learn(run).thread.join(SLOW_S)
    state, folder = run.state, Path(run.state.folder)
    assert (state.status, state.evaluation["version"], sent) == ("solved", 0, [])
    assert weights.decode_weights((folder / "policy.safetensors").read_bytes()).keys()
    assert (folder / "curve.png").exists()


def test_a_learner_that_waits_for_a_paused_run_waits_on_when_its_holder_dies(run, learn, log) -> None:
    token = run.take()
    run.client.persist(keys.lease(run.id))
    learning = learn(run)
    until(lambda: "waits for it" in log.text)
    runs.set_status(run.client, run.id, "paused", "by the test")
    leases.release(run.client, run.id, token)
    learning.thread.join(1.5)
    assert learning.thread.is_alive() and learning.error is None
    runs.reactivate(run.client, run.id)
    until(lambda: learning.holds_after(token))


def test_a_signal_that_comes_as_a_learner_begins_to_wait_ends_it() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    stop = run_module.handle_signals()
    try:
        with stop._cond:  # type: ignore[attr-defined]  # as `wait` does
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10.0)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
