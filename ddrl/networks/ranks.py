"""The learners of one run that make each update together: every rank takes part of the batch, and gradients are added.

All ranks have the same parameters, as they add the same gradients in the same order; no parameter travels. The group of
processes is torch's: gloo, which also takes tensors on GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, distributed

T = TypeVar("T", bound=Sized)


class RankLostError(RuntimeError):
    """Another rank does not answer any more; the group is at its end."""


class Ranks:
    """This process among those that learn together; by default it is alone, and nothing here does anything.

    Args:
        rank: 0 leads.
        size: number of ranks; several of them `join` before anything else.

    Attributes:
        total: rows of the batch in hand, of all ranks together.
        rows: those of this rank.
        waited_s, num_calls: time spent in calls of the group, which includes waiting for the others; their number.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        self.total, self.rows = 1, slice(0, 1)
        self.waited_s, self.num_calls = 0.0, 0

    def join(self, store: Any, *, address: str, timeout_s: float) -> None:
        """Connect with the other ranks, once all of them call this.

        Args:
            store: where they find each other; of this group alone.
            address: of this machine, for the others.
            timeout_s: after which a rank that does not answer is lost.

        Raises:
            RankLostError: a rank is not there in time.
        """
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=address)]
        try:
            self._group = gloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise RankLostError(f"the learners do not find each other: {_reason(error)}") from None

    def leave(self) -> None:
        """Close the connections; the other ranks lose this one."""
        self._group = None

    def split(self, sizes: Sequence[int]) -> None:
        """Begin a batch of so many rows of each rank; a rank with none still takes part, with gradients of 0."""
        start = sum(sizes[: self.rank])
        self.total, self.rows = sum(sizes), slice(start, start + sizes[self.rank])

    def count(self, num: int) -> int:
        """Return the rows of the batch in hand, of all ranks together; alone, `num`."""
        return num if self.size == 1 else self.total

    def each(self, parts: Iterable[T], blank: T, num: int) -> Iterator[T]:
        """Yield `num` parts of a batch, of which all ranks learn at the same time; each is the batch in hand then.

        Args:
            parts: this rank's, at most `num`; the length of each is its number of rows.
            blank: in place of parts that are missing or have no row.
            num: of parts, the same on all ranks.
        """
        if self.size == 1:
            yield from parts
            return
        own = list(parts)
        table = torch.zeros(self.size, num, dtype=torch.int64)
        if self.share:
            table[self.rank, : len(own)] = torch.tensor([len(part) for part in own])
        whole = self.total, self.rows
        for part, of_ranks in zip_longest(own, self.add(table).T.tolist()):
            if not any(of_ranks):  # few long sequences make fewer parts
                continue
            self.split(of_ranks)
            yield part if self.share else blank
        self.total, self.rows = whole

    @property
    def share(self) -> float:
        """Share of the batch's rows that are this rank's."""
        return (self.rows.stop - self.rows.start) / self.total

    def mean(self, values: Tensor) -> Tensor:
        """Replace means over this rank's rows by those over all rows, in place."""
        return values if self.size == 1 else self.add(values.mul_(self.share))

    def add(self, values: Tensor) -> Tensor:
        """Replace values by their sum over the ranks, in place."""
        return self._reduce(values, distributed.ReduceOp.SUM)

    def least(self, values: Tensor) -> Tensor:
        """Replace values by their minimum over the ranks, in place."""
        return self._reduce(values, distributed.ReduceOp.MIN)

    def randn(self, shape: Sequence[int], generator: Generator) -> Tensor:
        """Return standard normal numbers for this rank's rows, the first axis: those that one learner would draw."""
        num = shape[0] if self.size == 1 else self.total
        drawn = torch.randn((num, *shape[1:]), generator=generator, device=generator.device)
        if self.size == 1:
            return drawn
        return drawn[self.rows] if self.share else drawn.new_zeros(shape)

    def copy_first(self, *tensors: Tensor) -> None:
        """Replace tensors by those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                self.add(tensor if self.rank == 0 else tensor.zero_())

    def exchange(self, data: bytes) -> list[bytes]:
        """Return what every rank has given in this call, in the order of ranks; alone, only this rank's."""
        if self.size == 1:
            return [data]
        sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
        padded = bytearray(data.ljust(max(1, *sizes), b"\0"))
        found = self._gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [part[:size].numpy().tobytes() for part, size in zip(found, sizes, strict=True)]

    def _gather(self, values: Tensor) -> list[Tensor]:
        found = [torch.empty_like(values) for _ in range(self.size)]
        self._call("allgather", [found], [values])
        return found

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.size > 1:
            self._call("allreduce", [values], op)
        return values

    def _call(self, name: str, *arguments: Any) -> None:
        """Wait for a call of the group.

        Raises:
            RankLostError: a rank has ended, or did not answer in time.
        """
        started = time.monotonic()
        self.num_calls += 1
        try:
            if self._group is None:
                raise RankLostError("this rank has left its group")
            getattr(self._group, name)(*arguments).wait()
        except RuntimeError as error:
            raise RankLostError(f"a learner of the group is lost: {_reason(error)}") from None
        finally:
            self.waited_s += time.monotonic() - started


def _reason(error: Exception) -> str:
    """Return what torch says of a group that is at its end, in short."""
    text = str(error).partition("\n")[0]
    is_closed = "closed" in text.lower() or "reset" in text.lower()
    return "it has ended" if is_closed else text[:200]


ALONE = Ranks()
