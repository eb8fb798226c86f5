"""Bytes that a server sends to one machine of many processes, for each version of the weights.

    python benchmarks/weights.py | tee benchmarks/results/weights.txt

Processes of a network of Nature's size (1.7 M parameters) get each version as soon as it is published, each by itself,
and sharing what one of them has fetched. Bytes are the server's count of all that it has sent.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import Any

from machine import fresh_home, heading, server

from ddrl import config
from ddrl.store import connection, leases, runs, weights
from ddrl.types import EnvSpec
from ddrl.worker import shared_weights

NUM_BYTES = 4 * 1_693_362
SPACES = EnvSpec("CartPole-v1", (4,), "float32", "discrete", (), action_sizes=(2,))
WAYS: dict[str, Any] = {"each by itself": weights.get, "shared": shared_weights.get}


def play(url: str, run: str, way: str, num_versions: int, done: Any) -> None:
    """Get each version once it is there."""
    client = connection.connect(url)
    for version in range(num_versions):
        while weights.published_ms(client, run, version) is None:
            time.sleep(0.02)
        found = WAYS[way](client, run, version)
        assert found is not None and len(found) == NUM_BYTES
        done.put(version)


def main() -> None:
    """Measure both ways in turns."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--processes", type=int, default=16, help="of the machine")
    options.add_argument("--versions", type=int, default=10, help="published one after another")
    given = options.parse_args()
    print(heading("Weights for one machine") + "\n")
    print(f"{given.processes} processes, {given.versions} versions of {NUM_BYTES / 1e6:.1f} MB\n")
    print("| way | MB sent a version | ms until all have it, median |\n|---|---|---|")
    context = multiprocessing.get_context("spawn")
    with fresh_home() as variables, server() as url:
        os.environ.update(variables)
        client = connection.connect(url)
        settings = config.validate({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}})
        for way in WAYS:
            run = runs.create(client, settings, SPACES)
            token = leases.acquire(client, run, host="here", folder="/tmp", ttl_ms=600_000)
            assert token is not None
            done = context.Queue()
            arguments = (url, run, way, given.versions, done)
            players = [context.Process(target=play, args=arguments) for _ in range(given.processes)]
            for player in players:
                player.start()
            time.sleep(15.0)  # all have begun
            before, seconds = client.info("stats")["total_net_output_bytes"], []
            for version in range(given.versions):
                began = time.monotonic()
                blob = os.urandom(NUM_BYTES)
                weights.publish(client, run, token, version=version, blob=blob, allowance=0, updates=version)
                for _ in players:
                    done.get()
                seconds.append(time.monotonic() - began)
            sent = client.info("stats")["total_net_output_bytes"] - before
            for player in players:
                player.join()
            median = sorted(seconds)[len(seconds) // 2]
            print(f"| {way} | {sent / given.versions / 1e6:.1f} | {1e3 * median:.0f} |", flush=True)


if __name__ == "__main__":
    main()
