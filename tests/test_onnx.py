"""ONNX files play as the policies that they were written from, of every algorithm; what cannot be exported is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from support import commands
from support.algorithms import CONTINUOUS, DISCRETE, Options, make_learner, make_policy
from support.learners import Run, finished
from support.private_server import PrivateServer, until
from support.runs import publish_initial, start, target_config
from support.store import take
from support.subjects import CASES
from torch import Tensor, nn

from ddrl import onnx, policy
from ddrl.config import ConfigError, validate
from ddrl.store import keys
from ddrl.types import EnvSpec

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'ddrl[onnx]'")
pytest.importorskip("onnxscript", reason="pip install 'ddrl[onnx]'")

MASKED = EnvSpec("Toy-v0", (8,), "float32", "multi_discrete", (2,), (3, 2), has_mask=True)
STACKED = EnvSpec("Toy-v0", (36, 36), "uint8", "discrete", (), (4,), frame_stack=4)
MORE: dict[str, tuple[str, EnvSpec, Options]] = {
    "ppo masked": ("ppo", MASKED, {"normalize_observations": True}),
    "dqn frames": ("dqn", STACKED, {"network": "impala", "hidden_sizes": (8,), "norm": "layer"}),
    "ppo images": ("ppo", STACKED, {"network": "nature", "hidden_sizes": (8,), "shared": True}),
    "r2d2 frames": ("r2d2", STACKED, {"network": "nature"}),
}
OTHERS = {"own"} | {  # it has no module; to a policy these are as others here
    *(
        "sac fixed",
        "sac delayed",
        "sac prioritized",
        "sac dropout",
        "sac quantiles",
        "td3 prioritized",
        "iql",
        "iql pairs",
    ),
    *("r2d2 rmsprop", "impala adam", "ppo", "dqn", "impala normalized", "r2d2 soft", "discrete sac", "pqn"),
}
KINDS = {name: case for name, case in (CASES | MORE).items() if name not in OTHERS}
IMAGES = {"sac images", "discrete sac images", "bc images", "iql images", "pqn images"}  # alike here


def loaded(name: str, spec: EnvSpec, options: Options) -> policy.LoadedPolicy:
    """A policy with the weights of a fresh learner, whose normalization is not that of no data."""
    weights = dict(make_learner(name, spec, **options).weights())
    for part, value in (("observation_mean", 0.5), ("observation_std", 2.0)):
        if part in weights:
            weights[part] = torch.full_like(weights[part], value)
    made = make_policy(name, spec, weights=weights, **options)
    return policy.LoadedPolicy(
        made, validate({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}), spec, "r", 3
    )


@pytest.mark.parametrize(
    "name", ["sac", "ppo normalized", "ppo masked", "ppo recurrent", "sqn", "dqn noisy", "r2d2 frames"]
)
def test_a_template_takes_the_weights_of_any_version(name: str) -> None:
    name, spec, options = case = KINDS[name]
    template = onnx.Template(loaded(*case), make_learner(name, spec, **options).weights())
    for version in (4, 5):
        weights = make_learner(name, spec, seed=version, **options).weights()
        session = onnxruntime.InferenceSession(template.filled(version, weights))
        played = loaded(*case)
        played.policy.load(weights)
        assert onnx.difference(played, session, seed=50) <= onnx.TOLERANCE
        assert session.get_modelmeta().custom_metadata_map["version"] == str(version)


def test_a_learner_that_rounds_compares_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    compare, seen = onnx.difference, []

    def difference(*args: Any) -> float:
        seen.append(torch.get_float32_matmul_precision())
        return compare(*args)

    monkeypatch.setattr(onnx, "difference", difference)
    name, spec, options = case = KINDS["sac"]
    torch.set_float32_matmul_precision("medium")
    try:
        onnx.Template(loaded(*case), make_learner(name, spec, **options).weights())
        assert {*seen} == {"highest"} and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * (name in IMAGES))
        for name, case in KINDS.items()
    ],
)
def test_a_file_plays_as_its_policy(
    case: tuple[str, EnvSpec, Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support")
    played, path = loaded(*case), tmp_path / "policy.onnx"
    onnx.save(played, path)
    session = onnxruntime.InferenceSession(path)
    assert onnx.difference(played, session, seed=50) <= onnx.TOLERANCE
    facts = session.get_modelmeta().custom_metadata_map
    assert facts["run"] == "r" and facts["version"] == "3"
    assert EnvSpec.from_json(json.loads(facts["spaces"])) == case[1]
    seen = np.zeros((7, *case[1].input_shape), case[1].observation_dtype)  # another number of rows
    state = played.policy.initial_state(7)
    action = session.run(["action"], {"observation": seen, **state})[0]
    expected = played.policy.act(seen, state)
    assert action.dtype == expected.dtype and action.shape == expected.shape
    assert np.allclose(action, expected, atol=1e-5)


def test_each_version_of_a_run_is_published_as_a_file_too(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(server, target_config(weights={"onnx": True}, learner={"publish_every_s": 0.1}))
    run.play(400)
    with finished(run):
        until(lambda: run.index.latest >= 2)
    sizes = {version: size for version, size in run.index.sizes.items() if version}  # 0: of the test's player
    assert len(sizes) >= 2
    for version, size in sizes.items():
        data = run.client.get(keys.weights_onnx(run.id, version))
        played, session = policy.from_run(run.client, run.id, version), onnxruntime.InferenceSession(data)
        assert onnx.difference(played, session) <= onnx.TOLERANCE
        assert size == len(data) + len(policy.weights_blob(run.client, run.id, version))
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "docs")
    toy = {"env": {"id": "ddrl/Pick-v0"}, "algorithm": {"name": "docs.own_algorithm"}}
    with pytest.raises(ConfigError, match="the Policy of docs.own_algorithm has no method module; add it"):
        Run(server, validate(toy | {"weights": {"onnx": True}}))


class Odd(nn.Module):
    """A layer of a user's that no ONNX operator computes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.digamma(x.abs() + 1.0)


