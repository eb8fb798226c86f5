"""Tiny environments with known answers, so that learning can be tested in seconds.

Imports gymnasium: import this inside functions only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

# Classes and functions below.
_TOYS = ("Endless", "Sleep", "target", "pick", "pairs", "spot", "gauge", "Catch", "Recall", "Flip")
_NUM_QUESTIONS = 10  # in an episode of `Questions`
_MOST_STEPS = 100_000  # of an episode; all end by themselves before, unless `Endless` is told otherwise


def register_toys() -> None:
    """Register the toys with Gymnasium, once, as ddrl/Endless-v0 and so on."""
    for name in _TOYS:
        env_id = f"ddrl/{name.capitalize()}-v0"
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=f"{__name__}:{name}", max_episode_steps=_MOST_STEPS)


class Toy(gymnasium.Env[np.ndarray, Any]):
    """An environment that counts its steps; it shows [1] where a subclass gives nothing else to see."""

    observation_space: Space[Any] = Box(0.0, 1.0, (1,), np.float32)
    num_steps = 0  # of the episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.num_steps = 0
        return self.first(), {}

    def first(self) -> np.ndarray:
        """Return the first observation of an episode."""
        return np.ones(1, np.float32)


class Endless(Toy):
    """Reward 1 for each action, and no end but the time limit: the value is 1 / (1 - gamma).

    The observation is always [1]. An agent that takes the time limit for an outcome learns a smaller value.

    Args:
        max_steps: the episode is truncated after this many steps.
        discrete: the action is one of 2, instead of one number in [-1, 1].
    """

    def __init__(self, max_steps: int = 100, *, discrete: bool = False) -> None:
        self.action_space: Space[Any] = Discrete(2) if discrete else Box(-1.0, 1.0, (1,), np.float32)
        self._max_steps = max_steps

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward 1; truncated at `max_steps`."""
        self.num_steps += 1
        return np.ones(1, np.float32), 1.0, False, self.num_steps >= self._max_steps, {}


class Sleep(Toy):
    """An environment that sleeps, as one on another machine would, for tests of fleets.

    Reward 1 for action 1. The observation is always [1]; 20 steps are an episode, which is truncated.

    Args:
        step_s: duration of a step.
    """

    def __init__(self, step_s: float = 0.01) -> None:
        self.action_space = Discrete(2)
        self._step_s = step_s

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleep; the reward is the action."""
        time.sleep(self._step_s)
        self.num_steps += 1
        return np.ones(1, np.float32), float(action), False, self.num_steps >= 20, {}


class Questions(Toy):
    """A new question in each of 10 steps, independent of the answers before.

    The end is a truncation, so the value is the same in each state.

    Args:
        observations, actions: the spaces.
        ask: draws an observation and its answer.
        grade: the reward of an action, given the answer; by default 1 for the answer, else 0.
    """

    def __init__(
        self,
        observations: Space[Any],
        actions: Space[Any],
        ask: Callable[[np.random.Generator], tuple[Any, Any]],
        grade: Callable[[Any, Any], float] = lambda action, answer: float(action == answer),
    ) -> None:
        self.observation_space, self.action_space = observations, actions
        self._ask, self._grade = ask, grade

    def first(self) -> Any:
        """Start an episode with a question."""
        observation, self._answer = self._ask(self.np_random)
        return observation

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Grade the answer to the last question, and ask the next one."""
        self.num_steps += 1
        reward = self._grade(action, self._answer)
        observation, self._answer = self._ask(self.np_random)
        return observation, reward, False, self.num_steps >= _NUM_QUESTIONS, {}


