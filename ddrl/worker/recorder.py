"""Turn the steps of N environments into fragments that the learner can read one by one.

A fragment repeats the last steps of the one before as context, so that stacks of frames, n-step sums, burn-in
and overlapping sequences lie in it whole. Columns are allocated once per fragment with the context in their first rows;
a step only copies its rows. Training rewards and episode statistics are computed once per fragment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ddrl import envs
from ddrl.algorithms.base import RecurrentState, Resolved
from ddrl.config import EnvConfig
from ddrl.replay.fifo import first_steps
from ddrl.replay.sequences import cut, recurrent_state_index
from ddrl.types import Fragment


class Recorder:
    """Records what one producer plays.

    For each fragment call `begin`, then `add_state` and `add_step` for each step, then `end`.

    Args:
        identity: run, producer, incarnation and host, see `Fragment`.
        env: scale and sign of training rewards.
        resolved: the run's algorithm: spaces, maximum number of earlier steps repeated at a fragment's start, and for
            a recurrent off-policy one the sequences. The policy's state is sent where one begins; on-policy, where the
            fragment does.
        observation: [N, *O] first observations.
        seeds: [N] int64, from which the episodes that go on began; the environments keep it up to date.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        env: EnvConfig,
        resolved: Resolved,
        observation: np.ndarray,
        seeds: np.ndarray,
    ) -> None:
        self._identity, self._env, self._resolved = identity, env, resolved
        self._num_envs = len(observation)
        self._seq, self._seeds = 0, seeds
        self._resets = [(0, lane, seed) for lane, seed in enumerate(seeds.tolist())]  # row, lane, seed
        # The next fragment's context: the last rows of each column, of observations one row more.
        self._past = {"observation": observation[None]}
        self._finals: list[np.ndarray] = []  # true last observations of the truncated steps, in order of time
        self._episode_return = np.zeros(self._num_envs)  # so far, unscaled
        self._episode_length = np.zeros(self._num_envs, np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes held between fragments."""
        return sum(array.nbytes for array in (*self._past.values(), *self._finals))

    def begin(self, max_steps: int) -> None:
        """Start a fragment of up to `max_steps` steps."""
        self._context = len(self._past["observation"]) - 1
        self._row, self._max_steps = self._context, max_steps
        spec = self._resolved.spec
        action_dtype = np.float32 if spec.action_kind == "continuous" else np.int64
        self._columns: dict[str, np.ndarray] = {}
        self._observation = self._column("observation", spec.observation_shape, spec.observation_dtype)
        self._action = self._column("action", spec.action_shape, action_dtype)
        self._training_reward = self._column("reward", (), np.float32)
        self._terminated = self._column("terminated", (), np.bool_)  # here a lost life is an end
        self._truncated = self._column("truncated", (), np.bool_)
        self._reward = np.empty((max_steps, self._num_envs))  # as the environments gave it
        self._over = np.empty((max_steps, self._num_envs), np.bool_)  # here a lost life is no end
        self._extras: dict[str, np.ndarray] = {}
        self._metrics: list[list[float]] = []  # of the episodes that ended

    def add_state(self, state: RecurrentState) -> None:
        """Copy the recurrent state before a step, which the policy then changes in place; on-policy the first one."""
        if state and (self._resolved.sequences is not None or self._row == self._context):
            if "hidden" not in self._columns:
                self._column("hidden", state["hidden"].shape[1:], np.float16)
            self._columns["hidden"][self._row] = state["hidden"]

    def add_step(
        self, action: np.ndarray, extras: Mapping[str, np.ndarray], outcome: tuple[Any, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copy a step: the policy's [N, *A] actions and extras [N, ...], and the outcome, as environments return it.

        Returns:
            [N, *O] a copy of the next observations, and [N] bool where an episode ended for learning.

        Raises:
            ValueError: an extra is not of N rows, or not as at the fragment's first step.
        """
        observation, reward, terminated, truncated, info = outcome
        row, step = self._row, self._row - self._context
        self._action[row] = action
        if extras or self._extras:
            self._add_extras(extras)
        self._observation[row + 1] = observation
        self._reward[step] = reward
        np.logical_or(terminated, truncated, out=self._over[step])
        ended = self._over[step]
        if ended.any():
            lanes = np.flatnonzero(ended).tolist()
            self._resets += [(row + 1, lane, int(self._seeds[lane])) for lane in lanes]
            if self._env.metrics:
                self._metrics += [info["metrics"][lane] for lane in lanes]
        if "life_lost" in info:
            terminated = terminated | info["life_lost"]
            ended = ended | terminated
        self._terminated[row] = terminated
        np.greater(truncated, terminated, out=self._truncated[row])  # both at once count as terminated
        if "final_obs" in info:
            finals = info["final_obs"][self._truncated[row]]
            self._finals += [np.array(final, self._observation.dtype) for final in finals]
        self._row += 1
        return self._observation[row + 1], ended

    def end(self, policy_version: int) -> Fragment:
        """Return the fragment of the steps since `begin`, all played under one version of the weights."""
        num_steps = self._row - self._context
        reward, over = self._reward[:num_steps], self._over[:num_steps]
        self._training_reward[self._context : self._row] = envs.training_reward(self._env, reward)
        returns, lengths = self._finish_episodes(reward, over)
        observation = self._observation[: self._row + 1]
        columns: dict[str, Any] = {name: column[: self._row] for name, column in self._columns.items()}
        extras = {name: columns[f"extras/{name}"] for name in self._extras}
        if names := self._env.metrics:
            extras["episode_metrics"] = np.array(self._metrics, np.float32).reshape(-1, len(names))
        resets = np.array(self._resets, np.int64).reshape(-1, 3)
        extras |= {"reset_index": resets[:, :2].astype(np.int32), "reset_seed": resets[:, 2]}
        self._resets = []
        fragment = Fragment(
            **self._identity,
            seq=self._seq,
            policy_version=policy_version,
            context=self._context,
            observation=observation,
            **{name: columns[name] for name in ("action", "reward", "terminated", "truncated")},
            final_index=np.argwhere(columns["truncated"]).astype(np.int32),
            final_observation=np.array(self._finals, observation.dtype).reshape(-1, *observation.shape[2:]),
            episode_return=returns,
            episode_length=lengths,
            extras=extras,
        )
        self._seq += 1
        first = max(self._row - self._resolved.context, 0)
        self._past = {name: column[first:].copy() for name, column in columns.items()}
        self._past["observation"] = observation[first:].copy()
        self._finals = self._finals[np.count_nonzero(fragment.truncated[:first]) :]
        return self._with_recurrent_state(fragment, columns["hidden"]) if "hidden" in columns else fragment

    def _column(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Add and return a column [C+T, N, ...], of observations [C+T+1, N, ...], with the context in its first rows.

        The context is zero where the steps before have no such column: extras after random play.
        """
        rows = self._context + self._max_steps + (name == "observation")
        column = np.zeros((rows, self._num_envs, *shape), dtype)
        if name in self._past:
            column[: len(self._past[name])] = self._past[name]
        self._columns[name] = column
        return column

    def _add_extras(self, extras: Mapping[str, np.ndarray]) -> None:
        step = self._row - self._context
        if step == 0:
            for name, values in extras.items():
                if values.shape[:1] != (self._num_envs,):
                    raise ValueError(
                        f"policy: {name} of shape {values.shape}, expected ({self._num_envs}, ...)"
                    )
                self._extras[name] = self._column(f"extras/{name}", values.shape[1:], values.dtype)
        if extras.keys() != self._extras.keys():
            raise ValueError(
                f"policy: extras {sorted(extras)} at step {step} of a fragment, {sorted(self._extras)} at its first"
            )
        for name, values in extras.items():
            column = self._extras[name]
            if values.shape != column.shape[1:] or values.dtype != column.dtype:
                raise ValueError(
                    f"policy: {name} of shape {values.shape} and dtype {values.dtype} at step {step} of a fragment, "
                    f"{column.shape[1:]} and {column.dtype} at its first"
                )
            column[self._row] = values

    def _finish_episodes(self, reward: np.ndarray, over: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return returns [E] float32 and lengths [E] int32 of the episodes that ended, in order of time.

        The return and length of each unfinished episode are kept for the next fragment.
        """
        returns, lengths = [], []
        begin = np.zeros(self._num_envs, np.int64)  # first step, in this fragment, of each lane's episode
        for step, lane in np.argwhere(over):
            returns.append(self._episode_return[lane] + reward[begin[lane] : step + 1, lane].sum())
            lengths.append(self._episode_length[lane] + step + 1 - begin[lane])
            self._episode_return[lane], self._episode_length[lane], begin[lane] = 0.0, 0, step + 1
        for lane, start in enumerate(begin):
            self._episode_return[lane] += reward[start:, lane].sum()
        self._episode_length += len(reward) - begin
        return np.array(returns, np.float32), np.array(lengths, np.int32)

    def _with_recurrent_state(self, fragment: Fragment, hidden: np.ndarray) -> Fragment:
        """Return the fragment with the rows of `hidden` [C+T, N, H] at which its sequences begin inside an episode.

        On-policy they are those before its first new step.
        """
        if (sequences := self._resolved.sequences) is None:
            index = first_steps(fragment)
        else:
            cuts = cut(fragment.ended, fragment.context, sequences, self._resolved.spec.frame_stack)
            index = recurrent_state_index(cuts)
        recurrent = {"memory_index": index, "memory": hidden[index[:, 0], index[:, 1]]}
        return replace(fragment, extras={**fragment.extras, **recurrent})
