"""Ranks that learn together, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import distributed

from ddrl.networks.ranks import Ranks

T = TypeVar("T")


def together(size: int, work: Callable[[Ranks], T], *, timeout_s: float = 20.0) -> list[T]:
    """Return what each of so many ranks returns, all at work at the same time."""
    store = distributed.HashStore()

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        ranks = Ranks(rank, size)
        ranks.join(store, address="127.0.0.1", timeout_s=timeout_s)
        return work(ranks)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
