"""Environments by id or callable: made as configured, refused with a remedy."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs import registration
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text
from support.odd_envs import Pictured
from support.runs import target_config

from ddrl import envs
from ddrl.config import EnvConfig
from ddrl.envs import EnvError, requirements
from ddrl.envs.wrappers import Lanes
from ddrl.types import EnvSpec


class Ramp(gymnasium.Env[np.ndarray, int]):
    """Reward and observation are the number of the step; ends by itself at `end`."""

    def __init__(self, end: int = 5, *, actions: Any = None, observations: Any = None) -> None:
        self.observation_space = Box(0, 100, (1,), np.float64) if observations is None else observations
        self.action_space = Discrete(3) if actions is None else actions
        self.end = end
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(1, float(self.steps)), float(self.steps), self.steps >= self.end, False, {}


class Halved(gymnasium.RewardWrapper[Any, Any]):
    """A wrapper of the user's own."""

    def reward(self, reward: Any) -> float:
        return float(reward) / 2


def not_an_environment(*wrapped: object) -> int:
    return 3


RAMP = f"{__name__}:Ramp"


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)


def ramp(**settings: Any) -> EnvConfig:
    return EnvConfig(id=RAMP, **settings)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"kwargs": {"end": 3}}, [(1.0, False, False), (2.0, False, False), (3.0, True, False)]),
        ({"max_episode_steps": 2}, [(1.0, False, False), (2.0, False, True)]),
        ({"action_repeat": 2}, [(1.0 + 2.0, False, False), (3.0 + 4.0, False, False), (5.0, True, False)]),
        ({"action_repeat": 2, "max_episode_steps": 3}, [(1.0 + 2.0, False, False), (3.0, False, True)]),
        (
            {
                "wrappers": [
                    {"id": "gymnasium.wrappers:ClipReward", "kwargs": {"max_reward": 2.5}},
                    {"id": f"{__name__}:Halved"},
                ],
                "action_repeat": 2,
                "max_episode_steps": 3,
            },
            [(0.5 + 1.0, False, False), (1.25, False, True)],
        ),
    ],
)
def test_episodes_follow_the_settings(settings: dict[str, Any], rows: list[Any]) -> None:
    """Repetitions sum up and stop at the end; the limit counts the environment's own steps."""
    made, found = envs.make_one(ramp(**settings)), []
    made.reset(seed=0)
    while not found or not (found[-1][1] or found[-1][2]):
        found.append(made.step(0)[1:4])
    assert found == rows


