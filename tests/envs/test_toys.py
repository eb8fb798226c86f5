"""Toys have the answers, best returns and returns of random policies of their docstrings."""

from __future__ import annotations

import itertools
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.runs import toy_answers

from ddrl import envs
from ddrl.config import EnvConfig
from ddrl.envs.toy import gauge


def make(env_id: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return envs.make_one(EnvConfig(id=env_id, kwargs=kwargs))


@pytest.mark.parametrize("discrete", [False, True])
def test_endless_pays_until_the_time_limit(discrete: bool) -> None:
    toy = make("ddrl/Endless-v0", max_steps=7, discrete=discrete)
    shown, _ = toy.reset(seed=0)
    for step in range(1, 8):
        np.testing.assert_array_equal(shown, [1.0])
        shown, *rest, _ = toy.step(toy.action_space.sample())
        assert rest == [1.0, False, step == 7]


def test_sleep_takes_step_s() -> None:
    toy = make("ddrl/Sleep-v0", step_s=0.02)
    toy.reset(seed=0)
    begun = time.monotonic()
    assert [toy.step(action)[1:4] for action in (0, 1)] == [(0.0, False, False), (1.0, False, False)]
    assert time.monotonic() - begun >= 0.04


def test_target() -> None:
    target = make("ddrl/Target-v0")
    shown, _ = target.reset(seed=3)
    for step in range(10):
        offset = 0.5 if step == 4 else 0.0
        shown, reward, terminated, truncated, _ = target.step(shown + np.float32(offset))
        assert reward == pytest.approx(-(offset**2), abs=1e-6)
        assert (terminated, truncated) == (False, step == 9)
        assert target.observation_space.contains(shown)


@pytest.mark.parametrize(
    ("env_id", "sizes", "random_return", "num_observations"),
    [
        ("ddrl/Pick-v0", (4,), 2.5, 4),
        ("ddrl/Pairs-v0", (3, 4), 10 * 0.5 * (1 / 3 + 1 / 4), 12),
        ("ddrl/Spot-v0", (4,), 2.5, 64),
    ],
)
def test_toys_that_show_their_answer(
    env_id: str, sizes: tuple[int, ...], random_return: float, num_observations: int
) -> None:
    """Every action's reward is known; answers are uniform, so any fixed action scores as random ones do."""
    toy = make(env_id)
    generator = np.random.default_rng(0)
    answers, random_total, seen = [], 0.0, set()
    for episode in range(300):
        shown, _ = toy.reset(seed=episode)
        for step in range(10):
            assert toy.observation_space.contains(shown)
            seen.add(shown.tobytes())
            assert shown.max() == toy.observation_space.high.max()
            answer = np.atleast_1d(toy_answers(shown[None])[0])
            answers.append(answer)
            chosen = generator.integers(sizes)
            shown, reward, terminated, truncated, _ = toy.step(chosen if len(sizes) > 1 else chosen[0])
            assert reward == np.mean(chosen == answer)
            assert (terminated, truncated) == (False, step == 9)
            random_total += reward
    assert random_total / 300 == pytest.approx(random_return, abs=0.25)
    for dimension, size in enumerate(sizes):
        shares = np.bincount(np.array(answers)[:, dimension], minlength=size) / 3000
        np.testing.assert_allclose(shares, 1 / size, atol=0.04)
    assert len(seen) == num_observations


@pytest.mark.parametrize("discrete", [True, False])
def test_gauge_is_a_column_that_the_sign_mirrors(discrete: bool) -> None:
    toy = gauge(discrete=discrete)
    seen, costs = set(), []
    for episode in range(100):
        shown, _ = toy.reset(seed=episode)
        for step in range(10):
            assert toy.observation_space.contains(shown)
            (column,) = np.flatnonzero(shown["image"][episode % 8, :, 0])
            answer = (column, 7 - column)[shown["sign"]]
            seen.add((column, shown["sign"]))
            position = -0.875 + 0.25 * answer
            wrong = (answer + 1) % 8
            chosen: Any = (answer if step % 2 else wrong) if discrete else toy.np_random.uniform(-1, 1, 1)
            expected = step % 2 if discrete else -((chosen[0] - position) ** 2)
            shown, reward, terminated, truncated, _ = toy.step(chosen)
            assert reward == pytest.approx(expected)
            assert (terminated, truncated) == (False, step == 9)
            costs.append(reward)
    assert len(seen) == 16
    if not discrete:
        assert np.mean(costs) == pytest.approx(-0.66, abs=0.06)


def slow_board(image: np.ndarray, size: int) -> np.ndarray:
    """[size, size] bool of an image, whose cells must be of one color each, black or white."""
    cell = image.shape[0] // size
    board = np.zeros((size, size), bool)
    for row, column in itertools.product(range(size), repeat=2):
        (color,) = np.unique(image[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell])
        assert color in (0, 255)
        board[row, column] = color == 255
    return board


@pytest.mark.parametrize(("size", "pixels"), [(12, 84), (3, 9), (6, 36)])
def test_catch_shows_ball_and_paddle_and_can_always_be_won(size: int, pixels: int) -> None:
    """A policy that only reads the image wins from every column."""
    toy = make("ddrl/Catch-v0", size=size, pixels=pixels)
    columns = set()
    for episode in range(5 * size):
        image, _ = toy.reset(seed=episode)
        expected_paddle, ended, num_steps = size // 2, False, 0
        while not ended:
            assert toy.observation_space.contains(image) and image.shape == (pixels, pixels)
            board = slow_board(image, size)
            (ball,) = np.flatnonzero(board[num_steps])
            (paddle,) = np.flatnonzero(board[-1])
            assert board.sum() == 2 and paddle == expected_paddle
            columns.add(ball)
            move = int(np.sign(ball - paddle))
            image, reward, ended, truncated, _ = toy.step(np.int64(move + 1))
            expected_paddle, num_steps = paddle + move, num_steps + 1
            assert not truncated and reward == float(ended)
        assert num_steps == size - 1 and slow_board(image, size)[-1, ball]
    assert columns == set(range(size))


@pytest.mark.parametrize(("action", "end"), [(0, 0), (1, 6), (2, 11)])
def test_catch_is_won_only_where_the_paddle_ends_which_never_leaves_the_board(action: int, end: int) -> None:
    toy, returns = make("ddrl/Catch-v0"), set()
    for episode in range(60):
        image, _ = toy.reset(seed=episode)
        (column,) = np.flatnonzero(slow_board(image, 12)[0])
        for _ in range(11):
            image, reward, ended, *_ = toy.step(np.int64(action))
        assert ended and reward == (1.0 if column == end else -1.0) and slow_board(image, 12)[-1, end]
        returns.add(reward)
    assert returns == {1.0, -1.0}


@pytest.mark.parametrize(("delay", "num_cues"), [(8, 2), (1, 4), (0, 3)])
def test_recall_needs_more_than_the_newest_observations(delay: int, num_cues: int) -> None:
    """Every cue, every answer: before the answer the newest delay + 1 observations are always the same ones."""
    toy = make("ddrl/Recall-v0", delay=delay, num_cues=num_cues)
    generator = np.random.default_rng(0)
    seen: dict[int, set[bytes]] = {}  # length of a stack -> stacks seen when asked
    returns: dict[tuple[int, int], set[float]] = {}  # cue, answer -> returns
    cues = []
    for seed in range(40 * num_cues):
        shown, _ = toy.reset(seed=seed)
        cue, rows = int(shown.argmax()), [shown]
        cues.append(cue)
        for _ in range(delay + 1):
            shown, *rest, _ = toy.step(generator.integers(num_cues))  # without effect
            assert rest == [0.0, False, False] and toy.observation_space.contains(shown)
            rows.append(shown)
        assert rows[0].sum() == 1 and rows[0][-1] == 0 and rows[-1][-1] == 1
        for length in range(1, delay + 3):
            seen.setdefault(length, set()).add(np.concatenate(rows[-length:]).tobytes())
        answer = int(generator.integers(num_cues))
        _, reward, terminated, truncated, _ = toy.step(np.int64(answer))
        assert (terminated, truncated) == (True, False)
        returns.setdefault((cue, answer), set()).add(reward)
    num_stacks = {length: len(stacks) for length, stacks in seen.items()}  # the longest one contains the cue
    assert num_stacks == dict.fromkeys(range(1, delay + 2), 1) | {delay + 2: num_cues}
    pairs = itertools.product(range(num_cues), repeat=2)  # any fixed answer gets the share of its cue
    assert returns == {(cue, answer): {float(cue == answer)} for cue, answer in pairs}
    np.testing.assert_allclose(np.bincount(cues) / len(cues), 1 / num_cues, atol=0.12)
