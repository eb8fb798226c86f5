"""Samples a second of several learners of one run on this machine, against one; each has a core, or a GPU, of its own.

    python benchmarks/ranks.py | tee benchmarks/results/ranks.txt

Networks have about two million parameters. All ranks learn from a batch that they have, each from its part, without a
server and without play. Sizes take turns; shown are medians. More learners than GPUs share them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import updates
from machine import facts
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddrl.algorithms import base
from ddrl.networks.device import choose_device
from ddrl.networks.ranks import Ranks
from ddrl.runs import submit

TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ppo": (
        "ppo",
        updates.IMAGES,
        {**updates.NATURE, **updates.PLAIN, "batch_size": 512, "minibatch_size": 256, "num_epochs": 1},
    ),
    "dqn": (
        "dqn",
        updates.IMAGES,
        {**updates.NATURE, "batch_size": 256, "double": True, "prioritized": True},
    ),
    "sac": ("sac", updates.BOX, {"hidden_sizes": [800, 800], "batch_size": 512}),
}
WARM_UP, CAPACITY = 5, 10_000  # updates, until graphs are captured; items


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    options.add_argument("--sizes", nargs="*", type=int, default=[1, 2], help="numbers of learners")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument(
        "--hosts",
        action="store_true",
        help="use NCCL, and tell it that each learner is on a host, so that it lets them share",
    )
    options.add_argument("--rank", nargs=4, metavar=("TASK", "RANK", "SIZE", "PORT"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.rank:
        task, *numbers = arguments.rank
        device = choose_device("auto" if arguments.device == "cuda" else "cpu")
        print(json.dumps(learn(task, *map(int, numbers), seconds=arguments.seconds, device=device)))
        return
    print(f"{facts()}\n")
    print(
        "| algorithm | parameters | learners | samples/s | against one | waits for others |\n|---|---|---|---|---|---|"
    )
    for task in arguments.tasks:
        found: dict[int, list[dict[str, float]]] = {size: [] for size in arguments.sizes}
        for _ in range(arguments.rounds):
            for size in arguments.sizes:
                found[size].append(together(task, size, arguments))
        alone = statistics.median(one["rate"] for one in found[arguments.sizes[0]])
        for size, rows in found.items():
            rate, waits = (statistics.median(row[name] for row in rows) for name in ("rate", "waits"))
            share = "" if size == arguments.sizes[0] else f"{rate / alone:.2f}"
            print(f"| {task} | {rows[0]['parameters']:,.0f} | {size} | {rate:,.0f} | {share} | {waits:.0%} |")


def together(task: str, size: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return what rank 0 of so many processes reports."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                *("--seconds", str(arguments.seconds), "--device", arguments.device),
                *("--rank", task, *map(str, (rank, size, store.port))),
            ],
            env=os.environ
            | {"LOCAL_RANK": str(rank)}
            | (
                {"DDRL_NCCL": "1", "NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
                if arguments.hosts
                else {}
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    output = [process.communicate()[0] for process in ranks]
    found: dict[str, float] = json.loads(output[0].splitlines()[-1])
    return found


def learn(
    task: str, rank: int, size: int, port: int, *, seconds: float, device: torch.device
) -> dict[str, float]:
    """Learn as one rank; return its samples a second and the share of time that it waits."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    name, env, options = TASKS[task]
    own = {**options, "batch_size": options["batch_size"] // size}
    ranks = Ranks(rank, size)
    batch = updates.Loop(updates.task(name, env, CAPACITY, **own), device).batch()
    config = updates.task(name, env, CAPACITY, **options)
    learner: Any = base.resolve(config, submit.prepare(config)).learner(device=device, seed=1, ranks=ranks)
    if size > 1:
        store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        ranks.join(store, device=device, address="127.0.0.1", timeout_s=60.0)
    num_own = int(batch.valid.sum()) if hasattr(batch, "valid") else len(batch.action)
    sizes = torch.zeros(size, dtype=torch.int64)
    sizes[rank] = num_own
    ranks.add(sizes)

    def step() -> None:
        ranks.split(sizes.tolist())
        learner.update(batch)
        ranks.settle()

    for _ in range(WARM_UP):
        step()
    num, waited, started, is_over = 0, ranks.waited_s, time.perf_counter(), torch.zeros(1)
    while not is_over:
        step()
        num += 1
        is_over = ranks.add(torch.tensor([float(rank == 0 and time.perf_counter() - started > seconds)]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - started
    ranks.leave()
    epochs = options.get("num_epochs", 1)
    parameters = learner.critic_parameters if hasattr(learner, "critic_parameters") else learner.parameters
    return {
        "rate": num * int(sizes.sum()) * epochs / took,
        "waits": (ranks.waited_s - waited) / took,
        "parameters": float(parameters.vector.numel()),
    }


if __name__ == "__main__":
    main()
