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
from redis import Redis
from support.commands import call, call_json
from support.learners import Learning, Run, playing, until
from support.private_server import PrivateServer

from ddrl import celery, policy
from ddrl.runs.evaluation import score
from ddrl.store import checkpoints, evaluations, keys, ledger, local_checkpoints, runs, segments, weights
from ddrl.store.connection import StoreError

HERE = Path(__file__).parent
ALGORITHMS = ("sac", "dqn", "r2d2", "ppo", "impala")
RETURNS = json.loads((HERE / "policies" / "returns.json").read_text())
FIRST_SEED = 1_000_020


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


def learns_on(server: PrivateServer, run: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A learner and a player go on with a run, which gets updates, env steps and versions; its ledger balances."""
    (_, meta), latest = checkpoints.load(server.client, run), weights.index(server.client, run).latest
    patch.setattr(celery, "send_evaluation", lambda *_: None)
    played = Run(server, run=run)
    learning = Learning(played, folder, patch)

    def has_learned() -> bool:
        now = played.state
        assert learning.error is None and now.status == "active", (learning.error, now)
        found = {"updates": now.updates, "env_steps": now.appended_steps}
        return now.version > latest and all(value > meta[name] for name, value in found.items())

    try:
        with playing(server.url, run):
            until(has_learned)
    finally:
        learning.end()
    audit = played.audit()
    folded = [account for producer, account in audit.accounts.items() if producer < 0]
    assert audit.unknown == 0 and all(one.appended >= one.consumed > 0 for one in folded)
    assert played.meta["updates"] > meta["updates"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_exported_policy_plays_as_it_did(name: str) -> None:
    loaded = policy.load(HERE / "policies" / f"{name}.safetensors")
    returns = score(loaded, range(FIRST_SEED, FIRST_SEED + len(RETURNS[name]))).returns
    np.testing.assert_allclose(returns, RETURNS[name], atol=1e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_begins_with_an_exported_policy(client: Redis, name: str, tmp_path: Path) -> None:
    file = HERE / "policies" / f"{name}.safetensors"
    loaded, config = policy.load(file), tmp_path / "new.yaml"
    config.write_text(loaded.config.model_dump_json(by_alias=True, exclude_unset=True))
    call("submit", str(config), "--from", str(file), "--workers", "0", "--no-learner", "--detach")
    [run] = runs.names(client)
    initial = weights.decode_weights(runs.initial(client, run) or b"")
    for tensor, value in loaded.weights.items():
        np.testing.assert_array_equal(initial[tensor], value)


def test_commands_show_runs(former: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = {row["run"]: row for row in call_json("runs")}
    assert [row["algorithm"] for row in listed.values()] == list(ALGORITHMS)
    assert [row["status"] for row in listed.values()] == ["active", "paused", "active", "active", "stopped"]
    for run, row in listed.items():
        assert re.search(rf"updates +{row['updates']}\b", call("status", run))
        assert "created" in call("journal", run) and "created" in call("logs", run)
        assert "balanced:" in call("audit", run)
        exported = call_json("export", run)
        assert policy.load(exported["path"]).version == row["version"]
        assert call_json("evaluate", run, "-n", "2")["episodes"] == 2
    call("compare", *listed)
    call("fleet")


def test_what_is_open_on_a_server_is_read(former: Redis) -> None:
    run = runs.resolve(former, "sac")
    [evaluation] = evaluations.opened(former, run).values()
    assert evaluation.purpose == "watch" and evaluation.num_episodes == 20
    [lost] = segments.playing(former, run).values()
    assert lost.node == "rollout@host" and lost.pid > 0
    assert ledger.unlisted(former, run, [1, 2]) == [1]


def test_settings_that_are_unknown_here_are_refused_by_name(former: Redis, tmp_path: Path) -> None:
    run, file = runs.resolve(former, "sac"), tmp_path / "policy.safetensors"
    spec = json.loads(former.get(keys.spec(run)))
    spec["replay"]["forgotten"] = 1
    former.set(keys.spec(run), json.dumps(spec))
    message = "another version of ddrl .*replay.forgotten.*; finish it"
    with pytest.raises(StoreError, match=f"^run {run}: .*{message}"):
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
