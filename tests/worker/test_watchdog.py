"""The explanations for a process that ended; test_worker_crashes.py has those of signals."""

from __future__ import annotations

import pytest

from ddrl.store.runs import UnknownRunError
from ddrl.worker import watchdog


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
