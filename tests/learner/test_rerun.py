"""A run that learned in lockstep, learned again from its stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.commands import call, call_json, refused, run
from support.learners import Run, finished
from support.private_server import PrivateServer, until
from support.runs import target_config

from ddrl.config import validate
from ddrl.learner.rerun import rerun
from ddrl.store import connection, keys, weights
from ddrl.store.recording import Recording

LOCKSTEP = {"lockstep": True, "publish_every_s": 0.02}


def learned(server: PrivateServer, steps: int = 700, **sections: Any) -> Run:
    """Return a run that has learned from so many steps of a player, whose versions are all kept."""
    tree = target_config(**sections).model_dump(mode="json", by_alias=True)
    tree["learner"] |= LOCKSTEP
    tree["weights"]["keep_every"] = 1
    played = Run(server, validate(tree))
    played.take()
    played.play(steps)
    with finished(played) as learner:
        played.catch_up(learner)
        until(lambda: learner.shared.updates > 60)
    return played


@pytest.mark.parametrize("name", ["sac", "dqn"])
def test_weights_are_equal_bit_for_bit(server: PrivateServer, name: str) -> None:
    toy = {"algorithm": {"name": "sac", "hidden_sizes": [16]}}
    if name == "dqn":
        toy = {"env": {"id": "ddrl/Catch-v0", "kwargs": {"size": 7}, "num_envs": 4}}
        toy |= {"algorithm": {"name": "dqn", "network": "data_efficient", "prioritized": True}}
        toy |= {"replay": {"warmup_steps": 200, "capacity": 2_000}}
    one = learned(server, **toy)
    found = rerun(one.client, one.id, None)
    assert found.differs is None and found.unreached == 0 and len(found.equal) >= 3
    assert found.equal == sorted(one.index.sizes) and found.updates == one.state.updates


def test_the_first_version_that_differs_is_named(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learned(server)
    versions = sorted(one.index.sizes)
    other = versions[len(versions) // 2]
    blob = weights.decode_weights(weights.get(one.client, one.id, other) or b"")
    name = sorted(blob)[0]
    changed = {**blob, name: blob[name] + 1e-6}
    one.client.set(keys.weights_blob(one.id, other), weights.encode_weights(changed))
    found = rerun(one.client, one.id, None)
    assert found.differs == other and found.equal == versions[: versions.index(other)]
    assert (
        found.updates == one.index.published[other][1]
        and found.unreached == len(versions) - len(found.equal) - 1
    )
    monkeypatch.setenv(connection.URL_VARIABLE, one.url)
    printed = run("rerun", one.id)
    assert (
        printed.code == 1 and f"; version {other}, of " in printed.out and "differs, version" in printed.out
    )


def test_from_a_recording_when_the_stream_was_trimmed(
    server: PrivateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learned(server)
    Recording(one.client, one.id, tmp_path / "a").catch_up()
    one.client.xtrim(keys.experience(one.id), minid=one.entries[3].entry_id, approximate=False)
    monkeypatch.setenv(connection.URL_VARIABLE, one.url)
    assert f"{one.id}: the server lacks fragment 1; keep all of a run's" in refused("rerun", one.id)
    found = call_json("rerun", one.id, "--from", str(tmp_path / "a"))
    assert found["differs"] is None and found["equal"] == sorted(one.index.sizes)
    assert "versions equal bit for bit" in call("rerun", one.id, "--from", str(tmp_path / "a"))
    other = learned(server)
    assert "is a recording of" in refused("rerun", other.id, "--from", str(tmp_path / "a"))
    assert "is no recording" in refused("rerun", other.id, "--from", str(tmp_path / "b"))


def test_what_more_than_the_stream_has_decided_is_refused(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    one = Run(server, target_config())
    assert "did not learn in lockstep (learner.lockstep)" in refused("rerun", one.id)
    several = Run(server, target_config(learner={"lockstep": True, "num_learners": 2}))
    assert "was learned by 2 learners (learner.num_learners)" in refused("rerun", several.id)
    call("branch", f"{learned(server).id}@0", "--detach", "--no-learner", "--workers", "0")
    assert "began with the optimizers of " in refused("rerun", "last")
    two = learned(server)
    call("set", two.id, "weight=2")
    assert "was changed while it went on (`ddrl journal`" in refused("rerun", two.id)
