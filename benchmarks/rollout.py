"""Speed of a rollout process (Celery, policy, encoding, append) against a loop of random actions.

    python benchmarks/rollout.py

`configs/lunar.yaml` as shipped except for the pace: one Celery rollout process, on one core, plays with an
allowance that is never used up; then, on the same core, a loop of random actions over the same vector of
environments. Both run in turns; the table shows medians and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from machine import CONFIG, child, cores, figure, fresh_home, heading

RANDOM_LOOP = """
import sys, time
from ddrl import config, envs
env = config.load(sys.argv[1]).env
vector = envs.make_vector(env)
vector.reset(seed=range(vector.num_envs))
import numpy as np
generator = np.random.default_rng(1)
shape = (vector.num_envs, *vector.single_action_space.shape)
low, high = vector.single_action_space.low, vector.single_action_space.high
steps, started = 0, time.perf_counter()
while (elapsed := time.perf_counter() - started) < float(sys.argv[2]):
    for _ in range(20):
        vector.step(generator.uniform(low, high, shape).astype(np.float32))
    steps += 20 * vector.num_envs
print(steps / elapsed)
"""


def in_turns(
    path: Path, loop: str, *, rounds: int, seconds: float, overrides: Sequence[str] = ()
) -> tuple[list[float], list[float]]:
    """Return env steps/s of a rollout process of a config, and of a loop on the same core, measured in turns.

    Args:
        path: of the config.
        loop: a program with the arguments path and seconds, that prints its env steps/s.
        rounds: of both.
        seconds: of each measurement.
        overrides: of the config.
    """
    with fresh_home() as environment:
        os.environ.update({name: environment[name] for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")})
        os.environ.pop("DDRL_REDIS_URL", None)
        other, core = cores()
        os.sched_setaffinity(0, {other})
        import torch

        from ddrl import celery, config
        from ddrl.algorithms import base
        from ddrl.learner.dispatcher import Dispatcher
        from ddrl.runs import submit
        from ddrl.store import connection, runs, stream, weights, workers
        from ddrl.store import leases as lease
        from ddrl.store import server as embedded

        settings = config.load(path, ["replay.max_bytes=4GB", *overrides])
        with embedded.use() as url:
            client = connection.connect(url)
            spaces = submit.prepare(settings)
            run = submit.create(client, settings, spaces)
            token = lease.acquire(client, run, host="benchmark", folder="-", ttl_ms=3_600_000)
            assert token is not None
            algorithm = base.resolve(settings, spaces).learner(device=torch.device("cpu"), seed=1)
            blob = weights.encode_weights(
                {name: value.numpy() for name, value in algorithm.weights().items()}
            )
            for version in (0, 1):  # version 0 plays at random, 1 plays the policy
                weights.publish(client, run, token, version=version, blob=blob, allowance=10**12, updates=0)
            most, send = settings.rollout.max_crashes, celery.send_rollout
            dispatcher = Dispatcher(client, run, token, max_crashes=most, send=send)
            play = ["-m", "ddrl", "worker", "--role", "rollout", "--concurrency", "1"]
            ours, bare = [], []
            with child(play, environment, core):
                while not workers.alive(client):
                    time.sleep(0.1)

                def keep_playing(seconds: float) -> float:
                    before, started = runs.state(client, run).appended_steps, time.perf_counter()
                    while time.perf_counter() - started < seconds:
                        dispatcher.tick()
                        time.sleep(0.05)
                    elapsed = time.perf_counter() - started
                    steps = runs.state(client, run).appended_steps - before
                    entries = stream.read(client, run, b"0-0", count=1)
                    if entries:  # room for the next round
                        stream.trim(client, run, token, b"9999999999999-0")
                    return steps / elapsed

                keep_playing(10.0)  # start-up and first segments
                for _ in range(rounds):
                    ours.append(keep_playing(seconds))
                    runs.set_status(client, run, "paused", "the other's turn")
                    time.sleep(1.0 + settings.rollout.fragment_s)
                    bare.append(figure(loop, path, seconds, environment=environment, core=core))
                    runs.set_status(client, run, "active", "our turn")
                    keep_playing(1.0)
            client.close()
    return ours, bare


def report(ours: Sequence[float], bare: Sequence[float], *, loop: str, floor: int, goal: int) -> None:
    """Print the table and the share."""
    ratios = [one / two for one, two in zip(ours, bare, strict=True)]
    print("| what | env steps/s (median) | range |\n|---|---|---|")
    for name, figures in (("ddrl rollout process", ours), (loop, bare)):
        print(f"| {name} | {statistics.median(figures):,.0f} | {min(figures):,.0f} to {max(figures):,.0f} |")
    print(
        f"\nshare kept: {100 * statistics.median(ratios):.0f} % (median of {len(ratios)} ratios, "
        f"{100 * min(ratios):.0f} to {100 * max(ratios):.0f} %; floor {floor}, goal {goal})"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    arguments = parser.parse_args()
    print(heading("Rollout through Celery and Redis against a random-action loop, one core") + "\n")
    ours, bare = in_turns(CONFIG, RANDOM_LOOP, rounds=arguments.rounds, seconds=arguments.seconds)
    report(ours, bare, loop="random-action loop", floor=60, goal=80)


if __name__ == "__main__":
    main()