def odd_network(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(*shape, 8), Odd(), nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore")
def test_the_layer_that_cannot_be_exported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "test_onnx,docs")
    made = loaded("sac", CONTINUOUS, {"network": "test_onnx:odd_network"})
    with pytest.raises(onnx.OnnxError, match=r"^0\.1 \(Odd\): is not for ONNX \(.*digamma.*\)") as raised:
        onnx.save(made, tmp_path / "policy.onnx")
    assert "\n" not in str(raised.value)
    with pytest.raises(onnx.OnnxError, match="its Policy has no module to export; add it as the guide shows"):
        onnx.save(loaded("docs.own_algorithm", DISCRETE, {}), tmp_path / "policy.onnx")
    assert not list(tmp_path.iterdir())


class Off(nn.Module):
    """A module whose outputs are wrong."""

    def __init__(self, right: nn.Module, by: float) -> None:
        super().__init__()
        self.right, self.by = right, by

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.right(x) + self.by
        return result


@pytest.mark.parametrize("by", [1e-3, float("nan")])
def test_a_file_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    made = loaded("ppo", CONTINUOUS, {})
    wrong = Off(made.policy.module(), by)  # type: ignore[attr-defined]
    monkeypatch.setattr(made.policy, "module", lambda: wrong)
    with pytest.raises(onnx.OnnxError, match="r@3: in onnxruntime it differs by .*; nothing was written"):
        onnx.save(made, tmp_path / "policy.onnx")
    assert not list(tmp_path.iterdir())


def test_runs_and_files_are_exported(client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = validate({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo", "hidden_sizes": [8]}})
    run = start(client, config)
    publish_initial(client, run, take(client, run))
    monkeypatch.chdir(tmp_path)
    report = commands.call_json("export", run, "--onnx")
    assert report["path"] == f"{run}-v0.onnx" and report["version"] == 0
    assert report["bytes"] == (tmp_path / report["path"]).stat().st_size
    assert "add --force" in commands.refused("export", run, "--onnx")
    commands.call("export", run)
    printed = commands.call("export", f"{run}-v0.safetensors", "--onnx", "--output", "again.onnx")
    assert f"wrote version 0 of {run} to again.onnx" in " ".join(printed.split())
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / report["path"]).read_bytes()
    assert "not together with --onnx" in commands.refused("export", run, "--onnx", "--folder", "card")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "pip install 'ddrl[onnx]'" in commands.refused("export", run, "--onnx", "--force")
