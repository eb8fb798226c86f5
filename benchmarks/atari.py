"""Atari: memory of a million observations in Redis, and the speed of a rollout process against plain play.

    python benchmarks/atari.py memory          # used_memory after less before, one process a game
    python benchmarks/atari.py rollout         # alone on the machine

Memory: a collector of the shipped config plays its game by uniformly random actions and appends what it plays to a
private server, each frame once, until a million transitions are in the stream.

Rollout: one Celery process of `configs/asterix.yaml` on one core, with its network and an allowance that is never used
up; in turns with a loop, on the same core, of the same network over the same vector environment and nothing else.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from machine import ROOT, heading, server
from rollout import in_turns, report

GAMES = ("asterix", "zaxxon", "wizard-of-wor")
PLAIN_LOOP = """
import sys, time
import numpy as np
import torch
from ddrl import config, envs
from ddrl.algorithms import base
from ddrl.envs.frame_stack import FrameStack
torch.set_num_threads(1)
settings = config.load(sys.argv[1])
spec = envs.describe(settings.env)
resolved = base.resolve(settings, spec)
policy = resolved.policy(producer=1)
policy.load(resolved.learner(device=torch.device("cpu"), seed=1).weights())
vector, generator = envs.make_vector(settings.env), np.random.default_rng(1)
stack = FrameStack(vector.num_envs, spec)
observation, _ = vector.reset(seed=list(range(vector.num_envs)))
ended = np.ones(vector.num_envs, bool)
steps, started = 0, time.perf_counter()
while (elapsed := time.perf_counter() - started) < float(sys.argv[2]):
    for _ in range(20):
        action, _ = policy.explore(stack.push(observation, ended), generator)
        observation, _, terminated, truncated, _ = vector.step(action)
        ended = terminated | truncated
    steps += 20 * vector.num_envs
print(steps / elapsed)
"""


def main() -> None:
    """Print the table that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("memory", "rollout"))
    parser.add_argument("--observations", type=int, default=1_000_000, help="of each game, for memory")
    parser.add_argument("--processes", type=int, default=2, help="games at the same time, for memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    arguments = parser.parse_args()
    if arguments.what == "memory":
        memory(arguments.observations, arguments.processes)
        return
    path = ROOT / "configs" / "asterix.yaml"
    print(
        heading("Rollout of Atari through Celery and Redis against the same policy in a plain loop, one core")
        + "\n"
    )
    ours, bare = in_turns(path, PLAIN_LOOP, rounds=arguments.rounds, seconds=arguments.seconds)
    report(ours, bare, loop="plain loop, same policy and environments", floor=80, goal=95)


def memory(num_observations: int, processes: int) -> None:
    """Play each game and print what the server needs for it."""
    print(
        heading(
            f"Redis memory of {num_observations:,} real Atari observations (used_memory, after less before)"
        )
    )
    print("\n| game | GB | bytes an observation | times smaller than the frames | steps/s while filling |")
    print("|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [(game, pool.submit(fill, game, num_observations)) for game in GAMES]
        for game, future in futures:
            used, count, frame_bytes, seconds = future.result()
            print(
                f"| {game} | {used / 1e9:.3f} | {used / count:.0f} | {frame_bytes * count / used:.0f} | "
                f"{count / seconds:,.0f} |",
                flush=True,
            )
    print("\nfloor 0.3 GB, goal 0.18 GB; 1 to 3 GB: rainbow-with-ray")


def fill(game: str, num_observations: int) -> tuple[int, int, int, float]:
    """Append observations to a server of its own; return bytes used, observations, bytes of a frame, seconds."""
    import torch

    from ddrl import config
    from ddrl.algorithms import base
    from ddrl.runs import submit
    from ddrl.store import connection, runs, weights
    from ddrl.store import leases as lease
    from ddrl.worker.segment import Players, play

    settings = config.load(ROOT / "configs" / f"{game}.yaml", ["replay.max_bytes=4GB"])
    with server() as url:
        client, blocking = connection.connect(url), connection.connect_blocking(url)
        spaces = submit.prepare(settings)
        run = submit.create(client, settings, spaces)
        token = lease.acquire(client, run, host="benchmark", folder="-")
        assert token is not None
        learner = base.resolve(settings, spaces).learner(device=torch.device("cpu"), seed=1)
        blob = weights.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
        # version 0 plays at random
        weights.publish(client, run, token, version=0, blob=blob, allowance=num_observations, updates=0)

        def used_memory() -> int:
            time.sleep(5)  # meanwhile the server gives back what its clients' buffers took
            bytes_: int = client.info("memory")["used_memory"]
            return bytes_

        before, players = used_memory(), Players()
        started = time.perf_counter()
        while (played := runs.state(client, run).appended_steps) < num_observations:
            play(client, blocking, players, run)
        seconds = time.perf_counter() - started
        used = used_memory() - before
    return used, played, math.prod(spaces.observation_shape), seconds


if __name__ == "__main__":
    main()
