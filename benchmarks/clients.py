"""Speed of the actor in C against a rollout process of Python: CartPole under a DQN, on one core, in turns.

    python benchmarks/clients.py

Both play the same run, whose allowance is never used up; needs a C compiler and hiredis.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from machine import ROOT, child, cores, fresh_home, heading

OPTIONS = ["replay.max_bytes=4GB", "rollout.segment_s=600"]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    print(heading("Actors") + "\n")
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
        from ddrl.store import connection, leases, runs, weights
        from ddrl.store import server as embedded

        program = Path(environment["DDRL_BENCH_FOLDER"]) / "actor"
        source = ROOT / "clients" / "c" / "actor.c"
        subprocess.run(["cc", "-O3", "-o", program, source, "-lhiredis", "-lm"], check=True)
        with embedded.use() as url:
            client = connection.connect(url)
            settings = config.load(ROOT / "configs" / "cartpole-dqn.yaml", OPTIONS)
            spaces = submit.prepare(settings)
            run = submit.create(client, settings, spaces)
            token = leases.acquire(client, run, host="benchmark", folder="-", ttl_ms=3_600_000)
            assert token is not None
            learner = base.resolve(settings, spaces).learner(device=torch.device("cpu"), seed=1)
            values = {name: value.numpy() for name, value in learner.weights().items()} | {
                "epsilon": torch.tensor(0.05).numpy()
            }
            blob = weights.encode_weights(values)
            for version in (0, 1):  # version 0 plays at random, 1 plays the policy
                weights.publish(client, run, token, version=version, blob=blob, allowance=10**12, updates=0)
            dispatcher = Dispatcher(client, run, token, max_crashes=5, send=celery.send_rollout)

            def measured() -> float:
                """Return env steps/s, once play goes on."""
                before = runs.state(client, run).appended_steps
                while runs.state(client, run).appended_steps == before:
                    dispatcher.tick(0)
                    time.sleep(0.05)
                time.sleep(1.0)
                before, started = runs.state(client, run).appended_steps, time.perf_counter()
                time.sleep(arguments.seconds)
                return (runs.state(client, run).appended_steps - before) / (time.perf_counter() - started)

            found: dict[str, list[float]] = {"C": [], "Python": []}
            place = urlsplit(url)
            command, pinned = [str(program), place.path, "0", run], partial(os.sched_setaffinity, 0, {core})
            secret = {**os.environ, "DDRL_PASSWORD": unquote(place.password or "")}
            for _ in range(arguments.rounds):
                with subprocess.Popen(command, env=secret, preexec_fn=pinned) as actor:
                    found["C"].append(measured())
                    actor.kill()
                with child(["-m", "ddrl", "worker", "--role", "rollout", "-c", "1"], environment, core):
                    found["Python"].append(measured())
            client.close()
    ratios = [one / two for one, two in zip(*found.values(), strict=True)]
    print("| actor | steps/s (median) | of single rounds |\n|---|---|---|")
    for name, speeds in found.items():
        print(f"| {name} | {statistics.median(speeds):,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} |")
    print(
        f"\nC appends {statistics.median(ratios):.1f} times as much ({min(ratios):.1f} to {max(ratios):.1f})."
    )


if __name__ == "__main__":
    main()
