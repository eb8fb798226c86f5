"""The explanations for a process that ended."""

from __future__ import annotations

import pytest

from ddrl.worker import watchdog


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("Worker exited prematurely: signal 11 (SIGSEGV) Job: 3.", "native code crashed"),
        ("Worker exited prematurely: signal 9 (SIGKILL) Job: 3.", "was killed (signal 9)"),
        ("Worker exited prematurely: signal 14 (SIGALRM) Job: 3.", "held the interpreter"),
        (f"Worker exited prematurely: exitcode {watchdog.UNREPORTED} Job: 3.", "its log says why"),
        ("Worker exited prematurely: exitcode 3 Job: 3.", "it ended by"),
    ],
)
def test_the_end_of_a_process_is_explained(status: str, words: str) -> None:
    explained = watchdog.explain(status)
    assert explained is not None and words in explained


def test_what_a_watchdog_has_reported_is_not_explained_again() -> None:
    assert watchdog.explain(f"Worker exited prematurely: exitcode {watchdog.REPORTED} Job: 3.") is None
