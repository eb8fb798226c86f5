"""Runs, local checkpoints and policies that an earlier version of ddrl wrote are read.

The files are of commit d5b9061: a tiny run of each algorithm as it was on a server (`server.json.gz`), the folders of
two of them (`runs/`), and their policies with the returns of twelve episodes (`policies/`). On the server are an open
evaluation, a player that died, a retired producer, a paused run and a stopped one.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from redis import Redis
from support.learners import Learning, Run, playing, until
from support.private_server import PrivateServer
from typer.testing import CliRunner

from ddrl import celery, policy
from ddrl.cli import app
from ddrl.runs.evaluation import score
from ddrl.store import (
    checkpoints,
    connection,
    evaluations,
    keys,
    ledger,
    local_checkpoints,
    runs,
    segments,
    weights,
)
from ddrl.store.connection import StoreError

HERE = Path(__file__).parent
ALGORITHMS = ("sac", "dqn", "r2d2", "ppo", "impala")
RETURNS = json.loads((HERE / "policies" / "returns.json").read_text())
FIRST_SEED = 1_000_020


@pytest.fixture
def client(server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> Redis:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    return server.client


@pytest.fixture
def former(client: Redis) -> Redis:
    """A server with the runs."""
    stored = json.loads(gzip.decompress((HERE / "server.json.gz").read_bytes()))
    for key, (kind, value) in stored.items():
        if kind == "string":
            client.set(key, value.encode("latin-1"))
        elif kind == "hash":
            client.hset(key, mapping={name: text.encode("latin-1") for name, text in value.items()})
        elif kind == "zset":
            client.zadd(key, value)
        else:
            for entry_id, fields in value:
                client.xadd(key, {name: text.encode("latin-1") for name, text in fields.items()}, id=entry_id)
    return client


def command(*arguments: str) -> str:
    """The output of a command that succeeds."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def learns_on(server: PrivateServer, run: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A learner and a player go on with a run, which gets updates, env steps and versions; its ledger balances."""
    (_, meta), latest = checkpoints.load(server.client, run), weights.index(server.client, run).latest
    patch.setattr(celery, "send_evaluation", lambda *_: None)
    learning = Learning(Run(server, run=run), folder, patch)
    try:
        with playing(server.url, run):

            def has_learned() -> bool:
                now = runs.state(server.client, run)
                assert learning.error is None and now.status == "active", (learning.error, now)
                return (
                    now.updates > meta["updates"]
                    and now.appended_steps > meta["env_steps"]
                    and now.version > latest
                )

            until(has_learned)
    finally:
        learning.end()
    audit = ledger.audit(server.client, run)
    assert audit.is_balanced and audit.unknown == 0
    assert all(
        account.appended >= account.consumed > 0
        for producer, account in audit.accounts.items()
        if producer < 0
    )
    _, saved = checkpoints.load(server.client, run)
    assert saved["updates"] > meta["updates"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_exported_policy_plays_as_it_did(name: str) -> None:
    loaded = policy.load(HERE / "policies" / f"{name}.safetensors")
    returns = score(loaded, range(FIRST_SEED, FIRST_SEED + len(RETURNS[name]))).returns
    np.testing.assert_allclose(returns, RETURNS[name], atol=1e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_begins_with_an_exported_policy(client: Redis, name: str, tmp_path: Path) -> None:
    file = HERE / "policies" / f"{name}.safetensors"
    loaded, config = policy.load(file), tmp_path / "new.yaml"
    config.write_text(
        yaml.safe_dump(loaded.config.model_dump(mode="json", by_alias=True, exclude_unset=True))
    )
    command("submit", str(config), "--from", str(file), "--workers", "0", "--no-learner", "--detach")
    [run] = runs.names(client)
    initial = weights.decode_weights(runs.initial(client, run) or b"")
    for tensor, value in loaded.weights.items():
        np.testing.assert_array_equal(initial[tensor], value)


def test_commands_show_runs(former: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = {row["run"]: row for row in json.loads(command("runs", "--json"))}
    assert [row["algorithm"] for row in listed.values()] == list(ALGORITHMS)
    assert [row["status"] for row in listed.values()] == ["active", "paused", "active", "active", "stopped"]
    for run, row in listed.items():
        assert re.search(rf"updates +{row['updates']}\b", command("status", run))
        assert "created" in command("journal", run) and "created" in command("logs", run)
        assert "balanced:" in command("audit", run)
        exported = json.loads(command("export", run, "--json"))
        assert policy.load(exported["path"]).version == row["version"]
        assert json.loads(command("evaluate", run, "-n", "2", "--json"))["episodes"] == 2
    command("compare", *listed)
    command("fleet")


def test_what_is_open_on_a_server_is_read(former: Redis) -> None:
    run = runs.resolve(former, "sac")
    [evaluation] = evaluations.opened(former, run).values()
    assert evaluation.purpose == "watch" and evaluation.num_episodes == 20
    [lost] = segments.playing(former, run).values()
    assert lost.node == "rollout@host" and lost.pid > 0
    assert ledger.folded(former, run) == (1, {2})


def test_settings_that_are_unknown_here_are_refused_by_name(former: Redis, tmp_path: Path) -> None:
    run, file = runs.resolve(former, "sac"), tmp_path / "policy.safetensors"
    spec = json.loads(former.get(keys.spec(run)))
    spec["replay"]["forgotten"] = 1
    former.set(keys.spec(run), json.dumps(spec))
    with pytest.raises(
        StoreError, match=f"^run {run}: .*another version of ddrl .*replay.forgotten.*; finish it"
    ):
        runs.config(former, run)
    data = (HERE / "policies" / "sac.safetensors").read_bytes()
    metadata = weights.weights_metadata(data) | {"config": json.dumps(spec)}
    file.write_bytes(weights.encode_weights(weights.decode_weights(data), metadata))
    with pytest.raises(policy.PolicyFileError, match=f"^{file}: .*replay.forgotten.*; export it again"):
        policy.load(file)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_on_a_server_goes_on(
    former: Redis, server: PrivateServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.resolve(former, name)
    if runs.state(former, run).status != "active":
        runs.reactivate(former, run)
    learns_on(server, run, tmp_path, monkeypatch)
    limit_s = next(load.limit_s for load in segments.active(former) if load.run == run)
    assert limit_s > runs.config(former, run).rollout.segment_s  # a worker may play it


@pytest.mark.parametrize("name", ("sac", "ppo"))
def test_a_run_goes_on_from_its_folder(
    client: Redis, server: PrivateServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(HERE / "runs", tmp_path, dirs_exist_ok=True)
    run = local_checkpoints.find_or_restore(client, name, tmp_path)
    learns_on(server, run, tmp_path, monkeypatch)
