"""Fixtures of all tests of algorithms."""

from __future__ import annotations

import pytest
from support.algorithms import ALLOWED


@pytest.fixture(autouse=True)
def _own_code_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", ALLOWED)
