"""Fixtures of all tests of algorithms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.algorithms import OWN, one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _custom_networks_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", OWN.partition(":")[0])
