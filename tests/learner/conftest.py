"""Fixtures of the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.learners import Learning, Run, endless_config

from ddrl import celery


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log lines of the test, from level INFO on."""
    caplog.set_level("INFO")
    return caplog


@pytest.fixture
def run(server) -> Run:
    """A run of the toy that nothing ends."""
    return Run(server, endless_config())


@pytest.fixture
def learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Learning]]:
    """Starts what learns a run in this process, in the folder `tmp_path/runs`; ends it with the test."""
    begun: list[Learning] = []
    monkeypatch.setattr(celery, "send_evaluation", lambda *_: None)

    def learn(run: Run, **options: Any) -> Learning:
        begun.append(Learning(run, tmp_path / "runs", monkeypatch, **options))
        return begun[-1]

    yield learn
    for learning in begun:
        learning.end()
