"""Environments that keep their stacks of frames themselves, the plain way, beside the fragments played in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from support.fragments import plain_fragment

from ddrl.types import Fragment


class Step(NamedTuple):
    """One step of one environment."""

    stack: np.ndarray  # [K, *O] as seen before the step
    next_stack: np.ndarray  # [K, *O] after it, of the same episode
    action: int
    reward: float
    terminated: bool
    truncated: bool


class Player:
    """N environments with random frames and episodes of 1 to 14 steps, terminated or truncated.

    Rewards are small integers, so that with a dyadic gamma all sums are exact in float32.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_envs: int = 3,
        frame_stack: int = 4,
        shape: tuple[int, ...] = (5, 3),
        dtype: str = "uint8",
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.frame_stack, self.shape, self.dtype = num_envs, frame_stack, shape, dtype
        self.num_episodes = self.num_fragments = 0
        self.steps: list[list[Step]] = []  # [time][lane]
        self.seen: list[np.ndarray] = []  # [time] [N, *O] single frames
        self.finals: dict[tuple[int, int], np.ndarray] = {}  # (time, lane) of truncated steps
        self._stacks = [[self._frame()] * frame_stack for _ in range(num_envs)]
        self._left = [self._length() for _ in range(num_envs)]

    def fragment(self, num_steps: int, context: int) -> Fragment:
        """Play on; the fragment has as much context as was played, at most `context`."""
        context = min(context, len(self.steps))
        for _ in range(num_steps):
            self._step()
        first = len(self.steps) - num_steps - context
        played = self.steps[first:]
        frames = [*self.seen[first:], self._newest()]
        self.num_fragments += 1
        return plain_fragment(
            seq=self.num_fragments - 1,
            context=context,
            observation=np.stack(frames),
            action=np.array([[step.action for step in row] for row in played], np.int64),
            reward=np.array([[step.reward for step in row] for row in played], np.float32),
            terminated=np.array([[step.terminated for step in row] for row in played]),
            truncated=np.array([[step.truncated for step in row] for row in played]),
            finals={
                (time - first, lane): self.finals[time, lane]
                for time, lane in sorted(self.finals)
                if time >= first
            },
        )

    def _step(self) -> None:
        self.seen.append(self._newest())
        row = []
        for lane in range(self.num_envs):
            stack, after = self._stacks[lane], self._frame()
            following = [*stack, after][1:]
            self._left[lane] -= 1
            ended = self._left[lane] == 0
            truncated = ended and bool(self.rng.random() < 0.5)
            if truncated:
                self.finals[len(self.steps), lane] = after
            reward, action = float(self.rng.integers(-4, 5)), int(self.rng.integers(9))
            row.append(
                Step(np.stack(stack), np.stack(following), action, reward, ended and not truncated, truncated)
            )
            self._stacks[lane] = [self._frame()] * self.frame_stack if ended else following
            if ended:
                self.num_episodes += 1
                self._left[lane] = self._length()
        self.steps.append(row)

    def _newest(self) -> np.ndarray:
        return np.stack([stack[-1] for stack in self._stacks])

    def _frame(self) -> np.ndarray:
        return self.rng.integers(0, 256, self.shape).astype(self.dtype)

    def _length(self) -> int:
        return int(self.rng.integers(1, 15))


class Expected(NamedTuple):
    """One n-step transition; next_observation is None where the episode terminated."""

    observation: np.ndarray
    action: int
    n_step_return: float
    bootstrap_discount: float
    next_observation: np.ndarray | None


def expected_transitions(steps: list[list[Step]], *, gamma: float, n: int) -> list[Expected]:
    """Those of one fragment's steps [time][lane], in order of time, then lane, walking on from each."""
    result = []
    for start, row in enumerate(steps):
        for lane, first in enumerate(row):
            total, k = 0.0, 0
            while True:
                step = steps[start + k][lane]
                total += gamma**k * step.reward
                k += 1
                if step.terminated or step.truncated or k == n or start + k == len(steps):
                    break
            discount = 0.0 if step.terminated else gamma**k
            after = None if step.terminated else step.next_stack
            result.append(Expected(first.stack, first.action, total, discount, after))
    return result
