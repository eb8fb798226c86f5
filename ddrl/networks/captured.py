"""Updates on a GPU as CUDA graphs: their kernels are launched at once, not one by one from Python.

A small network's kernels take a few microseconds each, launching one from Python ten. A graph holds addresses, so what
it reads and writes has to stay where it is: parameters, states of optimizers, and a batch of its own, into which each
batch is copied.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddrl.networks.device import send
from ddrl.networks.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

_EAGER_CALLS = 3  # before a capture: libraries choose their kernels and allocate
_MOST_GRAPHS = 8  # times the number of ranks: the more there are, the more sizes the parts of batches have
_CALLS_TO_REPLACE = 30  # before a capture in place of an older one


@dataclass(frozen=True)
class _Graph:
    """A captured call.

    Attributes:
        graph: what is replayed.
        inputs: columns of its own batch, in the batch's order.
        numbers: [n] those of the call, in its order.
        results: tensors that each replay overwrites.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    numbers: Tensor
    results: dict[str, Tensor]


class Captured:
    """A function of a batch on the device, replayed as a CUDA graph on a GPU.

    The function changes tensors in place, and nothing else. What it depends on beside its arguments and those tensors
    is constant. After a change of anything else, such as a learning rate, call `forget`. What cannot be captured,
    such as a function that waits for the device, is called as it is.

    Args:
        function: takes a batch, and numbers and flags by name, numbers also as tensors []; returns detached tensors by
            name.
        device: where the batches are.
        generators: random generators on the device that the function draws from.
        ranks: that learn together; nothing is captured where their gradients go through the CPU.
    """

    def __init__(
        self,
        function: Callable[..., dict[str, Tensor]],
        device: torch.device,
        *generators: torch.Generator,
        ranks: Ranks = ALONE,
    ) -> None:
        self._function, self._generators = function, generators
        self._device, self._ranks, self._captures = device, ranks, device.type == "cuda"
        self.forget()
        ranks.before_leaving(self.forget)

    def forget(self) -> None:
        """Capture anew: what the function depends on has changed."""
        self._graphs: dict[Hashable, _Graph] = {}
        self._calls: Counter[Hashable] = Counter()

    def __call__(
        self, batch: Any, *, numbers: Mapping[str, float] | None = None, **flags: bool
    ) -> dict[str, Tensor]:
        """Call the function; what a replay returns is overwritten by the next one.

        Args:
            batch: a dataclass of tensors, or None; not captured with a column on the CPU, which decides about kernels.
            numbers: may differ from call to call.
            flags: each combination is captured by itself.
        """
        numbers = numbers or {}
        if not (self._captures and self._ranks.stays_on_device):
            return self._function(batch, **numbers, **flags)
        columns = {name: value for name, value in vars(batch).items() if value is not None}
        if any(value.device.type == "cpu" for value in columns.values()):
            return self._function(batch, **numbers, **flags)
        kinds = ((name, value.shape, value.dtype) for name, value in columns.items())
        # The shares of the ranks are constants of a graph.
        key = (self._ranks.sizes, *numbers, *flags.values(), *kinds)
        graph = self._graphs.pop(key, None)
        if graph is None:
            self._calls[key] += 1
            is_full = len(self._graphs) >= _MOST_GRAPHS * self._ranks.size
            if self._calls[key] <= (_CALLS_TO_REPLACE if is_full else _EAGER_CALLS):
                return self._function(batch, **numbers, **flags)
            if is_full:
                oldest = next(iter(self._graphs))  # not called for longest
                del self._graphs[oldest], self._calls[oldest]
            reason = "another rank cannot"
            try:
                graph = self._capture(type(batch), columns, list(numbers), flags)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
            if not self._ranks.agree(graph is not None) or graph is None:
                self._captures = bool(self._graphs)
                self._calls[key] = -sys.maxsize  # not again
                log.warning("updates are not captured as CUDA graphs: %s", reason)
                return self._function(batch, **numbers, **flags)
        if numbers:
            graph.numbers.copy_(
                send(torch.tensor(list(numbers.values())), graph.numbers.device), non_blocking=True
            )
        for own, given in zip(graph.inputs, columns.values(), strict=True):
            own.copy_(given)
        self._graphs[key] = graph
        graph.graph.replay()
        return dict(graph.results)

    def _capture(
        self, kind: type, columns: dict[str, Tensor], names: list[str], flags: dict[str, bool]
    ) -> _Graph:
        """Return a graph of the function; nothing is computed yet."""
        own = {name: torch.empty_like(value) for name, value in columns.items()}
        numbers = torch.empty(len(names), device=self._device)
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # Other threads read metrics meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = self._function(kind(**own), **dict(zip(names, numbers, strict=True)), **flags)
        return _Graph(graph, list(own.values()), numbers, results)