@pytest.mark.parametrize(
    ("env_id", "settings", "message"),
    [
        ("os:nothing", {}, "module os may not be imported here; set DDRL_ALLOW_MODULES="),
        (RAMP, {"kwargs": {"endd": 3}}, r"env.kwargs \{'endd': 3\} refused .*'endd'"),
        (f"{__name__}:not_an_environment", {}, "returned int; expected a gymnasium.Env"),
        ("ddrl/Endles-v0", {}, "did you mean .*ddrl/Endless-v0"),
        *(
            (env_id, {}, rf"^{env_id}: no such environment; did you mean {near}\?$")
            for env_id, near in [
                ("Asterix", "ALE/Asterix-v5"), ("asterix-v4", "ALE/Asterix-v5"), ("PONG", "ALE/Pong-v5"),
                ("ALE/asterix-v5", "ALE/Asterix-v5"), ("endless", "ddrl/Endless-v0"), ("CartPole", "CartPole-v1"),
                ("LunarLander-v2", "LunarLander-v3"), ("lunarlander-v3", "LunarLander-v3"), ("Taxi-v9", "Taxi-v4"),
            ]
        ),
        ("Astrix", {}, "did you mean .*ALE/Asterix-v5"),
        ("qqqqqqqq", {}, r'name a Gymnasium id, "module:EnvId" or "module:callable"'),
        ("GymV21Environment-v0", {}, "pip install .*shimmy"),
        ("os:CartPole-v1", {}, "module os may not be imported here; set DDRL_ALLOW_MODULES=os "),
        (f"{__name__}:Cartpole-v1", {}, r"^Cartpole-v1: no such environment; did you mean CartPole-v1\?$"),
        (f"{__name__}:ALE/Pong-v5", {}, ":ALE/Pong-v5: is a game; name it ALE/Pong-v5"),
        *(
            ("ddrl/Catch-v0", {"kwargs": {"size": size, "pixels": pixels}},
             f"size {size}, pixels {pixels}: size must be 3 or more, and pixels a multiple of it")
            for size, pixels in [(2, 84), (5, 84), (12, 0), (12, 6)]
        ),
        *(
            ("CartPole-v1", {"wrappers": [{"id": name, "kwargs": kwargs}]}, rf"^{name}: {message}")
            for name, kwargs, message in [
                ("gymnasium.wrappers:ClipRewards", {}, r"no such wrapper; did you mean ClipReward\?"),
                ("gymnasium.wrappers:NormalizeReward", {}, "its statistics would differ in each process; use "),
                ("gymnasium.wrappers:RecordVideo", {"video_folder": "v"}, "would write on each machine; use"),
                ("gymnasium.wrappers:TimeLimit", {"most": 3}, r"kwargs \{'most': 3\} refused \(.*'most'"),
                ("gymnasium.wrappers:TransformReward", {}, r"kwargs \{\} refused \(.*'func'"),
                ("gymnasium.wrappers:vector", {}, r"kwargs \{\} refused \('module' object is not callable\)"),
                ("os:system", {}, "module os may not be imported here; set DDRL_ALLOW_MODULES="),
                (f"{__name__}:not_an_environment", {}, "returned int; expected a gymnasium.Env"),
                ("ClipReward", {}, 'is not of the form "module:callable"'),
            ]
        ),
        ("ddrl/Recall-v0", {"kwargs": {"delay": -1}}, "delay must be 0 or more, num_cues 2 or more"),
        ("ddrl/Recall-v0", {"kwargs": {"num_cues": 1}}, "delay must be 0 or more, num_cues 2 or more"),
    ],
)  # fmt: skip
def test_environments_that_cannot_be_made_are_refused(
    env_id: str, settings: dict[str, Any], message: str
) -> None:
    for build in (envs.make_one, envs.make_vector):
        with pytest.raises(EnvError, match=message):
            build(EnvConfig(id=env_id, **settings))


def test_gymnasiums_own_form_is_an_id_that_the_module_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        gymnasium.registry, "own/Ramp-v0", registration.EnvSpec("own/Ramp-v0", entry_point=Ramp)
    )
    settings = EnvConfig(id=f"{__name__}:own/Ramp-v0", kwargs={"end": 3}, max_episode_steps=2)
    made = envs.make_one(settings)
    assert isinstance(made.unwrapped, Ramp) and made.spec.max_episode_steps == 2
    run = target_config(env=settings.model_dump())
    requirements.check_machine(run, {})
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    with pytest.raises(requirements.UnfitError, match="may not be imported here; set DDRL_ALLOW_MODULES="):
        requirements.check_machine(run, {})


def test_an_older_id_is_played_without_colored_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        envs.make_one(EnvConfig(id="CartPole-v0")).close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "spec",
    [
        EnvSpec("ddrl/Target-v0", (1,), "float32", "continuous", (1,), (), (-2.0,), (2.0,)),
        EnvSpec("CartPole-v1", (4,), "float32", "discrete", (), (2,)),
        EnvSpec("ddrl/Pick-v0", (4,), "float32", "discrete", (), (4,)),
        EnvSpec("ddrl/Pairs-v0", (7,), "float32", "multi_discrete", (2,), (3, 4)),
        EnvSpec("ddrl/Spot-v0", (8, 8, 1), "uint8", "discrete", (), (4,)),
        EnvSpec(RAMP, (1,), "float32", "discrete", (), (3,)),  # its space is float64
    ],
)
def test_describe(spec: EnvSpec) -> None:
    assert envs.describe(EnvConfig(id=spec.env_id)) == spec


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"observations": Text(9)}, "part '' of the observations of Text cannot be a vector; wrap"),
        (
            {"observations": Dict(a=Dict(b=Text(9)))},
            r"part 'a\.b' of the observations of Text cannot be a vector",
        ),
        (
            {"observations": Dict(a=Dict(c=Box(0, 255, (9, 9), np.uint8), b=Text(9)))},
            r"part 'a\.b' of the observations of Text cannot be a vector",
        ),
        ({"actions": Discrete(3, start=1)}, "actions start at 1; wrap"),
        ({"actions": MultiDiscrete([3, 4], start=[0, 2])}, r"actions start at \[0, 2\]; wrap"),
        ({"actions": MultiDiscrete([[3, 4], [2, 2]])}, r"actions of shape \(2, 2\) are no vector; wrap"),
        ({"actions": MultiDiscrete([])}, r"actions of shape \(0,\) are no vector"),
        ({"actions": Box(-np.inf, np.inf, (1,), np.float32)}, "has no bounds"),
        ({"actions": Box(-np.finfo("f4").max, np.finfo("f4").max, (1,), np.float32)}, "has no bounds"),
        ({"actions": Box(-np.finfo("f8").max, np.finfo("f8").max, (1,), np.float64)}, "has no bounds"),
        ({"actions": Box(0, 9, (1,), np.int64)}, "is not supported"),
        ({"actions": gymnasium.spaces.MultiBinary(2)}, "is not supported"),
    ],
)
def test_spaces_that_networks_do_not_know_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message) as refused:
        envs.describe(ramp(kwargs=kwargs))
    assert "\n" not in str(refused.value)


