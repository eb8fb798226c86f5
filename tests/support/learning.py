"""Play and learn in turns: collector, codec, experience and learner in one process, paced as in a run.

Weights are taken over every so many updates, and fragments have a fixed length, so that a seed decides all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from support.algorithms import CPU

from ddrl import codec, envs
from ddrl.algorithms import base
from ddrl.config import RunConfig, validate
from ddrl.networks.device import to_device, to_host
from ddrl.policy import LoadedPolicy
from ddrl.replay.experience import make_experience
from ddrl.runs.evaluation import score
from ddrl.worker.collector import Collector

PUBLISH_EVERY = 20  # updates between two versions of the weights; on-policy each iteration makes one


class Outcome(NamedTuple):
    """The results of a training, with its learner and policy."""

    return_mean: float
    updates: int
    figures: Mapping[str, Any]
    learner: Any
    policy: Any


def toy(env_id: str, algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    """Return the config of a toy; on-policy no fragment is stale."""
    rollout = {"fragment_s": 5, "max_fragment_steps": 32}
    tree = {"name": "toy", "env": {"id": env_id, "num_envs": 16}, "algorithm": algorithm, "rollout": rollout}
    if algorithm["name"] in ("ppo", "impala", "pqn"):
        tree["on_policy"] = {"collect": "sync", "max_staleness": 0}
    return validate(tree | sections)


def learn(
    run: RunConfig, *, most_steps: int, target: float = 1e9, evaluate_every: int = 0, num_episodes: int = 20
) -> Outcome:
    """Play and learn in turns until the mean return of an evaluation is `target`, or `most_steps` were played.

    Args:
        evaluate_every: steps between two evaluations; 0: the only one is the last.
        num_episodes: of each.
    """
    evaluate_every = evaluate_every or most_steps
    spec = envs.describe(run.env)
    resolved = base.resolve(run, spec)
    learner = resolved.learner(device=CPU, seed=run.seed)
    held = make_experience(run, resolved.config, spec)
    identity = {"run": "learning", "producer": 1, "incarnation": 7}
    is_random = resolved.can_start_at_random
    collector = Collector(**identity, config=run, resolved=resolved, random_until_learned=is_random)
    player = resolved.policy()
    steps = version = num_fragments = evaluated = published = 0
    figures: dict[str, Any] = {}
    collector.load(version, learner.weights())
    while True:
        budget = held.step_budget(num_steps=steps, num_updates=learner.num_updates, version=version)
        while steps < budget:
            wanted = -(-(budget - steps) // run.env.num_envs)
            fragment = codec.decode(codec.encode(collector.collect(max_steps=wanted)))
            steps, num_fragments = steps + fragment.num_transitions, num_fragments + 1
            held.admit(held.pack(fragment), b"%d-0" % num_fragments, version=version)
        while True:
            batch: Any = held.draw(num_steps=steps, num_updates=learner.num_updates, version=version)
            if batch is None:
                break
            figures = dict(learner.update(to_device(batch, CPU)))
            if (priority := figures.pop("priority", None)) is not None:
                held.update_priorities(batch, to_host(priority))
            if resolved.on_policy or learner.num_updates >= published + PUBLISH_EVERY:
                version, published = version + 1, learner.num_updates
                collector.load(version, learner.weights())
                break
        if steps >= evaluated + evaluate_every and learner.num_updates:
            evaluated = steps
            player.load(learner.weights())
            seeds = range(9000, 9000 + num_episodes)
            found = score(LoadedPolicy(player, run, spec, "run", 0), seeds, num_envs=50, epsilon=0)
            print(f"{run.name}: {steps} steps, {learner.num_updates} updates, return {found.return_mean:.2f}")
            if found.return_mean >= target or steps >= most_steps:
                held.close()
                collector.close()
                return Outcome(found.return_mean, learner.num_updates, figures, learner, player)
