"""The learners of one run that make each update together: every rank takes part of the batch, and gradients are added.

All ranks have the same parameters, as they add the same gradients in the same order; no parameter travels. The group of
processes is torch's gloo. Where DDRL_NCCL is 1 and each rank has a GPU of its own, tensors on the GPUs are added by
NCCL, and do not leave them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, distributed

T = TypeVar("T", bound=Sized)

_POLL_S = 2e-5
_ASK_S = 0.5  # after which the ranks ask each other although a GPU is not done: another may have ended
# A lost rank is not the end of this process, nor a reason to wait until torch has written down what it knows.
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


class RankLostError(RuntimeError):
    """Another rank does not answer any more; the group is at its end."""


class StateLostError(RankLostError):
    """The same, and this rank's parameters are in doubt, as a sum on the GPU may have been given up."""


class Ranks:
    """This process among those that learn together; by default it is alone, and nothing here does anything.

    Args:
        rank: 0 leads.
        size: number of ranks; several of them `join` before anything else.

    Attributes:
        sizes: rows of each rank of the batch in hand.
        total: rows of all ranks together.
        waited_s, num_calls: time spent in calls of the group, which includes waiting for the others (by NCCL, only the
            GPU waits); their number.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        self._gpus: Any = None  # NCCL's group
        self._forgets: list[Callable[[], None]] = []
        self._device = torch.device("cpu")
        self._timeout_s = 0.0
        self.split([1] * size)
        self.waited_s, self.num_calls = 0.0, 0

    def join(self, store: Any, *, device: torch.device, address: str, timeout_s: float) -> None:
        """Connect with the other ranks, once all of them call this.

        Args:
            store: where they find each other; of this group alone.
            device: that this rank learns on.
            address: of this machine, for the others.
            timeout_s: after which a rank that does not answer is lost.

        Raises:
            RankLostError: a rank is not there in time.
        """
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._device, self._timeout_s = device, timeout_s
        try:
            options._devices = [gloo.create_device(hostname=address)]
            self._group = gloo(store, self.rank, self.size, options)
            gpus = self.exchange(_gpu(device))
            if all(gpus) and len({*gpus}) == self.size:
                os.environ.update(_NCCL)
                nccl: Any = distributed.ProcessGroupNCCL
                own = distributed.PrefixStore("gpus", store)  # type: ignore[attr-defined]
                self._gpus = nccl(own, self.rank, self.size, nccl.Options())
        except RuntimeError as error:
            raise RankLostError(f"the learners do not find each other: {_reason(error)}") from None

    def leave(self) -> None:
        """Close the connections; the other ranks lose this one, and what this GPU waits for is given up."""
        self._group, gpus, self._gpus = None, self._gpus, None
        while self._forgets:  # NCCL waits for the end of graphs
            self._forgets.pop()()
        if gpus is not None:
            with contextlib.suppress(RuntimeError):  # it takes too long
                gpus.abort()

    def before_leaving(self, forget: Callable[[], None]) -> None:
        """Have `forget` called before this rank leaves; it ends CUDA graphs, which may hold sums."""
        if self.size > 1:
            self._forgets.append(forget)

    @property
    def stays_on_device(self) -> bool:
        """True if sums of tensors on the device do not leave it."""
        return self.size == 1 or self._gpus is not None

    def settle(self) -> None:
        """Wait until the GPUs of all ranks have made their sums; where those go through the CPU, they have.

        All ranks call this at the same places, and read results of the GPU only afterwards: what waits there for a rank
        that is lost waits forever.

        Raises:
            StateLostError: a rank has ended, or its GPU did not answer in time.
        """
        if self._gpus is None:
            return
        done: Any = torch.cuda.current_stream(self._device).record_event()
        deadline = time.monotonic() + self._timeout_s
        are_done = False
        while not are_done:
            ask_at = time.monotonic() + _ASK_S
            while not done.query() and time.monotonic() < ask_at:
                time.sleep(_POLL_S)
            is_late = time.monotonic() > deadline
            try:
                are_done = self.agree(done.query())
            except RankLostError as error:
                raise StateLostError(str(error)) from None
            if is_late and not are_done:
                raise StateLostError(f"sums on the GPUs are not made in {self._timeout_s:g} s")

    def agree(self, is_so: bool) -> bool:
        """Return whether something is so on every rank; all of them ask."""
        return bool(self.least(is_so))

    def split(self, sizes: Sequence[int]) -> None:
        """Begin a batch of so many rows of each rank; a rank with none still takes part, with gradients of 0."""
        self.sizes, self.total = tuple(sizes), sum(sizes)

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
        own, whole = list(parts), self.sizes
        table = torch.zeros(self.size, num, dtype=torch.int64)
        table[self.rank, : len(own)] = torch.tensor([len(part) if self.share else 0 for part in own])
        for part, of_ranks in zip_longest(own, self.add(table).T.tolist()):
            if any(of_ranks):  # few long sequences make fewer parts
                self.split(of_ranks)
                yield part if self.share else blank
                self.settle()
        self.split(whole)

    @property
    def share(self) -> float:
        """Share of the batch's rows that are this rank's."""
        return self.sizes[self.rank] / self.total

    def mean(self, values: Tensor) -> Tensor:
        """Replace means over this rank's rows by those over all rows, in place."""
        return values if self.size == 1 else self.add(values.mul_(self.share))

    def add(self, values: Tensor) -> Tensor:
        """Replace values by their sum over the ranks, in place."""
        return self._reduce(values, distributed.ReduceOp.SUM)

    def least(self, value: float) -> float:
        """Return the minimum of a number over the ranks."""
        return float(self._reduce(torch.tensor(value, dtype=torch.float64), distributed.ReduceOp.MIN))

    def randn(self, shape: Sequence[int], generator: Generator) -> Tensor:
        """Return standard normal numbers for this rank's rows, the first axis: those that one learner would draw.

        After masks of dropout, which each rank draws for its own rows, they are others.
        """
        num = self.count(shape[0])
        drawn = torch.randn((num, *shape[1:]), generator=generator, device=generator.device)
        if self.size == 1:
            return drawn
        return drawn.split_with_sizes(self.sizes)[self.rank] if self.share else drawn.new_zeros(shape)

    def copy_first(self, *tensors: Tensor) -> None:
        """Replace tensors by those of rank 0."""
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
        self._call(self._group, "allgather", [found], [values])
        return found

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.size > 1:
            is_on_gpu = self._gpus is not None and values.device.type != "cpu"
            self._call(self._gpus if is_on_gpu else self._group, "allreduce", [values], op)
        return values

    def _call(self, group: Any, name: str, *arguments: Any) -> None:
        """Wait for a call of a group; of NCCL's, only the GPU waits.

        Raises:
            RankLostError: a rank has ended, or did not answer in time.
        """
        started = time.monotonic()
        self.num_calls += 1
        try:
            if group is None:
                raise RankLostError("this rank has left its group")
            getattr(group, name)(*arguments).wait()
        except RuntimeError as error:
            kind = RankLostError if group is self._group else StateLostError
            raise kind(f"a learner of the group is lost: {_reason(error)}") from None
        finally:
            del group  # an error's traceback would keep it, and its connections
            self.waited_s += time.monotonic() - started


def _gpu(device: torch.device) -> bytes:
    """Return what tells a GPU that NCCL can use from others; nothing of a device that is none.

    NCCL takes one GPU for two if it is told that they are on two hosts, by NCCL_HOSTID.
    """
    if os.environ.get("DDRL_NCCL") != "1" or device.type != "cuda" or not distributed.is_nccl_available():
        return b""
    return f"{torch.cuda.get_device_properties(device).uuid} {os.environ.get('NCCL_HOSTID', '')}".encode()


def _reason(error: Exception) -> str:
    """Return what torch says of a group that is at its end, in short."""
    text = str(error).partition("\n")[0]
    is_closed = "closed" in text.lower() or "reset" in text.lower()
    return "it has ended" if is_closed else text[:200]


ALONE = Ranks()
