"""ALE games as ddrl plays them, against plain ale_py; the protocol, lost lives, truncation, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddrl import envs
from ddrl.config import AtariConfig, EnvConfig
from ddrl.envs import EnvError
from ddrl.types import EnvSpec

pytest.importorskip("ale_py")

from ale_py.vector_env import AtariVectorEnv  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402

from ddrl.envs.atari import AtariEnv, AtariVector  # noqa: E402

BREAKOUT, ASTERIX = "ALE/Breakout-v5", "ALE/Asterix-v5"


def make(game: str = ASTERIX, num_envs: int = 1, **atari: Any) -> AtariVector:
    return AtariVector(game, AtariConfig(**atari), num_envs)


def play(vector: AtariVector, seeds: list[int], lane: int, num_steps: int) -> list[tuple[Any, ...]]:
    """Observations and results of one lane, while each lane plays random actions of its own seed, modulo 2^31."""
    generators = [np.random.default_rng(seed % 2**31) for seed in seeds]
    num_actions = int(vector.single_action_space.n)
    rows: list[tuple[Any, ...]] = [(vector.reset(seed=seeds)[0][lane].tobytes(),)]
    for _ in range(num_steps):
        actions = np.array([generator.integers(num_actions) for generator in generators])
        observation, reward, terminated, truncated, info = vector.step(actions)
        final = info["final_obs"][lane].tobytes() if terminated[lane] or truncated[lane] else None
        ends = (terminated[lane], truncated[lane], info["life_lost"][lane], final)
        rows.append((observation[lane].tobytes(), reward[lane], *ends))
    return rows


@pytest.mark.parametrize(("game", "num_steps"), [("breakout", 220), ("frogger", 330)])
def test_a_vector_matches_ale_py_and_reports_lost_lives(game: str, num_steps: int) -> None:
    """The options of ale_py's vector are those that AtariConfig's defaults mean, and report lost lives as ends.

    After a lost life FIRE takes the place of an action. Frogger, which has no FIRE, goes on with 0 lives for a moment,
    which is no end.
    """
    vector = make(f"ALE/{game.title()}-v5", 3)
    autoreset = {"autoreset_mode": AutoresetMode.SAME_STEP, "life_loss_info": True}
    options = {"stack_num": 1, "reward_clipping": False, "noop_max": 31, "num_threads": 1} | autoreset
    expected = AtariVectorEnv(game, num_envs=3, **options)
    first, info = vector.reset(seed=[3, 1, 4])
    shown, known = expected.reset(seed=np.array([3, 1, 4]))
    np.testing.assert_array_equal(first, shown[:, 0])
    assert info == {} and first.dtype == np.uint8 and first.shape == (3, 84, 84)
    generator = np.random.default_rng(0)
    num_ends, num_lost, lost = 0, 0, np.zeros(3, np.bool_)
    for _ in range(num_steps):
        actions = generator.integers(int(vector.single_action_space.n), size=3)
        lives = known["lives"]
        observation, reward, terminated, truncated, info = vector.step(actions)
        shown, paid, over, _, known = expected.step(np.where(lost & (game == "breakout"), 1, actions))
        np.testing.assert_array_equal(observation, shown[:, 0])
        np.testing.assert_array_equal(reward, paid)
        assert reward.dtype == np.float64 and not truncated.any()
        lost = info["life_lost"]
        np.testing.assert_array_equal(terminated | lost, over)
        np.testing.assert_array_equal(lost, (known["lives"] < lives) & (known["lives"] > 0) & ~terminated)
        assert ("final_obs" in info) == terminated.any()
        for lane in np.flatnonzero(terminated):
            np.testing.assert_array_equal(info["final_obs"][lane], known["final_obs"][lane, 0])
        num_ends, num_lost = num_ends + int(terminated.sum()), num_lost + int(lost.sum())
    assert num_ends >= 2 and num_lost >= 2 * num_ends


@pytest.mark.parametrize(("game", "episodic_life"), [(BREAKOUT, False), ("ALE/Pong-v5", True)])
def test_lost_lives_are_reported_only_if_configured_and_where_there_are_lives(
    game: str, episodic_life: bool
) -> None:
    vector = make(game, episodic_life=episodic_life, max_frames=200)
    vector.reset(seed=[1])
    infos = [vector.step(np.array([1]))[4] for _ in range(100)]
    reported = [info["life_lost"].tolist() for info in infos if "life_lost" in info]
    assert reported == [[False]] * 100 * episodic_life


def test_a_lane_depends_on_its_seed_alone() -> None:
    """Also in the step in which it terminates and the lanes beside it are truncated, and in its own truncation."""
    rows = play(make(BREAKOUT), [4], 0, 200)
    length = next(step for step, row in enumerate(rows) if row[2:3] == (True,))
    alone = play(make(BREAKOUT, max_frames=4 * length), [4], 0, 2 * length + 5)
    ends = {step: row[2:4] for step, row in enumerate(alone) if any(row[2:4])}
    assert ends == {length: (True, False), 2 * length: (False, True)}
    beside = play(make(BREAKOUT, 3, max_frames=4 * length), [11, 2**32 + 4, 13], 1, 2 * length + 5)
    assert alone == beside
    assert play(make(BREAKOUT), [5], 0, 50) != alone[:51]


def test_truncation_returns_the_true_last_observation() -> None:
    """A game that is not truncated shows the same; a new one begins in the same step, in which no life is lost."""
    cut, whole = make(max_frames=98), make()  # 24.5 steps: 25
    first = cut.reset(seed=[7])[0]
    np.testing.assert_array_equal(first, whole.reset(seed=[7])[0])
    generator = np.random.default_rng(0)
    for step in range(1, 26):
        action = generator.integers(9, size=1)
        observation, reward, terminated, truncated, info = cut.step(action)
        shown, paid, *_ = whole.step(action)
        assert (reward[0], terminated[0], truncated[0]) == (paid[0], False, step == 25)
        if step < 25:
            np.testing.assert_array_equal(observation, shown)
            assert "final_obs" not in info
    np.testing.assert_array_equal(info["final_obs"], shown)
    assert (observation != shown).any() and not info["life_lost"].any()
    assert [cut.step(np.array([0]))[3][0] for _ in range(50)] == ([False] * 24 + [True]) * 2


def test_one_game_is_a_lane_of_a_vector() -> None:
    """Frames, rewards and ends of whole games, which lost lives do not end."""
    kinds = set()
    one = AtariEnv(BREAKOUT, AtariConfig(max_frames=480))
    for seed in (4, 5):
        vector = make(BREAKOUT, 2, max_frames=480)
        expected = vector.reset(seed=[seed, 1])[0][0]
        observation, _ = one.reset(seed=seed)
        generator = np.random.default_rng(seed)
        ended, num_lost = False, 0
        while not ended:
            np.testing.assert_array_equal(observation, expected)
            assert one.observation_space.contains(observation)
            action = generator.integers(4)
            observation, reward, *end, _ = one.step(action)
            following, paid, terminated, truncated, info = vector.step(np.array([action, 0]))
            assert (reward, end) == (paid[0], [terminated[0], truncated[0]])
            ended = any(end)
            expected = info["final_obs"][0] if ended else following[0]
            num_lost += int(info["life_lost"][0])
        np.testing.assert_array_equal(observation, expected)
        assert num_lost >= 2
        kinds.add(tuple(end))
    assert kinds == {(True, False), (False, True)}


def test_a_filmed_game_is_the_same_game_in_color() -> None:
    """Each picture has the rows that the agent sees, also the last one, with sticky actions, and before any seed."""
    protocol = AtariConfig(sticky=0.25, max_frames=480, screen_size=210)
    filmed, plain = AtariEnv(BREAKOUT, protocol, "rgb_array"), AtariEnv(BREAKOUT, protocol)
    generator = np.random.default_rng(3)
    for seed in (None, None, 4):
        observation, expected, ended = filmed.reset(seed=seed)[0], plain.reset(seed=seed)[0], False
        while True:
            picture: Any = filmed.render()
            assert picture.shape == (210, 160, 3) and picture.dtype == np.uint8
            gray = picture @ [0.299, 0.587, 0.114]
            assert np.abs(gray.mean(axis=1) - observation.mean(axis=1)).max() < 1.0
            if seed is not None:
                np.testing.assert_array_equal(observation, expected)
            if ended:
                break
            action = generator.integers(4)
            observation, _, terminated, truncated, _ = filmed.step(action)
            expected, ended = plain.step(action)[0], terminated or truncated
    assert np.ptp(picture, axis=2).max() > 100, "gray would have three equal channels"
    with pytest.raises(EnvError, match="render_mode is human; ALE games have only rgb_array"):
        AtariEnv(BREAKOUT, protocol, "human")


@pytest.mark.parametrize(
    ("env_id", "fire_reset", "noop_max", "noop_frames"),
    [
        (ASTERIX, True, 0, {0}),  # a game without FIRE
        (ASTERIX, True, 2, {0, 1, 2}),
        (BREAKOUT, True, 0, {1}),
        (BREAKOUT, True, 3, {1, 2, 3}),
        (BREAKOUT, False, 3, {0}),  # the picture does not change before FIRE
    ],
)
def test_an_episode_begins_with_no_ops_and_fire(
    env_id: str, fire_reset: bool, noop_max: int, noop_frames: set[int]
) -> None:
    """The first observation is always one of the first frames of a game without no-ops, and each occurs."""
    start = 1 if env_id == BREAKOUT and fire_reset else 0
    frame_by_frame = make(env_id, noop_max=0, fire_reset=False, frame_skip=1)
    shown, number_of = frame_by_frame.reset(seed=[0])[0], {}
    for number in range(5):
        number_of.setdefault(shown.tobytes(), number)
        shown, *_ = frame_by_frame.step(np.array([start if number == 0 else 0]))
    assert len(number_of) == (1 if noop_frames == {0} and env_id == BREAKOUT else 5)
    vector = make(env_id, noop_max=noop_max, fire_reset=fire_reset)
    firsts = [vector.reset(seed=[0])[0], *(vector.reset()[0] for _ in range(20))]
    assert {number_of[first.tobytes()] for first in firsts} == noop_frames


@pytest.mark.parametrize(("fire_reset", "episodic_life"), [(True, True), (True, False), (False, True)])
def test_fire_serves_the_next_ball_after_a_lost_life(fire_reset: bool, episodic_life: bool) -> None:
    vector = make(BREAKOUT, fire_reset=fire_reset, episodic_life=episodic_life)
    vector.reset(seed=[1])
    assert any(vector.step(np.array([0]))[2][0] for _ in range(400)) == fire_reset


def test_sticky_actions_are_seeded_and_rewards_not_clipped() -> None:
    plain_rows, sticky, again = (play(make(sticky=sticky), [1], 0, 200) for sticky in (0.0, 0.25, 0.25))
    assert plain_rows[0] == sticky[0] and plain_rows != sticky == again
    assert max(row[1] for row in plain_rows[1:]) == 50.0


def test_returned_observations_are_not_overwritten() -> None:
    vector = make(num_envs=2)
    kept = [vector.reset(seed=[1, 2])[0], *(vector.step(np.array([0, 2]))[0] for _ in range(20))]
    copies = np.stack(kept)
    for _ in range(20):
        vector.step(np.array([3, 4]))
    vector.reset(seed=[3, 4])
    np.testing.assert_array_equal(np.stack(kept), copies)


def test_description_follows_the_settings() -> None:
    expected = EnvSpec(ASTERIX, (84, 84), "uint8", "discrete", (), action_sizes=(9,), frame_stack=4)
    assert envs.describe(EnvConfig(id=ASTERIX, frame_stack=4)) == expected
    other = EnvConfig(id="ALE/UpNDown-v5", num_envs=2, atari={"screen_size": 42, "full_actions": True})
    spec, skipping = envs.describe(other), envs.make_one(EnvConfig(id=ASTERIX, atari={"frame_skip": 3}))
    assert (skipping.render(), skipping.metadata["render_fps"]) == (None, 20)
    assert (spec.observation_shape, spec.action_sizes, spec.frame_stack) == ((42, 42), (18,), 1)
    vector = envs.make_vector(other)
    assert isinstance(vector, AtariVector) and vector.num_envs == 2
    envs.check_spaces(vector, spec)
    assert vector.reset(seed=[1, 2])[0].shape == (2, 42, 42)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"id": "ALE/WizardofWor-v5"},
            "^ALE/WizardofWor-v5: no such environment; did you mean ALE/WizardOfWor-v5",
        ),
        ({"id": "ALE/ms_pacman-v5"}, "did you mean ALE/MsPacman-v5"),
        ({"id": "PongNoFrameskip-v4"}, "^PongNoFrameskip-v4: is an older id of ALE/Pong-v5; use that one"),
        ({"id": "WizardOfWorDeterministic-v0"}, "is an older id of ALE/WizardOfWor-v5"),
        ({"id": "Pong-v4"}, "is an older id of ALE/Pong-v5"),  # known, once ale_py is imported
        ({"max_episode_steps": 9}, "env.max_episode_steps is 9, .* set env.atari.max_frames instead$"),
        ({"kwargs": {"mode": 1}}, r"env.kwargs is \{'mode': 1\}, .* set what env.atari offers instead$"),
    ],
)
def test_unknown_games_and_settings_of_other_environments_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    for build in (envs.make_one, envs.make_vector):
        with pytest.raises(EnvError, match=message) as refused:
            build(EnvConfig(**{"id": ASTERIX} | settings))
        assert "\n" not in str(refused.value)


def test_unknown_actions_are_refused() -> None:
    """ale_py would wait forever."""
    vector = make("ALE/Pong-v5", 2)
    vector.reset(seed=[1, 2])
    for actions in ([0, 6], [-1, 0], [0], [[0, 1]]):
        with pytest.raises(ValueError, match="expected 2 numbers from 0 to 5"):
            vector.step(np.array(actions))
    vector.step(np.array([5, 0]))
    one = AtariEnv("ALE/Pong-v5", AtariConfig())
    one.reset(seed=1)
    with pytest.raises(ValueError, match=r"action: 6; expected one of Discrete\(6\)"):
        one.step(np.int64(6))
