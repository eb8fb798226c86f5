"""What each durability costs: env steps/s of one process that plays the lander, by turns.

PYTHONPATH=tests python benchmarks/durability.py

Each durability has a server (of its own, on the same machine and disk), a run of `configs/lunar.yaml` with an allowance
that is never used up, and a player; a round is one segment of each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable

from machine import CONFIG, cores, heading
from support.failover import Failover
from support.private_server import PrivateServer
from support.runs import publish_initial

from ddrl import config
from ddrl.config import Durability
from ddrl.runs import submit
from ddrl.store import connection, keys, leases, runs
from ddrl.worker.segment import Players, play


def player(url: str, durability: Durability, seconds: float) -> Callable[[], float]:
    """Return a function that plays one segment on the server and returns its env steps/s."""
    client, blocking = connection.connect(url), connection.connect_blocking(url)
    overrides = [f"durability={durability}", f"rollout.segment_s={seconds}", "replay.max_bytes=4GB"]
    settings = config.load(CONFIG, overrides)
    run = submit.create(client, settings, submit.prepare(settings))
    token = leases.acquire(client, run, host="-", folder="-", ttl_ms=10**8)
    assert token is not None
    publish_initial(client, run, token, allowance=10**12)
    players = Players()

    def segment() -> float:
        before, began = runs.state(client, run).appended_steps, time.perf_counter()
        play(client, blocking, players, run)
        speed = (runs.state(client, run).appended_steps - before) / (time.perf_counter() - began)
        client.delete(keys.experience(run))
        return speed

    return segment


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each segment")
    arguments = parser.parse_args()

    os.sched_setaffinity(0, {cores()[1]})
    with contextlib.ExitStack() as stack:
        cases = {}
        for policy in ("", "no", "always", "everysec"):
            durability: Durability = "process" if policy in ("", "no") else "disk"
            options = ("--appendonly", "yes", "--appendfsync", policy) if policy else ()
            server = stack.enter_context(contextlib.closing(PrivateServer(*options)))
            name = f"{durability}, appendfsync {policy}" if policy else "process, no append-only file"
            cases[name] = player(server.url, durability, arguments.seconds)
        servers = stack.enter_context(Failover())
        cases["replica, appendfsync no"] = player(servers.url, "replica", arguments.seconds)
        for segment in cases.values():
            segment()
        speeds = {name: list[float]() for name in cases}
        for _ in range(arguments.rounds):
            for name, segment in cases.items():
                speeds[name].append(segment())
    print(heading("Env steps/s of one player of the lander by durability, by turns") + "\n")
    print(
        "| durability | env steps/s (median) | range | of the first (median of the ratios) |\n|---|---|---|---|"
    )
    first = next(iter(speeds.values()))
    for name, each in speeds.items():
        share = statistics.median(one / other for one, other in zip(each, first, strict=True))
        print(
            f"| {name} | {statistics.median(each):,.0f} | {min(each):,.0f} to {max(each):,.0f} | {100 * share:.0f} % |"
        )


if __name__ == "__main__":
    main()
