"""What counts as a step, and why a process ended; test_worker_crashes.py has signals."""

from __future__ import annotations

import signal
import time

import pytest
from redis import Redis
from support.private_server import until
from support.worker_runs import playable

from ddrl.store import stream
from ddrl.store.runs import UnknownRunError
from ddrl.worker import segment, watchdog


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (f"exitcode {watchdog.UNREPORTED}", "its log says why"),
        ("exitcode 3", "it ended by"),
        (f"exitcode {watchdog.REPORTED}", None),
    ],
)
def test_the_end_of_a_process_is_explained_unless_the_watchdog_has(status: str, words: str | None) -> None:
    explained = watchdog.explain(f"Worker exited prematurely: {status} Job: 3.")
    assert explained is None if words is None else explained is not None and words in explained


def test_a_process_does_not_end_for_what_a_message_says() -> None:
    with pytest.raises(UnknownRunError), watchdog.ends_without_memory():
        raise UnknownRunError("can't start new thread")


def test_a_wait_for_the_server_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    dog = watchdog.Watchdog(lambda run, reason: None)
    monkeypatch.setattr(dog, "_end", ended.append)
    monkeypatch.setattr(watchdog, "CHECK_EVERY_S", 0.02)
    with dog.paused():
        pass  # nothing is watched
    with dog.watch("run", "env", 0.1):
        with dog.paused():
            time.sleep(0.3)
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert ended == []
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0.1
        until(lambda: ended)
    assert "longer than 0.1 s for a step" in ended[0]


def test_a_player_asks_for_its_id_before_the_first_step(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker can make the server take long to give one."""
    run, real, watched = playable(client), stream.new_producer, []
    dog = watchdog.Watchdog(lambda run, reason: None)

    def new_producer(client: Redis, run: str) -> int:
        watched.append(dog._step_began)
        return real(client, run)

    monkeypatch.setattr(stream, "new_producer", new_producer)
    segment.Player(client, run, watch=dog)
    assert watched == [None]
