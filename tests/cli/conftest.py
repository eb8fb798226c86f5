"""Commands find the private server of the test, and an empty current folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from redis import Redis
from support.runs import target_tree
from support.store import add_history, make_run


@pytest.fixture
def client(client: Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Redis:
    monkeypatch.chdir(tmp_path)
    return client


@pytest.fixture
def target_file(client: Redis) -> str:
    """The name of a config file in the current folder."""
    Path("target.yaml").write_text(yaml.safe_dump(target_tree()), encoding="utf-8")
    return "target.yaml"


@pytest.fixture
def lander(client: Redis) -> str:
    """A run with a history: episodes, figures, weights and evaluations."""
    run = make_run(client)
    add_history(client, run)
    return run