def target() -> Questions:
    """Repeat the number in the observation: reward -(action - target)^2.

    Observation: the target, one number in [-1.5, 1.5]. Action: one number in [-2, 2]. The best return is 0;
    uniformly random actions give -20.8 on average (10 * (4/3 + 3/4)). The best value is 0 in each state.
    """

    def ask(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        shown = generator.uniform(-1.5, 1.5, 1).astype(np.float32)
        return shown.copy(), shown

    def grade(action: np.ndarray, answer: np.ndarray) -> float:
        return -float((action[0] - answer[0]) ** 2)

    return Questions(Box(-1.5, 1.5, (1,), np.float32), Box(-2.0, 2.0, (1,), np.float32), ask, grade)


def pick() -> Questions:
    """Name the bright entry of the observation: reward 1 for its index.

    Observation: one-hot of 4. Action: one of 4. The best return is 10; uniformly random actions give 2.5 on
    average. The value of the best policy is 1 / (1 - gamma) in each state.
    """

    def ask(generator: np.random.Generator) -> tuple[np.ndarray, int]:
        answer = int(generator.integers(4))
        return _bright(4, answer), answer

    return Questions(Box(0.0, 1.0, (4,), np.float32), Discrete(4), ask)


def pairs() -> Questions:
    """Name two bright entries at once: reward 0.5 for each that is right.

    Observation: a one-hot of 3 and one of 4, in one vector. Action: [one of 3, one of 4]. The best return is
    10; uniformly random actions give 10 * 0.5 * (1/3 + 1/4) = 2.92 on average.
    """

    def ask(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        answers = generator.integers((3, 4))
        return _bright(7, answers + (0, 3)), answers

    def grade(action: np.ndarray, answers: np.ndarray) -> float:
        return 0.5 * float((np.asarray(action) == answers).sum())

    return Questions(Box(0.0, 1.0, (7,), np.float32), MultiDiscrete([3, 4]), ask, grade)


def spot() -> Questions:
    """Name the quadrant of the bright pixel in an image: reward 1 if right.

    Observation: uint8 [8, 8, 1], black but for one pixel of 255. Action: its quadrant, 2 * lower half +
    right half. The best return is 10; uniformly random actions give 2.5 on average.
    """

    def ask(generator: np.random.Generator) -> tuple[np.ndarray, int]:
        row, column = generator.integers(8, size=2)
        image = np.zeros((8, 8, 1), np.uint8)
        image[row, column] = 255
        return image, 2 * int(row >= 4) + int(column >= 4)

    return Questions(Box(0, 255, (8, 8, 1), np.uint8), Discrete(4), ask)


def gauge(*, discrete: bool = False) -> Questions:
    """Read a column from an image and a sign beside it: the answer is the column, or its mirror image.

    Observation: a Dict with `image`, uint8 [8, 8, 1], black but for one column of 255, and `sign`, one of 2. Action:
    the answer's position, one number in [-1, 1]; the reward is minus the square of its distance from the right one.
    The best return is 0; uniformly random actions give -6.6 on average, and either part alone -3.3 at best.

    Args:
        discrete: the action is one of the 8 columns, with reward 1 for the right one.
    """

    def ask(generator: np.random.Generator) -> tuple[Any, int]:
        column, sign = int(generator.integers(8)), int(generator.integers(2))
        image = np.zeros((8, 8, 1), np.uint8)
        image[:, column] = 255
        return {"image": image, "sign": sign}, 7 - column if sign else column

    def grade(action: Any, answer: int) -> float:
        return float(action == answer) if discrete else -float((action[0] - (answer / 4 - 0.875)) ** 2)

    seen = Dict(image=Box(0, 255, (8, 8, 1), np.uint8), sign=Discrete(2))
    return Questions(seen, Discrete(8) if discrete else Box(-1.0, 1.0, (1,), np.float32), ask, grade)


class Catch(Toy):
    """Catch the falling ball: it starts anywhere in the top row and falls one row a step.

    Observation: grey uint8 [pixels, pixels], a board of size x size cells, black but for the ball and the paddle
    in the bottom row. Action: move the paddle by -1, 0 or 1 cells (0, 1, 2). The only reward comes with the end,
    after size - 1 steps: 1 if ball and paddle meet, else -1. The best return is 1, since the
    paddle starts in the middle; any policy that ignores the observation gets 2 / size - 1 (-0.833 of 12).
    Source: bsuite's catch, Osband et al. 2020, arXiv:1908.03568, there 10 x 5.

    Args:
        size: cells along a side, 3 or more.
        pixels: along a side, a multiple of size.

    Raises:
        ValueError: another size or number of pixels.
    """

    def __init__(self, size: int = 12, pixels: int = 84) -> None:
        if size < 3 or pixels < size or pixels % size:
            raise ValueError(
                f"size {size}, pixels {pixels}: size must be 3 or more, and pixels a multiple of it"
            )
        self.observation_space = Box(0, 255, (pixels, pixels), np.uint8)
        self.action_space = Discrete(3)
        self._size, self._cell = size, pixels // size

    def first(self) -> np.ndarray:
        """Drop a ball from a column drawn uniformly."""
        self._row, self._column = 0, int(self.np_random.integers(self._size))
        self._paddle = self._size // 2
        return self._draw()

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the paddle, then the ball; terminated where that reaches the bottom row."""
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self._size - 1)
        self._row += 1
        landed = self._row == self._size - 1
        reward = (1.0 if self._paddle == self._column else -1.0) if landed else 0.0
        return self._draw(), reward, landed, False, {}

    def _draw(self) -> np.ndarray:
        board = np.zeros((self._size, self._size), np.uint8)
        board[self._row, self._column] = board[-1, self._paddle] = 255
        return board.repeat(self._cell, axis=0).repeat(self._cell, axis=1)


class Recall(Toy):
    """Remember a cue: it is shown once, and its number is the right action `delay` blank steps later.

    Observation: num_cues + 1 numbers; the first is the cue as a one-hot, blank ones are 0, and the last, the only one
    whose action matters, has a 1 at the end. The reward is 1 if its action is the cue, else 0. The best return is 1; a
    policy that sees only the newest delay + 1 observations gets 1 / num_cues at best, as at random.

    Args:
        delay: blank steps, 0 or more; an episode has delay + 2 steps.
        num_cues: cues, and actions; 2 or more.

    Raises:
        ValueError: a negative delay, or fewer cues.
    """

    def __init__(self, delay: int = 8, num_cues: int = 2) -> None:
        if delay < 0 or num_cues < 2:
            raise ValueError(
                f"delay {delay}, num_cues {num_cues}: delay must be 0 or more, num_cues 2 or more"
            )
        self.observation_space = Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.action_space = Discrete(num_cues)
        self._delay, self._num_cues = delay, num_cues

    def first(self) -> np.ndarray:
        """Show a cue drawn uniformly."""
        self._cue = int(self.np_random.integers(self._num_cues))
        return _bright(self._num_cues + 1, self._cue)

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Show a blank or the question; the answer to the question terminates the episode."""
        self.num_steps += 1
        answered = self.num_steps == self._delay + 2
        asked = self.num_steps == self._delay + 1
        observation = _bright(self._num_cues + 1, -1) if asked else np.zeros(self._num_cues + 1, np.float32)
        return observation, float(answered and action == self._cue), answered, False, {}


class Flip(Toy):
    """Flip bits one at a time until they are those of the goal: reward 0 where they are, else -1.

    Observation: a Dict with the bits, as `observation` and as `achieved_goal`, and the `desired_goal`. Action: the bit,
    or none. An episode has as many steps as there are bits. The best return is 1 - size / 2 on average; at random the
    reward is almost always -1. Source: Andrychowicz et al. 2017, arXiv:1707.01495,
    section 3.1.

    Args:
        size: bits, 1 or more.
    """

    def __init__(self, size: int = 10) -> None:
        parts = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = Dict({part: Box(0.0, 1.0, (size,), np.float32) for part in parts})
        self.action_space = Discrete(size + 1)
        self._size = size

    def first(self) -> Any:
        """Draw bits and goal."""
        self._bits, self._goal = self.np_random.integers(2, size=(2, self._size)).astype(np.float32)
        return self._seen()

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Flip a bit, or none; truncated after `size` steps."""
        self.num_steps += 1
        if action < self._size:
            self._bits[action] = 1.0 - self._bits[action]
        reward = float(self.compute_reward(self._bits, self._goal, {}))
        return self._seen(), reward, False, self.num_steps >= self._size, {"is_success": reward == 0.0}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
        """Return the rewards [...] of goals [..., size]."""
        return -np.any(achieved != desired, axis=-1).astype(np.float32)

    def _seen(self) -> dict[str, np.ndarray]:
        bits = self._bits.copy()
        return {"observation": bits, "achieved_goal": bits, "desired_goal": self._goal}


def _bright(size: int, at: Any) -> np.ndarray:
    """[size] float32, 0 but for 1 at the given indices."""
    vector = np.zeros(size, np.float32)
    vector[at] = 1.0
    return vector
