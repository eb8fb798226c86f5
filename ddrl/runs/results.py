"""What a run leaves when it has ended: its last version evaluated, and its folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddrl import policy
from ddrl.config import EvaluationConfig
from ddrl.envs import EnvError
from ddrl.runs import artifacts, evaluation
from ddrl.store import evaluations, runs, weights

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)


def evaluate_last(
    client: Redis, run: str, token: int, config: EvaluationConfig, *, env_steps: int, updates: int
) -> dict[str, Any] | None:
    """Evaluate what a limit left behind, here; its row, or None where it was evaluated before or cannot be.

    Args:
        client: connection to the server.
        run: its id.
        token: fencing token.
        config: the run's.
        env_steps, updates: of the learner, for the row.

    Raises:
        LeaseLostError: another learner took over.
    """
    version = weights.index(client, run).latest
    if version < 1 or any(row["version"] == version for row in evaluations.results(client, run)[0]):
        return None
    try:
        player = policy.from_run(client, run, version)
        wanted = evaluations.OpenEvaluation(
            version=version,
            first_seed=config.seed,
            num_episodes=config.num_episodes,
            purpose="watch",
            sent_ms=runs.server_ms(client),
            env_steps=env_steps,
            updates=updates,
        )
        evaluations.open_(client, run, token, wanted)
        result = evaluation.evaluate(
            player.policy,
            player.env,
            player.spaces,
            wanted.seeds,
            num_envs=config.num_envs,
            policy_version=version,
            epsilon=player.policy.evaluation_epsilon,
        )
    except EnvError as error:
        log.warning("the last version is not evaluated: %s", error)
        return None
    evaluations.finish(client, run, wanted, result)
    return evaluations.results(client, run)[0][-1]


def write(client: Redis, run: str, folder: Path) -> None:
    """Write a run's folder: the policy that describes it, and all else that `artifacts` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    evaluated = runs.state(client, run).evaluation
    version = evaluated["version"] if evaluated else weights.index(client, run).latest
    policy.save(client, run, version, folder / "policy.safetensors")
    artifacts.write(client, run, folder)
