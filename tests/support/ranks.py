"""Ranks that learn together, each in a thread of its own, or each in a process with a GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from support import reference_ppo
from support.algorithms import CPU, make_learner
from support.processes import SLOW_S
from support.subjects import batch_for, on_device
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddrl.networks.device import to_device
from ddrl.networks.ranks import Ranks, StateLostError
from ddrl.replay.fifo import blank_trajectories
from ddrl.types import EnvSpec

T = TypeVar("T")
PART_OF = {"recurrent_state": 0, "burn_in": 0, "number": 0, "weight": 0}  # axis; others of sequences: 1


def together(size: int, work: Callable[[Ranks], T], *, timeout_s: float = 20.0) -> list[T]:
    """Return what each of so many ranks returns, all at work at the same time."""
    store = distributed.HashStore()

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        ranks = Ranks(rank, size)
        ranks.join(store, device=CPU, address="127.0.0.1", timeout_s=timeout_s)
        return work(ranks)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def on_gpus(size: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 20.0) -> list[Any]:
    """Return what each of so many ranks returns, each a process; None of one that has ended without a word.

    They take the GPUs of this machine in turns. NCCL takes two ranks of one GPU for those of two hosts.

    Args:
        size: number of ranks.
        work: of a module; called with the ranks, the GPU and `arguments`, with gradients that stay on the GPUs.
        arguments: of `work`.
        timeout_s: after which a rank that does not answer is lost.
    """
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        given = sender, rank, size, store.port, timeout_s, work, arguments
        process = context.Process(target=_on_gpu, args=given, daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    results = []
    try:
        for receiver in receivers:
            assert receiver.poll(SLOW_S), "a rank hangs"
            try:
                results.append(receiver.recv())
            except EOFError:
                results.append(None)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _on_gpu(
    sender: Any, rank: int, size: int, port: int, timeout_s: float, work: Callable[..., Any], arguments: Any
) -> None:
    """Be one of the ranks of `on_gpus`."""
    os.environ |= {"DDRL_NCCL": "1", "NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    gpu = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    ranks, store = Ranks(rank, size), TCPStore("127.0.0.1", port)
    ranks.join(store, device=gpu, address="127.0.0.1", timeout_s=timeout_s)
    assert ranks.stays_on_device, "NCCL does not connect the GPUs"
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            sender.send(work(ranks, gpu, *arguments))
    finally:
        ranks.leave()


def parts_of(
    name: str, learner: Any, spec: EnvSpec, seed: int, size: int
) -> tuple[Any, list[Any], list[int]]:
    """Return a batch, the part of each rank, and the rows of each part."""
    if learner.config.on_policy:
        memory = learner.config.recurrent_state_size
        feed = reference_ppo.make_feed(spec, seed=seed, num_fragments=3, state_size=memory)
        of_ranks = [feed[rank::size] for rank in range(size)]
        blank = to_device(blank_trajectories(spec, state_size=memory), CPU)
        parts = [reference_ppo.tensors(own) if own else blank for own in of_ranks]
        sizes = [sum(one.num_transitions for one in own) for own in of_ranks]
        return reference_ppo.tensors(feed), parts, sizes
    batch = batch_for(name, learner, spec, seed)
    columns = {column: value for column, value in vars(batch).items() if value is not None}
    axes = {column: PART_OF.get(column, 1) if name == "r2d2" else 0 for column in columns}
    num = batch.action.shape[axes["action"]]
    cuts = np.random.default_rng(seed).choice(np.arange(1, num), size - 1, replace=False)
    rows = torch.arange(num).tensor_split([*map(int, sorted(cuts))])
    parts = [
        replace(batch, **{column: value.index_select(axes[column], own) for column, value in columns.items()})
        for own in rows
    ]
    return batch, parts, [len(own) for own in rows]


def learn_parts(
    ranks: Ranks, device: torch.device, batches: list[Any], num_updates: int, of_learner: dict[str, Any]
) -> tuple[dict[str, np.ndarray], int]:
    """Learn from this rank's parts of batches, by turns; return the state in the end, and the number of graphs."""
    learner = make_learner(ranks=ranks, device=device, **of_learner)
    for number in range(num_updates):
        _, parts, sizes = batches[number % len(batches)]
        ranks.split(sizes)
        learner.update(on_device(parts[ranks.rank], device))
        ranks.settle()
    captured = getattr(learner, "_captured", None)
    state = {name: tensor.numpy() for name, tensor in learner.state().items()}
    return state, len(captured._graphs) if captured else 0


def lose_one(
    ranks: Ranks, device: torch.device, batches: list[Any], of_learner: dict[str, Any]
) -> tuple[str, int]:
    """Learn from graphs, at last without rank 1; return what rank 0 is told, and the number of its graphs."""
    learner = make_learner(ranks=ranks, device=device, **of_learner)
    for number in range(100):
        _, parts, sizes = batches[0]
        ranks.split(sizes)
        if number == 50 and ranks.rank:
            os._exit(1)
        learner.update(on_device(parts[ranks.rank], device))
        try:
            ranks.settle()
        except StateLostError as error:
            num_graphs = len(learner._captured._graphs)
            ranks.leave()
            torch.cuda.synchronize(device)  # the GPU can be used again
            return str(error), num_graphs
    return "no error", 0