def test_bounds_that_float32_cannot_hold_are_those_just_inside() -> None:
    allowed = Box(np.array([-np.pi, -0.1, -1.0]), np.array([np.pi, 0.1, 1.0]), dtype=np.float64)
    spec = envs.describe(ramp(kwargs={"actions": allowed}))
    for bound in (spec.action_low, spec.action_high):
        assert allowed.contains(np.array(bound, np.float32).astype(np.float64))
        np.testing.assert_allclose(np.abs(bound), [np.pi, 0.1, 1.0], rtol=2e-7)


def test_observations_of_several_parts_become_one_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the final ones; parts are in the space's order, and a choice of n is n numbers."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    config = EnvConfig(id="support.odd_envs:Parts", num_envs=2, max_episode_steps=2)
    spec = envs.describe(config)
    assert (spec.observation_shape, spec.observation_dtype) == ((10,), "float32")
    vector = envs.make_vector(config)
    envs.check_spaces(vector, spec)
    expected = [[step, 1, 0, 0, 1, 0.25, 0.5, 1, 0, 1] for step in range(3)]
    assert vector.reset(seed=[1, 2])[0].tolist() == [expected[0]] * 2
    assert vector.step(np.zeros(2, np.int64))[0].tolist() == [expected[1]] * 2
    observation, *_, info = vector.step(np.zeros(2, np.int64))
    assert observation.tolist() == [expected[0]] * 2
    assert [row.tolist() for row in info["final_obs"]] == [expected[2]] * 2


def test_images_beside_numbers_become_one_vector_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    config = EnvConfig(id="support.odd_envs:Pictured", num_envs=2, max_episode_steps=2)
    spec = envs.describe(config)
    assert (spec.observation_shape, spec.observation_dtype) == ((6 + 4 * 12,), "uint8")
    assert spec.image_shapes == ((2, 3, 1),) and not spec.is_vector
    assert EnvSpec.from_json(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
    vector = envs.make_vector(config)
    envs.check_spaces(vector, spec)
    with pytest.raises(
        EnvError, match=r"image_shapes is \(\(2, 3, 1\),\) here, but \(\(3, 2, 1\),\) is expected"
    ):
        envs.check_spaces(vector, dataclasses.replace(spec, image_shapes=((3, 2, 1),)))

    def parts(row: np.ndarray) -> tuple[list[int], list[float]]:
        return row[:6].tolist(), row[6:].copy().view(np.float32).tolist()

    expected = [([step] * 6, [step, 1, 0, 0, 1, 0.25, 0.5, 1, 0, 1, 0, 1]) for step in range(3)]
    assert [parts(row) for row in vector.reset(seed=[1, 2])[0]] == [expected[0]] * 2
    assert spec.numbers(vector.step(np.zeros(2, np.int64))[0]).tolist() == [expected[1][1]] * 2
    observation, *_, info = vector.step(np.zeros(2, np.int64))
    assert [parts(row) for row in observation] == [expected[0]] * 2
    assert [parts(row) for row in info["final_obs"]] == [expected[2]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"frame_stack": 2},
            r"frame_stack is 2, but observations \[\(2, 3, 1\)\] are neither vectors nor grey images",
        ),
        ({"action_mask": True}, "env.action_mask is for Discrete or MultiDiscrete actions and vectors, not"),
    ],
)
def test_what_images_beside_numbers_do_not_have(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    with pytest.raises(EnvError, match=message):
        envs.describe(EnvConfig(id="support.odd_envs:Pictured", **options))


def test_a_number_beside_images_that_is_not_finite_ends_the_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    made = envs.make_one(EnvConfig(id="support.odd_envs:Pictured"))
    seen = Pictured()._shown()
    with pytest.raises(ValueError, match="a number beside its images is not finite"):
        made.observation(seen | {"pair": (seen["pair"][0], np.array([0.0, np.nan]))})


@pytest.mark.parametrize("make", [envs.make_one, envs.make_vector])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_sizes": (4, 3)}, r"action_sizes is \(3, 4\) here, but \(4, 3\) is expected"),
        ({"action_shape": (3,)}, r"action_shape is \(2,\) here, but \(3,\) is expected"),
        ({"action_kind": "discrete"}, "action_kind is multi_discrete here, but discrete is expected"),
    ],
)
def test_other_spaces_than_known_are_refused(make: Any, changes: dict[str, Any], message: str) -> None:
    config = ramp(kwargs={"actions": MultiDiscrete([3, 4])}, num_envs=2)
    made, known = make(config), envs.describe(config)
    envs.check_spaces(made, known)
    envs.check_spaces(made, dataclasses.replace(known, frame_stack=4))  # the same observations
    with pytest.raises(EnvError, match=message):
        envs.check_spaces(made, dataclasses.replace(known, **changes))
    made.close()


