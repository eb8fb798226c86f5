"""A loaded policy that is played step by step does what `evaluate` plays, with stacked frames and recurrent state."""

from __future__ import annotations

import json
import math
import re
import runpy
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import commands
from support.algorithms import CPU, DISCRETE, PICTURES, make_learner
from torch import nn

from ddrl import config, envs, policy
from ddrl.algorithms import base
from ddrl.algorithms.base import NO_STATE, RecurrentState, initial_state
from ddrl.runs import submit
from ddrl.runs.evaluation import score
from ddrl.store import weights

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
GUIDE = re.findall(
    r"```python\n(from ddrl.policy .*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL
)[0]


def own_network(shape: tuple[int, ...]) -> nn.Module:
    """A trunk of a user's own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.ReLU())


class Sensitive:
    """A policy whose action, 0 or 1, depends on every number of its input and of its state [N, size]."""

    evaluation_epsilon = 0.0

    def __init__(self, size: int) -> None:
        self.size = size

    def initial_state(self, num_envs: int) -> RecurrentState:
        return initial_state(num_envs, self.size) if self.size else {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        rows = observation.reshape(len(observation), -1).astype(np.float64)
        seen = (rows * np.arange(1, rows.shape[1] + 1)).sum(axis=1)
        if state:
            seen += (
                3.7 * state["hidden"][:, 0] + 1.3 * state["previous_action"] + 0.7 * state["previous_reward"]
            )
            state["hidden"][:, 0] = np.sin(1e3 * seen)
        return (np.sin(1e4 * seen) > 0).astype(np.int64)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_episodes_by_hand_are_those_evaluated(size: int, frame_stack: int) -> None:
    overrides = [f"env.frame_stack={frame_stack}", "env.reward_scale=0.25"]
    settings = config.load(CONFIGS / "cartpole-dqn.yaml", overrides)
    loaded = policy.LoadedPolicy(Sensitive(size), settings, envs.describe(settings.env), "run", 1)
    lengths = []
    env: Any = envs.make_one(settings.env)
    for seed in range(20, 30):
        loaded.begin()
        observation, _ = env.reset(seed=seed)
        length, reward, ended = 0, 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(loaded.action(observation, reward))
            length, ended = length + 1, terminated or truncated
        lengths.append(length)
    env.close()
    assert lengths == list(score(loaded, range(20, 30), num_envs=3).lengths)
    assert len(set(lengths)) > 3, "else a constant action would pass"


def write(path: Path, tree: Mapping[str, Any], spaces: envs.EnvSpec, arrays: Mapping[str, Any]) -> None:
    """Write a policy file as `ddrl export` does."""
    metadata = {"format": policy.FORMAT, "run": "run", "version": "3", "config": json.dumps(tree)}
    path.write_bytes(weights.encode_weights(arrays, metadata | {"spaces": json.dumps(asdict(spaces))}))


def export(preset: str, *overrides: str, seed: int = 1) -> None:
    """Write a policy of a preset with its first weights to lunar.safetensors."""
    settings = config.load(f"{CONFIGS}/{preset}.yaml", list(overrides))
    spaces = envs.describe(settings.env)
    learner = base.resolve(settings, spaces).learner(device=CPU, seed=seed)
    arrays = {name: np.asarray(tensor) for name, tensor in learner.weights().items()}
    if "observation_std" in arrays:  # small velocities count: this car climbs the hill
        arrays["observation_std"] = np.array([10.0, 0.001], np.float32)
    tree = submit.named(settings, spaces).model_dump(mode="json", by_alias=True)
    write(Path("lunar.safetensors"), tree, spaces, arrays)


@pytest.mark.parametrize(
    ("preset", "overrides", "seed"),
    [
        ("lunar", [], 1),
        ("mountaincar", [], 13),  # returns -118, without the action repeat -165
        ("mountaincar", ["env.max_episode_steps=100"], 1),
        ("catch", [], 1),
        ("catch", ["algorithm.norm=group"], 1),
        ("catch", ["algorithm.norm=batch", "algorithm.dueling=true"], 1),
        ("catch", [f"algorithm.network={__name__}:own_network", "algorithm.hidden_sizes=[128,128]"], 1),
        ("recall", [], 1),
        ("asterix", ["env.atari.max_frames=240", "env.atari.sticky=0.25"], 1),
    ],
)
def test_the_lines_of_the_guide_play_what_evaluate_plays(
    preset: str, overrides: list[str], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if preset == "asterix":
        pytest.importorskip("ale_py")
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)
    monkeypatch.chdir(tmp_path)
    export(preset, *overrides, seed=seed)
    Path("play.py").write_text(GUIDE)
    runpy.run_path("play.py")
    total = float(capsys.readouterr().out)
    report = commands.call_json("evaluate", "lunar.safetensors", "-n", "1", "--epsilon", "0")
    assert total == report["returns"][0]
    if "mountaincar" in preset:
        assert total == (-100 if overrides else -118)


def test_an_environment_of_ones_own_is_made_where_its_module_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "ddrl.envs.toy")
    export(
        "cartpole",
        "env.id=ddrl.envs.toy:spot",
        "algorithm.network=conv",
        "algorithm.normalize_observations=false",
    )
    player = policy.load("lunar.safetensors")
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    with pytest.raises(envs.EnvError, match="set DDRL_ALLOW_MODULES=ddrl on every machine"):
        player.make_env()


def test_the_environment_renders_on_request() -> None:
    settings = config.load(f"{CONFIGS}/cartpole.yaml")
    loaded = policy.LoadedPolicy(Sensitive(0), settings, envs.describe(settings.env), "run", 1)
    env = loaded.make_env(render_mode="rgb_array")
    env.reset(seed=1)
    assert np.shape(env.render()) == (400, 600, 3)
    env.close()
    assert loaded.make_env().render_mode is None


def test_a_policy_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    learner = make_learner("ppo", DISCRETE, hidden_sizes=(8,))
    arrays = {name: tensor.numpy() for name, tensor in learner.weights().items()}
    path = tmp_path / "a.policy"
    for size in (8, 9):
        tree = {"env": {"id": "Toy-v0"}, "algorithm": {"name": "ppo", "hidden_sizes": [size]}}
        write(path, tree, DISCRETE, arrays)
        if size == 8:
            assert policy.load(path).action(np.zeros(3, np.float32)).shape == ()
    with pytest.raises(policy.PolicyFileError, match=r"do not fit .* \(actor\.layers\.0\.bias: shape \(8,\)"):
        policy.load(path)


@pytest.mark.parametrize(
    ("algorithm", "spaces"),
    [
        ({"name": "ppo", "hidden_sizes": [2**30, 2**30]}, DISCRETE),
        ({"name": "dqn", "hidden_sizes": [2**30]}, DISCRETE),
        ({"name": "dqn", "hidden_sizes": [50_000, 50_000]}, DISCRETE),
        ({"name": "dqn", "hidden_sizes": [2**20, 2**20], "noisy": True, "dueling": True}, DISCRETE),
        ({"name": "dqn", "network": "data_efficient"}, replace(DISCRETE, observation_shape=(84, 10**9))),
        (
            {"name": "dqn", "network": "impala", "norm": "batch"},
            replace(DISCRETE, observation_shape=(84, 84, 10**9)),
        ),
        ({"name": "ppo", "network": "nature"}, replace(DISCRETE, observation_shape=(10**6, 10**6))),
        ({"name": "ppo", "network": "conv"}, replace(PICTURES, observation_shape=(84, 84, 10**9))),
        ({"name": "sac", "network": "conv"}, replace(PICTURES, observation_shape=(84, 84, 10**9))),
        (
            {
                "name": "impala",
                "network": "nature",
                "recurrent": "gru",
                "recurrent_size": 2**20,
                "shared": True,
            },
            replace(DISCRETE, observation_shape=(84, 84)),
        ),
        ({"name": "r2d2", "recurrent_size": 2**20}, DISCRETE),
        ({"name": "r2d2"}, replace(DISCRETE, action_sizes=(2**40,))),
        ({"name": "discrete_sac"}, replace(DISCRETE, action_sizes=(2**40,))),
    ],
)
def test_a_policy_file_of_networks_larger_than_the_memory_is_refused(
    algorithm: dict[str, Any], spaces: envs.EnvSpec, tmp_path: Path
) -> None:
    path, tree = tmp_path / "a.policy", {"env": {"id": "Toy-v0"}, "algorithm": algorithm}
    write(path, tree, spaces, dict.fromkeys(("epsilon", "log_temperature"), np.float32(0)))
    with pytest.raises(policy.PolicyFileError, match=r"do not fit .*(Missing key|: shape )"):
        policy.load(path)


def test_a_return_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export("pendulum")
    player = policy.load("lunar.safetensors")
    player.policy.load({name: np.full_like(array, np.nan) for name, array in player.weights.items()})
    with pytest.raises(envs.EnvError, match="the return from seed 5 is nan; check the environment's rewards"):
        score(player, [5])


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        ({"observation_shape": (3.5,)}, "describes no spaces"),
        ({"observation_shape": (-1,)}, "describes no spaces"),
        ({"action_sizes": 4}, "describes no spaces"),
        ({"action_kind": "continuous", "action_shape": (2,)}, "describes no spaces"),
        ({"action_sizes": ()}, "do not fit the networks"),
        ({"observation_shape": (2**60,)}, "do not fit the networks"),
        ({"observation_dtype": "V1000000000"}, "describes no spaces"),
        ({"has_mask": True}, r"env\.action_mask or env\.frame_stack of its config and of its spaces differ"),
        ({"frame_stack": 2}, r"env\.action_mask or env\.frame_stack of its config and of its spaces differ"),
    ],
)
def test_a_policy_file_with_odd_spaces_is_refused(
    spaces: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    learner = make_learner("ppo", DISCRETE, hidden_sizes=(8,))
    arrays = {name: tensor.numpy() for name, tensor in learner.weights().items()}
    tree = {"env": {"id": "Toy-v0"}, "algorithm": {"name": "ppo", "hidden_sizes": [8]}}
    write(tmp_path / "a.policy", tree, replace(DISCRETE, **spaces), arrays)
    with pytest.raises(policy.PolicyFileError, match=message):
        policy.load(tmp_path / "a.policy")
