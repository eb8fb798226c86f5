"""Commands find the private server of the test, and an empty current folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis
from support.private_server import PrivateServer
from support.store import add_history, make_run

from ddrl.store import connection


@pytest.fixture
def client(server: PrivateServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Redis:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    monkeypatch.chdir(tmp_path)
    return server.client


@pytest.fixture
def lander(client: Redis) -> str:
    """A run with a history: episodes, figures, weights and evaluations."""
    run = make_run(client)
    add_history(client, run)
    return run
