"""Cost of recorded episodes: seeded resets against others, and playing an episode again against bare steps.

    python benchmarks/episodes.py seeds      # env steps/s of a collector
    python benchmarks/episodes.py replay     # steps/s
    python benchmarks/episodes.py same       # 170 of each of six environments: are they equal?
    python benchmarks/episodes.py backfill   # 50 versions of a lander's policy on two processes, and here one by one

`seeds` and `replay` on one core, in turns, by the time of the processor; medians, and the ratio of pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from machine import child, fresh_home, heading, server

ENVS = ("CartPole-v1", "Pendulum-v1", "LunarLanderContinuous-v3", "HalfCheetah-v5")


def settings(env_id: str) -> Any:
    """Return the config of a run of an environment."""
    from ddrl.config import validate

    algorithm = {"name": "sac" if env_id in ENVS[1:] else "dqn"}
    if "ALE" in env_id:
        algorithm["network"] = "nature"
    env = {"id": env_id, "num_envs": 16}
    return validate({"name": "episodes", "env": env, "algorithm": algorithm})


def collecting(env_id: str, *, is_seeded: bool) -> Callable[[float], float]:
    """Return a function that plays for some seconds of the processor, and returns env steps for each."""
    import torch

    from ddrl import codec
    from ddrl.algorithms import base
    from ddrl.runs import submit
    from ddrl.worker.collector import Collector

    torch.set_num_threads(1)  # as workers do
    config = settings(env_id)
    resolved = base.resolve(config, submit.prepare(config))
    who: Any = {"run": "episodes", "producer": 1, "incarnation": 1}
    collector = Collector(**who, config=config, resolved=resolved, random_until_learned=False)
    learner = resolved.learner(device=torch.device("cpu"), seed=1)
    collector.load(1, {name: value.numpy() for name, value in learner.weights().items()})
    if not is_seeded:
        vector: Any = collector._vector

        def begin(lane: int, seed: int) -> None:
            vector._observation[lane] = vector.envs[lane].reset()[0]

        vector._begin = begin

    def play(seconds: float) -> float:
        steps, started = 0, time.process_time()
        while (elapsed := time.process_time() - started) < seconds:
            fragment = collector.collect()
            codec.encode(fragment)
            steps += fragment.num_transitions
        return steps / elapsed

    play(1.0)  # T grows
    return play


def seeds(rounds: int, seconds: float) -> None:
    """Print the cost of seeded resets."""
    print("| env | seeded | not seeded | loss | quartiles of rounds |\n|---|---|---|---|---|")
    for env_id in ENVS:
        players = {is_seeded: collecting(env_id, is_seeded=is_seeded) for is_seeded in (True, False)}
        found: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * rounds):
            is_seeded = number % 4 in (1, 2)  # both have the same share of drift
            found[is_seeded].append(players[is_seeded](seconds))
        losses = [100 * (1 - one / two) for one, two in zip(*found.values(), strict=True)]
        medians = [f"{statistics.median(values):,.0f}" for values in found.values()]
        print(
            f"| {env_id} | {medians[0]} | {medians[1]} | {statistics.median(losses):.1f} % "
            f"| {' to '.join(f'{value:.1f}' for value in statistics.quantiles(losses, n=4)[::2])} % |"
        )


def recorded(client: Any, blocking: Any, env_id: str, goal: Callable[[str], bool]) -> str:
    """Play a new run by fresh weights until a goal is reached; return its id."""
    import torch

    from ddrl.algorithms import base
    from ddrl.runs import submit
    from ddrl.store import leases, runs, stream, weights
    from ddrl.worker.segment import Players, play

    torch.set_num_threads(1)  # as workers do
    config = settings(env_id)
    run = submit.create(client, config, submit.prepare(config))
    token = leases.acquire(client, run, host="benchmark", folder="-", ttl_ms=3_600_000)
    assert token is not None
    learner = base.resolve(config, runs.spaces(client, run)).learner(device=torch.device("cpu"), seed=1)
    blob = weights.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
    players, allowance = Players(), 0
    while not goal(run):
        allowance += 40_000
        weights.publish(
            client, run, token, version=allowance // 40_000, blob=blob, allowance=allowance, updates=0
        )
        while runs.state(client, run).appended_steps < allowance:
            stream.claim(client, run, 1)
            play(client, blocking, players, run)
    return run


def same(num: int) -> None:
    """Play so many episodes of each of six environments again, and count those that are the same bit for bit."""
    from ddrl.runs import episodes
    from ddrl.store import connection

    print("| env | episodes | steps | the same bit for bit |\n|---|---|---|---|")
    with server() as url:
        client, blocking = connection.connect(url), connection.connect_blocking(url)
        for env_id in (*ENVS, "FrozenLake-v1", "ALE/Pong-v5"):
            run = recorded(client, blocking, env_id, lambda run: len([*episodes.read(client, run)]) >= num)
            some = sorted(episodes.read(client, run), key=lambda one: (one.producer, one.lane, one.begin))
            with episodes.Replayer(client, run) as replayer:
                found = [replayer.play(one).difference for one in some[:num]]
            steps = sum(one.length for one in some[:num])
            print(f"| {env_id} | {len(found)} | {steps:,} | {found.count('')} |", flush=True)
            for difference in filter(None, found):
                print(difference, file=sys.stderr)


def replays(rounds: int) -> None:
    """Print the speed of episodes that are played again."""
    from ddrl import envs
    from ddrl.runs import episodes
    from ddrl.store import connection, runs

    print("| env | episodes | again, steps/s | bare steps/s | ratio |\n|---|---|---|---|---|")
    with server() as url:
        client, blocking = connection.connect(url), connection.connect_blocking(url)
        for env_id in ENVS:
            run = recorded(
                client, blocking, env_id, lambda run: runs.state(client, run).appended_steps >= 40_000
            )
            known = [one for one in episodes.read(client, run) if one.seeded]
            some = sorted(known, key=lambda one: (one.producer, one.lane, one.begin))
            ratios, speeds = [], []
            for _ in range(rounds):
                started = time.process_time()
                with episodes.Replayer(client, run) as replayer:
                    for one in some:
                        assert not replayer.play(one).difference
                    again_s = time.process_time() - started
                    taken = [
                        [action for part in replayer._parts(one, one.begin) for action in part.action]
                        for one in some
                    ]
                started = time.process_time()
                made = envs.make_one(settings(env_id).env)
                for one, actions in zip(some, taken, strict=True):
                    made.reset(seed=one.seed if one.seed >= 0 else None)
                    for action in actions:
                        made.step(action)
                made.close()
                bare_s = time.process_time() - started
                steps = sum(one.length for one in some)
                ratios.append(bare_s / again_s)
                speeds.append((steps / again_s, steps / bare_s))
            again, bare = (f"{statistics.median(values):,.0f}" for values in zip(*speeds, strict=True))
            print(f"| {env_id} | {len(some)} | {again} | {bare} | {100 * statistics.median(ratios):.0f} % |")


def backfill() -> None:
    """Print how long 50 versions x 20 episodes take on a fleet of two processes, and one after the other in this one.

    The versions are the newest of a lander that has learned for 40 s.
    """
    import subprocess

    from ddrl import policy
    from ddrl.runs.evaluation import score
    from ddrl.store import connection, runs, weights, workers

    with server() as url, fresh_home() as environment:
        place = {**environment, connection.URL_VARIABLE: url}

        def ddrl(*arguments: str) -> float:
            """Run a command; return its seconds."""
            started = time.perf_counter()
            folder = environment["DDRL_BENCH_FOLDER"]
            subprocess.run(
                [sys.executable, "-m", "ddrl", *arguments],
                check=True,
                env=place,
                cwd=folder,
                capture_output=True,
            )
            return time.perf_counter() - started

        options = ("stop.return=null", "weights.keep_last=50", "evaluation.every_s=1000")
        ddrl(
            "submit",
            "lunar",
            "--time",
            "40s",
            "--workers",
            "1",
            "--learner",
            *(part for one in options for part in ("-s", one)),
        )
        client = connection.connect(url)
        [run] = runs.names(client)
        config, kept = runs.config(client, run).evaluation, sorted(weights.index(client, run).sizes)[-50:]
        with child(["-m", "ddrl", "worker", "--role", "evaluate", "-c", "2"], place):
            while not workers.alive(client):
                time.sleep(0.2)
            there_s = ddrl("backfill", run, "-n", "20")
        started = time.perf_counter()
        for version in kept:
            score(policy.from_run(client, run, version), range(config.seed, config.seed + 20))
        here_s = time.perf_counter() - started
    print(
        f"`ddrl backfill` on two processes: {there_s:.1f} s; {len(kept)} versions one by one in one: {here_s:.1f} s; "
        f"{here_s / there_s:.2f} times as fast"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("seeds", "replay", "same", "backfill"))
    parser.add_argument("--rounds", type=int, default=6, help="of replay; of seeds five times as many")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--episodes", type=int, default=170, help="of each environment, for same")
    arguments = parser.parse_args()
    print(heading("Recorded episodes") + "\n")
    if arguments.what == "backfill":
        return backfill()
    if arguments.what == "same":
        return same(arguments.episodes)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    if arguments.what == "seeds":
        seeds(5 * arguments.rounds, arguments.seconds)
    else:
        replays(arguments.rounds)


if __name__ == "__main__":
    main()
