"""Slow twins of the items of a replay: players that remember all they played, and items walked in whole histories.

The twins need no context, and so show whether a fragment's context was enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from support.reference_returns import slow_rescale, slow_return, slow_unrescale

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
    action: list[Any] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    final: list[np.ndarray | None] = field(default_factory=list)
    begin: list[int] = field(default_factory=lambda: [0])
    state: list[np.ndarray] = field(default_factory=list)
    values: list[tuple[float, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.action)

    def stack(self, begin: int, row: int, size: int) -> np.ndarray:
        """The input at a row of the episode that began at `begin`; behind a truncation its final observation."""
        frames = [self.frame[max(begin, row - back)] for back in range(size - 1, -1, -1)]
        if row > begin and (final := self.final[row - 1]) is not None:
            frames[-1] = final
        if size == 1:
            return frames[0]
        return np.concatenate(frames) if frames[0].ndim == 1 else np.stack(frames)

    def n_step(self, start: int, end: int, *, gamma: float, n: int) -> tuple[float, float, int]:
        """(return, bootstrap discount, number of rewards) from `start`, up to step `end` (exclusive)."""
        columns = (self.reward, self.terminated, self.truncated)
        return slow_return(*(column[start:end] for column in columns), gamma=gamma, n=n)

    def seen_value(self, row: int) -> float:
        """The state value at a row; of the row before where the policy did not see this one."""
        is_seen = row < len(self) and not self.truncated[row - 1]
        return self.values[row if is_seen else row - 1][1]


class Transition(NamedTuple):
    """One n-step transition; next_observation is None where the episode terminated."""

    observation: np.ndarray
    action: Any
    n_step_return: float
    bootstrap_discount: float
    next_observation: np.ndarray | None
    td_error: float


SlowSequence = SimpleNamespace
"""The fields of one sequence of `Sequences`, without the axis of the batch; its first row, lane and TD error."""


def make_fragment(producer: int, seq: int, **columns: Any) -> Fragment:
    """Return a fragment in which no episode ended."""
    origin = {"run": "run", "producer": producer, "incarnation": 7, "seq": seq, "policy_version": 0}
    episodes = {"episode_return": np.zeros(0, np.float32), "episode_length": np.zeros(0, np.int32)}
    return Fragment(**origin, **episodes, **columns)


class Player:
    """N environments with random endings, whose fragments have context as a collector's.

    Rewards and values are small integers, so that with a dyadic gamma all sums are exact in float32. Every frame of
    every player below 8 differs. Fragments for sequences (of `shape`) have recurrent states.
    """

    def __init__(
        self, seed: int = 0, *, num_envs: int = 2, player: int = 0, observation: tuple[int, ...] = (4,),
        dtype: str = "float32", frame_stack: int = 1, shape: SequenceShape | None = None, end_probability: float = 0.15,
        values: bool = False, continuous: bool = False, n: int = 1,
    ) -> None:  # fmt: skip
        self.player, self.shape, self.frame_stack, self.has_values = player, shape, frame_stack, values
        self.context = frame_stack - 1 + (shape.context if shape else n - 1)
        self._observation, self._dtype, self._continuous = observation, dtype, continuous
        self._end_probability, self._random = end_probability, np.random.default_rng(seed)
        self.lanes = [Lane([self._frame(lane, 0)]) for lane in range(num_envs)]
        self.seq = -1
        self._played = 0  # steps before the newest fragment

    def fragment(self, num_steps: int, context: int | None = None) -> Fragment:
        """Play on; with as much context as was played, at most `context`."""
        self._played = played = len(self.lanes[0])
        for _ in range(num_steps):
            for index in range(len(self.lanes)):
                self._step(index)
        context = min(played, self.context if context is None else context)
        origin = played - context
        finals = {
            (step - origin, index): final
            for step in range(origin, played + num_steps)
            for index, lane in enumerate(self.lanes)
            if (final := lane.final[step]) is not None
        }
        extras = {}
        if self.shape:
            stored = [one for one in self.sequences(gamma=0.0, n=1) if not one.is_fresh]
            index = np.array([(one.first - origin, one.lane) for one in stored], np.int32).reshape(-1, 2)
            states = np.array([one.recurrent_state for one in stored], np.float16).reshape(-1, STATE_SIZE)
            extras = {"memory_index": index, "memory": states}
        if self.has_values:
            values = self._column("values", origin, np.float32)  # [C+T, N, 2]
            extras |= {"action_value": values[..., 0], "state_value": values[..., 1]}
        self.seq += 1
        return make_fragment(
            self.player,
            self.seq,
            context=context,
            observation=self._column("frame", origin, self._dtype),
            action=self._column("action", origin, np.float32 if self._continuous else np.int64),
            reward=self._column("reward", origin, np.float32),
            terminated=self._column("terminated", origin, np.bool_),
            truncated=self._column("truncated", origin, np.bool_),
            final_index=np.array(list(finals), np.int32).reshape(-1, 2),
            final_observation=np.array(list(finals.values()), self._dtype).reshape(-1, *self._observation),
            extras=extras,
        )

    def _column(self, name: str, origin: int, dtype: Any) -> np.ndarray:
        return np.array([getattr(lane, name)[origin:] for lane in self.lanes], dtype).swapaxes(0, 1)

    def _frame(self, lane: int, step: int, *, is_final: bool = False) -> np.ndarray:
        code = ((self.player * 8 + lane) * 8192 + step) * 2 + is_final
        cells = list(code.to_bytes(3)) if self._dtype == "uint8" else [code]
        return np.resize(cells, self._observation).astype(self._dtype)

    def _step(self, index: int) -> None:
        lane, draw = self.lanes[index], self._random
        step = len(lane)
        ends, terminates = draw.random() < self._end_probability, draw.random() < 0.5
        state = np.array([1 + step % (STATE_LIMIT - 1), index, draw.integers(STATE_LIMIT)], np.float64)
        lane.state.append(state * (step != lane.begin[step]))
        lane.action.append([step, draw.random()] if self._continuous else int(draw.integers(0, 6)))
        lane.reward.append(float(draw.integers(-3, 4)))
        lane.terminated.append(bool(ends and terminates))
        lane.truncated.append(bool(ends and not terminates))
        lane.final.append(self._frame(index, step + 1, is_final=True) if lane.truncated[-1] else None)
        lane.values.append((float(draw.integers(-9, 9)), float(draw.integers(-9, 9))))
        lane.frame.append(self._frame(index, step + 1))
        lane.begin.append(step + 1 if ends else lane.begin[-1])

    def transitions(self, *, gamma: float, n: int, repeated: int | None = None) -> list[Transition]:
        """Those whose sums the newest fragment completes, in order of time, then lane.

        Where fragments repeat fewer than n - 1 steps, also those that the next one does not begin with.
        """
        result = []
        repeated = n - 1 if repeated is None else min(repeated, n - 1)
        for start in range(max(0, self._played - repeated), len(self.lanes[0])):
            for lane in self.lanes:
                return_, discount, used = lane.n_step(start, len(lane), gamma=gamma, n=n)
                begin, row = lane.begin[start], start + used
                is_whole = used == n or lane.terminated[row - 1] or lane.truncated[row - 1]
                is_last = start < len(lane) - repeated
                if row <= self._played if is_whole else not is_last:
                    continue
                after = None if lane.terminated[row - 1] else lane.stack(begin, row, self.frame_stack)
                td_error = abs(return_ + discount * lane.seen_value(row) - lane.values[start][0])
                before = lane.stack(begin, start, self.frame_stack)
                result.append(Transition(before, lane.action[start], return_, discount, after, td_error))
        return result

    def sequences(self, *, gamma: float, n: int) -> list[SlowSequence]:
        """Those of the newest fragment in the order of the cut."""
        assert self.shape is not None
        result = []
        for index, lane in enumerate(self.lanes):
            step = self._played
            while step < len(lane):
                begin = lane.begin[step]
                end = step
                while end < len(lane) and lane.begin[end] == begin:
                    end += 1
                start = max(begin, self._played - self.shape.overlap)
                while True:
                    length = min(self.shape.length, end - start)
                    result.append(self._sequence(index, start, length, gamma, n))
                    if start + length == end:
                        break
                    start += self.shape.length - self.shape.overlap
                step = end
        return result

    def _sequence(self, index: int, start: int, length: int, gamma: float, n: int) -> SlowSequence:
        shape, lane = self.shape, self.lanes[index]
        assert shape is not None
        begin = lane.begin[start]
        burn_in = 0
        while burn_in < shape.burn_in and start - burn_in > begin:
            burn_in += 1
        first, end = start - burn_in, start + length
        last_row = end - 1 if lane.terminated[end - 1] else end
        warm = [first + min(row, max(burn_in - 1, 0)) for row in range(shape.burn_in)]
        rows = warm + [min(start + row, last_row) for row in range(shape.length + 1)]
        padding = shape.length - length
        walked = [lane.n_step(step, end, gamma=gamma, n=n) for step in range(start, end)]
        tds = []
        for step, (return_, discount, used) in enumerate(walked, start):
            target = slow_rescale(return_ + discount * slow_unrescale(lane.seen_value(step + used)))
            tds.append(abs(target - lane.values[step][0]))
        return SlowSequence(
            first=first,
            lane=index,
            is_fresh=first == begin,
            observation=np.array([lane.stack(begin, row, self.frame_stack) for row in rows]),
            previous_action=[-1 if row == begin else lane.action[row - 1] for row in rows],
            previous_reward=[0.0 if row == begin else lane.reward[row - 1] for row in rows],
            recurrent_state=lane.state[first],
            burn_in=burn_in,
            action=lane.action[start:end] + [0] * padding,
            n_step_return=[return_ for return_, _, _ in walked] + [0.0] * padding,
            bootstrap_discount=[discount for _, discount, _ in walked] + [0.0] * padding,
            bootstrap=[offset + used for offset, (_, _, used) in enumerate(walked)] + [length] * padding,
            valid=[True] * length + [False] * padding,
            td_error=0.9 * max(tds) + 0.1 * sum(tds) / len(tds),
        )
