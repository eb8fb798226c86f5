"""A worker's heartbeat: what it reports arrives, once."""

from __future__ import annotations

import pytest
from redis import ConnectionError, Redis
from support.private_server import until
from support.store import heartbeat, make_run

from ddrl.store import runs, segments, workers
from ddrl.worker.heartbeat import HeartbeatSender


def test_a_crash_whose_reply_is_lost_is_reported_again_and_counts_once(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, note_crash, losing = make_run(client), segments.note_crash, iter([True] * 3)

    def note(*arguments: object, **options: object) -> int:
        count = note_crash(*arguments, **options)  # type: ignore[arg-type]
        if next(losing, False):
            raise ConnectionError("no reply")
        return count

    monkeypatch.setattr(segments, "note_crash", note)
    monkeypatch.setattr(workers, "BEAT_S", 0.1)
    sender = HeartbeatSender(heartbeat("a", 1), lambda: ())
    sender.start()
    sender.report_crash("task", run, "signal 11")
    sender.report_crash("task", run, "signal 6")
    until(lambda: runs.state(client, run).error == "signal 6")
    sender.stop()
    assert not next(losing, False)
    assert runs.state(client, run).crashes_total == 2
