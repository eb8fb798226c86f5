"""The evaluations of a run: which versions to evaluate, which one is best, when the run is solved."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ddrl import policy
from ddrl.config import RunConfig
from ddrl.networks.device import all_digits
from ddrl.runs.evaluation import score
from ddrl.store import connection, runs, weights
from ddrl.store.connection import Redis
from ddrl.store.evaluations import Evaluation, OpenEvaluations, Purpose, means, results

log = logging.getLogger(__name__)

FIRST_EPISODES = 5
MOST_LOGGED = 100  # results at once
FIRST_S = 10.0  # longest wait of play for the result of the policy that the run begins with
LAST_S = 10.0  # by which the evaluation at the end may take longer than the longest before it


class _Sample(NamedTuple):
    """Returns of `num` episodes: their mean, and the sum of squared differences from it."""

    num: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_(self, returns: Sequence[float]) -> _Sample:
        """Return the sample with more returns. Source: Chan et al. 1979, updating formulae for variances."""
        added, num = np.array(returns, np.float64), self.num + len(returns)
        mean = float(added.mean())
        apart, squares = mean - self.mean, float(((added - mean) ** 2).sum())
        share = len(added) / num
        return _Sample(num, self.mean + apart * share, self.squares + squares + apart**2 * self.num * share)


class EvaluationScheduler:
    """Chooses versions to evaluate, marks the best one, and decides when the run is solved.

    One evaluation is open at a time. A mean of at least `stop.return` must be confirmed on other seeds. A policy
    that the run begins with (`--from`) is evaluated at once, as version 0; else the first version that was learned is,
    over FIRST_EPISODES, so that a score is there within seconds.

    Args:
        client: connection to the server.
        run: its id.
        token: fencing token.
        config: the run's: `evaluation`, and the return at which the run is solved.
        send: sends an evaluation task, given its argument.

    Attributes:
        solved: the target was reached and confirmed.
    """

    def __init__(
        self, client: Redis, run: str, token: int, config: RunConfig, *, send: Callable[[str], None]
    ) -> None:
        self._client, self._run, self._token = client, run, token
        self._config, self._target = config.evaluation, config.stop.return_
        self._open = OpenEvaluations(client, run, send=send, timeout_s=self._config.timeout_s, token=token)
        self._returns: dict[int, _Sample] = {}  # of all evaluation episodes, by version
        self._lowest = math.inf  # mean of an evaluation
        self.solved = False
        self._open.take_over()
        rows, noted = self._results(), runs.state(client, run)
        if (best := noted.evaluation) and best["version"] in weights.index(client, run).sizes:
            # Its result may have left the stream.
            squares = best["return_std"] ** 2 * best["episodes"]
            sample = _Sample(best["episodes"], best["return_mean"], squares)
            self._returns.setdefault(best["version"], sample)
        # The last learner may have died before it decided; what a worker made up does no more than open a confirmation.
        if rows and not self._open.pending and self._config.confirm_episodes:
            self._decide(rows[-1])
        self._first_version = 0 if noted.warm else 1  # random weights have no score
        now, is_first = time.monotonic(), not self._returns
        self._last_at = -math.inf if is_first else now
        self._opened_at, self._longest_s = now, 0.0  # the newest evaluation; the longest that gave a result
        is_held = is_first and self._first_version == 0 and self._target is not None
        self._hold_until = now + FIRST_S if is_held else now

    @property
    def holds_play(self) -> bool:
        """The run is solved; or the policy that it begins with may solve it, for which play waits FIRST_S at most."""
        return self.solved or (self.pinned == {0} and time.monotonic() < self._hold_until)

    @property
    def pinned(self) -> frozenset[int]:
        """Versions that an open evaluation needs."""
        return frozenset(evaluation.version for evaluation in self._open.pending)

    def apply(self, config: RunConfig) -> None:
        """Apply changed settings."""
        self._config, self._target = config.evaluation, config.stop.return_
        self._open.timeout_s = self._config.timeout_s

    def tick(self, version: int, return_mean: float | None, *, env_steps: int, updates: int) -> None:
        """Handle new results, send a lost evaluation again, open one if it is due.

        Args:
            version: latest of the weights.
            return_mean: of the last training episodes; None: too few.
            env_steps, updates: of the learner, noted with the result.

        Raises:
            LeaseLostError: another learner took over.
        """
        if self._open.pending:
            rows = self._poll()
            if rows and not self._open.pending:
                self._last_at = time.monotonic()
                self._longest_s = max(self._longest_s, self._last_at - self._opened_at)
                self._opened_at = self._last_at
                self._decide(rows[-1])
        elif self._is_due(version, return_mean):
            due = self._evaluation(version, "watch", env_steps, updates)
            if version and not self._returns and self._config.confirm_episodes:  # few cannot solve the run
                due = replace(due, num_episodes=min(due.num_episodes, FIRST_EPISODES))
            self._opened_at = time.monotonic()
            self._open.open([due])

    def _results(self) -> list[dict[str, Any]]:
        """Note new results, and return them. A worker may write results of versions that are to come."""
        if rows := self._open.poll():
            latest = weights.index(self._client, self._run).latest
            rows = [row for row in rows if row["version"] <= latest]
        for row in rows:
            known = self._returns.get(row["version"], _Sample())
            self._returns[row["version"]] = known.with_(row["returns"])
            self._lowest = min(self._lowest, row["return_mean"])
        return rows

    def _poll(self) -> list[dict[str, Any]]:
        """Return new results; mark the version with the highest mean over all its evaluation episodes."""
        rows = self._results()
        for row in rows[-MOST_LOGGED:]:
            infos = "".join(f", {name} {mean:.4g}" for name, mean in means(row["metrics"]).items())
            log.info(
                "%s of version %d: %.1f +- %.1f over %d episodes%s",
                row["purpose"], row["version"], row["return_mean"], row["return_std"], row["num_episodes"], infos,
            )  # fmt: skip
        kept = weights.index(self._client, self._run).sizes if rows else {}
        known = {version: self._returns[version] for version in kept if version in self._returns}
        if known:
            first = min(self._returns)  # it has fewer episodes, and the best of few is luck
            is_few = first > 0 and self._returns[first].num <= FIRST_EPISODES < self._config.num_episodes
            best = max(known, key=lambda v: (not (is_few and v == first), known[v].mean))
            self._mark_best(best, known[best])
        for evaluation_id, reason in self._open.given_up.items():
            log.warning("evaluation %s is given up: %s", evaluation_id, reason)
        self._open.given_up.clear()
        return rows

    def finish(self, status: str, *, env_steps: int, updates: int) -> None:
        """Note the last results, once the run has ended.

        The best version is evaluated on this machine on fresh seeds, which become its score: the best of many on the
        same seeds is partly luck. Before that the latest version is, if it has no result, unless someone waits who has
        stopped the run.

        Args:
            status: "time": an evaluation is given up if it takes LAST_S longer than any before; "stopped": if it takes
                LAST_S; how else it ended: nothing is evaluated.
            env_steps, updates: of the learner, noted with the result.

        Raises:
            LeaseLostError: another learner took over.
        """
        self._poll()
        if status not in ("time", "stopped"):
            return
        most_s = LAST_S + (self._longest_s if status == "time" else 0.0)
        latest = weights.index(self._client, self._run).latest
        if status == "time" and latest >= self._first_version and latest not in self._returns:
            self._play(self._evaluation(latest, "watch", env_steps, updates), most_s)
        best = weights.index(self._client, self._run).best
        if best not in self._returns or len(self._returns) == 1:
            return
        rows = [row for row in results(self._client, self._run)[0] if row["version"] == best]
        chosen = rows[0] if rows else {"env_steps": env_steps, "updates": updates}
        again = self._evaluation(best, "final", chosen["env_steps"], chosen["updates"])
        # Before the run was resumed.
        played = [row["returns"] for row in rows if row["first_seed"] == again.first_seed]
        if returns := played[0] if played else self._play(again, most_s):
            self._mark_best(best, _Sample().with_(returns))

    def _play(self, evaluation: Evaluation, most_s: float) -> tuple[float, ...]:
        """Evaluate here, and store the result; () if it takes longer or the environment fails."""
        begun = time.monotonic()

        def check_time() -> None:
            if time.monotonic() >= begun + most_s:
                raise TimeoutError(
                    f"it takes longer than {most_s:.0f} s; `ddrl evaluate {self._run}` takes its time"
                )

        try:
            loaded = policy.from_run(self._client, self._run, evaluation.version)
            with all_digits():  # as anywhere else
                result = score(loaded, evaluation.seeds, num_envs=self._config.num_envs, on_step=check_time)
        except connection.OUTAGES:
            raise
        except Exception as error:  # of the environment, or of a network of the user's
            log.warning("version %d is not evaluated at the end: %s", evaluation.version, error)
            return ()
        self._open.store(evaluation, result)
        self._poll()
        return result.returns

    def _is_due(self, version: int, return_mean: float | None) -> bool:
        if version < self._first_version or version in self._returns or self.solved:
            return False
        config, is_near = self._config, False
        if self._target is not None and return_mean is not None:
            lowest = min(return_mean, self._lowest)
            is_near = return_mean >= self._target - config.near * (self._target - lowest)
        return time.monotonic() - self._last_at >= (config.near_every_s if is_near else config.every_s)

    def _evaluation(self, version: int, purpose: Purpose, env_steps: int, updates: int) -> Evaluation:
        config, num, num_confirm = self._config, self._config.num_episodes, self._config.confirm_episodes
        seeds_before = {"confirm": num, "final": num + num_confirm}
        return Evaluation(
            version=version,
            first_seed=config.seed + seeds_before.get(purpose, 0),
            num_episodes=num_confirm if purpose == "confirm" else num,
            purpose=purpose,
            num_envs=config.num_envs,
            env_steps=env_steps,
            updates=updates,
        )

    def _decide(self, row: Mapping[str, Any]) -> None:
        """Have a result that reaches the target confirmed; a confirmed one solves the run."""
        if self._target is None or row["return_mean"] < self._target:
            return
        if row["version"] not in weights.index(self._client, self._run).sizes:  # a worker wrote the result
            return
        if row["purpose"] == "watch" and self._config.confirm_episodes:
            self._open.open([self._evaluation(row["version"], "confirm", row["env_steps"], row["updates"])])
            return
        self._mark_best(row["version"], _Sample().with_(row["returns"]))
        self.solved = True

    def _mark_best(self, version: int, score: _Sample) -> None:
        """Mark the version as the run's best, and these episodes as its score."""
        weights.mark_best(self._client, self._run, self._token, version, score.mean)
        std = (score.squares / score.num) ** 0.5
        best = {"version": version, "return_mean": score.mean, "return_std": std, "episodes": score.num}
        runs.note_evaluation(self._client, self._run, self._token, best)
