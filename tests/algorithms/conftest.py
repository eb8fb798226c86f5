"""Fixtures of all tests of algorithms."""

from __future__ import annotations

import pytest
from support.algorithms import OWN


@pytest.fixture(autouse=True)
def _custom_networks_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", OWN.partition(":")[0])