def test_frames_of_vectors_and_grey_images_are_stacked() -> None:
    assert envs.describe(EnvConfig(id="CartPole-v1", frame_stack=3)).input_shape == (12,)
    grey = {"observations": Box(0, 255, (6, 5), np.uint8)}
    assert envs.describe(ramp(kwargs=grey, frame_stack=4)).input_shape == (4, 6, 5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-3.0, 0.0, 0.5]),
        ({"reward_scale": 0.1}, [-0.3, 0.0, 0.05]),
        ({"reward_sign": True}, [-1.0, 0.0, 1.0]),
        ({"reward_sign": True, "reward_scale": 0.1}, [-0.1, 0.0, 0.1]),
        ({"reward_clip": 2.0}, [-2.0, 0.0, 0.5]),
        ({"reward_clip": 0.25, "reward_scale": 2.0}, [-0.5, 0.0, 0.5]),
    ],
)
def test_training_reward(settings: dict[str, Any], expected: list[float]) -> None:
    given = np.array([[-3.0, 0.0, 0.5]])
    found = envs.training_reward(EnvConfig(id="CartPole-v1", **settings), given)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([expected], np.float32))
    np.testing.assert_array_equal(given, [[-3.0, 0.0, 0.5]])


def test_an_environment_gets_a_new_seed_once_it_has_gone_on_long_enough() -> None:
    """Episodes of 100 steps: each third one begins from a seed, which is named."""

    class Hundred(gymnasium.Env[np.ndarray, int]):
        observation_space, action_space = Box(0, 1, (1,), np.float32), Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
            given.append(-1 if seed is None else seed)
            self._steps = 0
            return np.zeros(1, np.float32), {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            self._steps += 1
            return np.zeros(1, np.float32), 0.0, self._steps == 100, False, {}

    given: list[int] = []
    lanes, named = Lanes([Hundred()], lambda info: []), []
    lanes.reset(seed=[5])
    for step in range(700):
        if step % 100 == 0:
            named.append(int(lanes.reset_seeds[0]))
        lanes.step(np.zeros(1, np.int64))
    assert named == given[:-1] and [one >= 0 for one in given[1:]] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert given[0] == 5 and given[3] != given[6]


def test_vector_resets_in_the_same_step() -> None:
    config = EnvConfig(id="ddrl/Endless-v0", kwargs={"max_steps": 2}, num_envs=3)
    vector = envs.make_vector(config)
    assert vector.num_envs == 3
    vector.reset(seed=[0, 1, 2])
    ends = [vector.step(np.zeros((3, 1), np.float32))[3].tolist() for _ in range(4)]
    assert ends == [[False] * 3, [True] * 3] * 2  # no step is lost to the reset
    vector.close()
