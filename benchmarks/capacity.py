"""What players and learners cost one server: commands, bytes, memory, and which limit comes first.

    python benchmarks/capacity.py | tee benchmarks/results/capacity.txt

Real fragments, played here at full speed by one process, are appended by as many producers as there are players, one
after another; learners read them as the reader does; versions of Nature's size are published and fetched. The server's
own count of its processor time, bytes and memory gives the cost of each; the table multiplies. Each player sends a
fragment of `rollout.fragment_s` after the other, polls at each version, and 16 of a machine fetch it once.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from machine import ROOT, heading, server

from ddrl import codec, config
from ddrl.algorithms import base
from ddrl.runs import submit
from ddrl.store import connection, keys, leases, ledger, runs, stream, weights
from ddrl.worker.collector import Collector

PLAYERS = {  # title: preset, options, bytes of a version
    "lander, tuned for one machine": ("lunar", [], 4 * 11_000),
    "lander, fragments of 1 s": ("lunar", ["rollout.fragment_s=1", "learner.publish_every_s=1"], 4 * 11_000),
    "Atari": ("asterix", [], 4 * 1_693_362),
}
LINK = 1.25e9  # bytes a second, 10 Gbit/s
PROCESSES = 16  # of a machine


@dataclass(frozen=True)
class Cost:
    """What the server did for one call: microseconds of its processor, bytes that came and went."""

    us: float
    came: float
    went: float


def spent(client: Any) -> tuple[float, float, float]:
    """Return the server's processor time in microseconds, and the bytes that came and went."""
    used, stats = client.info("cpu"), client.info("stats")
    seconds = used["used_cpu_sys"] + used["used_cpu_user"]
    return 1e6 * seconds, stats["total_net_input_bytes"], stats["total_net_output_bytes"]


def cost(client: Any, calls: int, action: Callable[[], object]) -> Cost:
    """Do what makes so many calls, and return the cost of one."""
    before = spent(client)
    action()
    return Cost(*((after - then) / calls for after, then in zip(spent(client), before, strict=True)))


def play(settings: config.RunConfig, seconds: float) -> list[Any]:
    """Return fragments of an untrained policy, with their encoding."""
    spaces = submit.prepare(settings)
    resolved = base.resolve(settings, spaces)
    identity: dict[str, Any] = {"run": "r", "producer": 1, "incarnation": 1}
    collector = Collector(config=settings, resolved=resolved, random_until_learned=False, **identity)
    learner = resolved.learner(device=torch.device("cpu"), seed=1)
    collector.load(1, {name: value.numpy() for name, value in learner.weights().items()})
    until, found = time.monotonic() + seconds, []
    while time.monotonic() < until:
        fragment = collector.collect(stop_at=time.monotonic() + settings.rollout.fragment_s)
        found.append((fragment, codec.encode(fragment)))
    return found[len(found) // 4 :]  # the first ones learn how fast the environments are


def measure(
    url: str, version_bytes: int, players: int, fragments: list[Any], settings: config.RunConfig
) -> dict[str, Any]:
    """Return the costs of appends, of reading, of polls and of fetching a version, and the bytes that players take."""
    client = connection.connect(url)
    run = submit.create(client, settings, submit.prepare(settings))
    token = leases.acquire(client, run, host="here", folder="/tmp", ttl_ms=3_600_000)
    assert token is not None
    client.hset(keys.state(run), "max_producers", ledger.MAX_PRODUCERS)  # as the dispatcher does
    blob = os.urandom(version_bytes)
    weights.publish(client, run, token, version=1, blob=blob, allowance=10**12, updates=1, players=players)
    num = max(3_000, players)

    def append() -> None:
        for number in range(num):
            fragment, encoded = fragments[number % len(fragments)]
            host = f"host{number % players // PROCESSES}"
            reply = stream.append(
                client,
                run,
                encoded,
                producer=1 + number % players,
                incarnation=1,
                seq=number // players,
                num_transitions=fragment.num_transitions,
                episode_returns=fragment.episode_return.tolist(),
                host=host,
                node=f"rollout@{host}",
                pid=1,
            )
            assert reply.answer is stream.Answer.GO

    def read() -> None:
        cursor, count = b"0-0", 1
        while found := stream.follow(client, run, cursor, count=count, block_ms=1):
            ledger.checked(client, run, found)
            cursor, count = found[-1].entry_id, stream.next_count(found, count)

    def fetch() -> None:
        for _ in range(200):
            weights.get(client, run, 1)

    def poll() -> None:
        for _ in range(2_000):
            stream.remaining(client, run)

    costs: dict[str, Any] = {"append": cost(client, num, append)}
    costs["read"] = cost(client, client.xlen(keys.experience(run)), read)
    costs |= {"fetch": cost(client, 200, fetch), "poll": cost(client, 2_000, poll)}
    costs["memory"] = sum(client.memory_usage(key(run), samples=0) for key in (keys.producers, keys.counts))
    runs.set_status(client, run, "stopped", "measured", token=token)
    client.flushall()
    return costs


def row(title: str, players: int, learners: int, costs: dict[str, Any], settings: config.RunConfig) -> str:
    """Return a row of the table."""
    appends, versions = players / settings.rollout.fragment_s, 1 / settings.learner.publish_every_s
    append, read, fetch, poll = (costs[name] for name in ("append", "read", "fetch", "poll"))
    calls = [(appends, append), (appends * learners, read), (players / PROCESSES * versions, fetch)]
    calls.append((players * versions, poll))
    core = sum(number * one.us for number, one in calls) / 1e6
    came, went = (sum(number * getattr(one, way) for number, one in calls) for way in ("came", "went"))
    limits = {"processor": core, "link in": came / LINK, "link out": went / LINK}
    first = max(limits, key=lambda name: limits[name])
    return (
        f"| {title} | {players:,} | {learners} | {appends:,.0f} | {100 * core:.0f} % | {came / 1e6:,.0f} |"
        f" {went / 1e6:,.0f} | {costs['memory'] / 1e6:.1f} | {first}, at {players / limits[first]:,.0f} players |"
    )


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--players", type=int, nargs="*", default=[1_000, 10_000], help="rollout processes")
    options.add_argument("--learners", type=int, nargs="*", default=[1, 8], help="of the run")
    given = options.parse_args()
    print(heading("What one server holds") + "\n")
    columns = (
        "players",
        "number",
        "learners",
        "appends/s",
        "of a core",
        "MB/s in",
        "MB/s out",
        "MB of producers",
    )
    print(f"| {' | '.join(columns)} | first limit |")
    print("|---|---|---|---|---|---|---|---|---|")
    told = []
    for title, (preset, overrides, version_bytes) in PLAYERS.items():
        settings = config.load(ROOT / "configs" / f"{preset}.yaml", ["replay.max_bytes=4GB", *overrides])
        fragments = play(settings, 20.0)
        mean = sum(sum(map(len, encoded.values())) for _, encoded in fragments) / len(fragments)
        for players in given.players:
            with server() as url:
                costs = measure(url, version_bytes, players, fragments, settings)
            for learners in given.learners:
                print(row(title, players, learners, costs, settings), flush=True)
            each = ", ".join(
                f"{name} {costs[name].us:.0f} us" for name in ("append", "read", "fetch", "poll")
            )
            told.append(
                f"- {title}, {players:,} players: fragments of {mean / 1e3:.1f} kB; server's time: {each}"
            )
    print("\n" + "\n".join(told))


if __name__ == "__main__":
    main()
