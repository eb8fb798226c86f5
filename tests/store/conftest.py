"""Fixtures of the store's tests."""

from __future__ import annotations

import pytest
from redis import Redis
from support.store import make_run, take


@pytest.fixture
def run(client: Redis) -> str:
    """A run that has neither learner nor worker."""
    return make_run(client)


@pytest.fixture
def token(client: Redis, run: str) -> int:
    """The fencing token of the run's learner."""
    return take(client, run)
