"""Attempts to learn a run that are not the usual ones: what ends them, and what they wait for."""

from __future__ import annotations

import threading

import pytest
from support.learners import Run, fields_of, until
from support.runs import target_config

from ddrl.config import ConfigError
from ddrl.learner import run as run_module
from ddrl.learner.dispatcher import Dispatcher
from ddrl.learner.loop import Learner
from ddrl.store import connection, keys, leases, runs

ENDLESS = {"stop": {"return": None, "time": 3600}, "evaluation": {"every_s": 3600, "near": 0}}


def test_a_run_that_the_servers_memory_cannot_hold_fails_before_it_begins(
    server, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    run = Run(server)
    run.client.config_set("maxmemory", 550 * 1024**2)  # replay.max_bytes alone is 512 MiB
    message = "needs up to 6.. MiB of the server, but its maxmemory is 550 MiB"
    try:
        with pytest.raises(ConfigError, match=message):
            run_module.learn(run.client, run.id, tmp_path, run_module.Interrupt())
    finally:
        run.client.config_set("maxmemory", 0)
    config = target_config(replay={"max_bytes": "100MB"}, weights={"max_bytes": "1MB"})
    kept = 100_000_000 + 2 * 20_000_000 + 13 * 1_000_000 + 1_000_000
    needed = run_module.needed_bytes(config, checkpoint_bytes=20_000_000, weights_bytes=1_000_000)
    assert needed == kept + run_module.OTHER_BYTES
    assert run.state.status == "failed" and not run.state.leased
    assert "lower replay.max_bytes, or raise maxmemory" in run.state.reason


def test_a_learner_whose_service_thread_hangs_loses_its_run(
    server, learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "HANG_S", 1.0)
    run, freed = Run(server, target_config(**ENDLESS)), threading.Event()
    monkeypatch.setattr(Dispatcher, "tick", lambda _: freed.wait())
    learning = learn(run)
    try:
        until(lambda: learning.holds_after(0))
        until(lambda: not run.state.leased)
        assert leases.acquire(run.client, run.id, host="there", folder="/tmp")
    finally:
        freed.set()
    learning.thread.join(30.0)
    assert isinstance(learning.error, leases.LeaseLostError)


def test_a_run_that_ends_while_its_stream_fills_the_server_ends(
    server, learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(server, target_config(**ENDLESS))
    run.play(200)
    fields = fields_of(run.entries[0])
    for seq in range(60):
        run.append({**fields, b"padding": bytes(10**5)}, 99, seq)
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


def test_a_learner_that_waits_for_a_paused_run_waits_on_when_its_holder_dies(
    server, learn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = Run(server, target_config(**ENDLESS))
    token = run.take()
    run.client.persist(keys.lease(run.id))
    learning = learn(run)
    until(lambda: "waits for it" in caplog.text)
    runs.set_status(run.client, run.id, "paused", "by the test")
    leases.release(run.client, run.id, token)
    learning.thread.join(1.5)
    assert learning.thread.is_alive() and learning.error is None
    runs.reactivate(run.client, run.id)
    until(lambda: learning.holds_after(token))
