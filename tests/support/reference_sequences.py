"""Slow twin of sequences: a numbered environment that remembers everything, and episodes walked step by step in it.

The twin cuts whole histories, so it needs no context, and shows whether a fragment's context was enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.fragments import plain_fragment

from ddrl.types import Fragment, SequenceShape

STATE_SIZE = 3
STATE_LIMIT = 2048  # integers below are exact in float16


@dataclass
class Lane:
    """All that one environment ever gave; lists by step, counted from the player's first.

    Attributes:
        frame: observation before each step, one more than there are steps.
        final: true observation after a truncated step, None after others.
        begin: first step of the episode that each step belongs to, one more than there are steps.
        values: (action_value, state_value) of each step.
    """

    frame: list[np.ndarray]
    action: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    final: list[np.ndarray | None] = field(default_factory=list)
    begin: list[int] = field(default_factory=lambda: [0])
    state: list[np.ndarray] = field(default_factory=list)
    values: list[tuple[float, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.action)


@dataclass
class SlowSequence:
    """One sequence as `Sequences` has it, without the axis of the batch."""

    first: int
    lane: int
    is_fresh: bool
    observation: np.ndarray
    previous_action: list[int]
    previous_reward: list[float]
    recurrent_state: np.ndarray
    burn_in: int
    action: list[int]
    n_step_return: list[float]
    bootstrap_discount: list[float]
    bootstrap: list[int]
    valid: list[bool]
    td_error: float


class Player:
    """Plays fragments as a collector does, each with the last `shape.context` + K - 1 steps as context.

    Rewards are small integers, so that with a dyadic gamma all sums are exact in float32. Every frame differs.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_envs: int,
        shape: SequenceShape,
        frame_stack: int = 1,
        end_probability: float = 0.15,
        images: bool = False,
        values: bool = True,
        gamma: float = 0.5,
        n_step: int = 2,
    ) -> None:
        self.shape, self.frame_stack, self.images, self.has_values = shape, frame_stack, images, values
        self.gamma, self.n_step = gamma, n_step
        self._end_probability = end_probability
        self._generator = np.random.default_rng(seed)
        self.lanes = [Lane([self._frame(lane, 0)]) for lane in range(num_envs)]
        self.seq = 0

    def fragment(self, num_steps: int) -> tuple[Fragment, list[SlowSequence]]:
        """Play on; the fragment, and its sequences."""
        played = len(self.lanes[0])
        for _ in range(num_steps):
            for index in range(len(self.lanes)):
                self._step(index)
        context = min(played, self.shape.context + self.frame_stack - 1)
        sequences = self._sequences(played)
        origin = played - context
        finals = {
            (step - origin, index): final
            for step in range(origin, played + num_steps)
            for index, lane in enumerate(self.lanes)
            if (final := lane.final[step]) is not None
        }
        stored = [one for one in sequences if not one.is_fresh]
        extras = {
            "memory_index": np.array([(one.first - origin, one.lane) for one in stored], np.int32).reshape(
                -1, 2
            ),
            "memory": np.array([one.recurrent_state for one in stored], np.float16).reshape(-1, STATE_SIZE),
        }
        if self.has_values:
            values = np.array([lane.values[origin:] for lane in self.lanes], np.float32)  # [N, C+T, 2]
            extras |= {"action_value": values[..., 0].T, "state_value": values[..., 1].T}
        frames = np.array([lane.frame[origin:] for lane in self.lanes]).swapaxes(0, 1)
        fragment = plain_fragment(
            seq=self.seq,
            context=context,
            observation=frames,
            action=self._column("action", origin, np.int64),
            reward=self._column("reward", origin, np.float32),
            terminated=self._column("terminated", origin, np.bool_),
            truncated=self._column("truncated", origin, np.bool_),
            finals=finals,
            extras=extras,
        )
        self.seq += 1
        return fragment, sequences

    def _column(self, name: str, origin: int, dtype: Any) -> np.ndarray:
        return np.array([getattr(lane, name)[origin:] for lane in self.lanes], dtype).T

    def _frame(self, lane: int, step: int, *, is_final: bool = False) -> np.ndarray:
        numbers = [lane, step % 251, step // 251, int(is_final)]
        return np.array(numbers, np.uint8).reshape(2, 2) if self.images else np.array(numbers, np.float32)

    def _step(self, index: int) -> None:
        lane, draw = self.lanes[index], self._generator
        step = len(lane)
        ends, terminates = draw.random() < self._end_probability, draw.random() < 0.5
        starts = step == lane.begin[step]
        lane.state.append(
            np.zeros(STATE_SIZE)
            if starts
            else np.array([1 + step % (STATE_LIMIT - 1), index, draw.integers(STATE_LIMIT)], np.float64)
        )
        lane.action.append(int(draw.integers(0, 6)))
        lane.reward.append(float(draw.integers(-3, 4)))
        lane.terminated.append(bool(ends and terminates))
        lane.truncated.append(bool(ends and not terminates))
        lane.final.append(self._frame(index, step + 1, is_final=True) if lane.truncated[-1] else None)
        lane.values.append((float(draw.integers(-9, 9)), float(draw.integers(-9, 9))))
        lane.frame.append(self._frame(index, step + 1))
        lane.begin.append(step + 1 if ends else lane.begin[-1])

    def _sequences(self, played: int) -> list[SlowSequence]:
        """Of the steps from `played` on, in the order of the cut."""
        result = []
        for index, lane in enumerate(self.lanes):
            step = played
            while step < len(lane):
                begin = lane.begin[step]
                end = step
                while end < len(lane) and lane.begin[end] == begin:
                    end += 1
                start = begin if begin > played - self.shape.overlap else played - self.shape.overlap
                while True:
                    length = self.shape.length if start + self.shape.length <= end else end - start
                    result.append(self._sequence(index, start, length))
                    if start + length == end:
                        break
                    start += self.shape.length - self.shape.overlap
                step = end
        return result

    def _sequence(self, index: int, start: int, length: int) -> SlowSequence:
        shape, lane = self.shape, self.lanes[index]
        begin = lane.begin[start]
        burn_in = 0
        while burn_in < shape.burn_in and start - burn_in > begin:
            burn_in += 1
        first, end = start - burn_in, start + length
        last_row = end - 1 if lane.terminated[end - 1] else end
        warm = [first + min(row, max(burn_in - 1, 0)) for row in range(shape.burn_in)]
        rows = warm + [min(start + row, last_row) for row in range(shape.length + 1)]
        returns, discounts, bootstraps, tds = [], [], [], []
        for step in range(start, start + shape.length):
            if step >= end:
                returns.append(0.0)
                discounts.append(0.0)
                bootstraps.append(length)
                continue
            return_, discount, used = 0.0, 1.0, 0
            while used < self.n_step and step + used < end:
                return_ += discount * lane.reward[step + used]
                discount *= self.gamma
                used += 1
            if lane.terminated[step + used - 1]:
                discount = 0.0
            returns.append(return_)
            discounts.append(discount)
            bootstraps.append(step + used - start)
            tds.append(abs(self._td(lane, step, step + used, return_, discount)))
        padding = [0] * (shape.length - length)
        return SlowSequence(
            first=first,
            lane=index,
            is_fresh=first == begin,
            observation=np.array([self._stack(lane, begin, end, row) for row in rows]),
            previous_action=[-1 if row == begin else lane.action[row - 1] for row in rows],
            previous_reward=[0.0 if row == begin else lane.reward[row - 1] for row in rows],
            recurrent_state=lane.state[first],
            burn_in=burn_in,
            action=lane.action[start:end] + padding,
            n_step_return=returns,
            bootstrap_discount=discounts,
            bootstrap=bootstraps,
            valid=[step < end for step in range(start, start + shape.length)],
            td_error=0.9 * max(tds) + 0.1 * sum(tds) / len(tds),
        )

    def _stack(self, lane: Lane, begin: int, end: int, row: int) -> np.ndarray:
        """What a network sees at a row; the one behind a truncated step is its final observation."""
        frames = [lane.frame[max(begin, row - back)] for back in range(self.frame_stack - 1, -1, -1)]
        final = lane.final[end - 1] if row == end else None
        if final is not None:
            frames[-1] = final
        if self.frame_stack == 1:
            return frames[0]
        return np.stack(frames) if self.images else np.concatenate(frames)

    def _td(self, lane: Lane, step: int, row: int, return_: float, discount: float) -> float:
        """h(R + d h^-1(V)) - Q; V of the row before where the policy did not see this one."""
        is_seen = row < len(lane) and not lane.truncated[row - 1]
        value = lane.values[row if is_seen else row - 1][1]
        return slow_rescale(return_ + discount * slow_unrescale(value)) - lane.values[step][0]


def slow_rescale(x: float) -> float:
    """As in algorithms.md: sign(x) (sqrt(|x| + 1) - 1) + 1e-3 x."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def slow_unrescale(x: float) -> float:
    """Its inverse, found by bisection."""
    low, high = -1e9, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slow_rescale(middle) < x else (low, middle)
    return low
