"""Images on the learner's GPU: each is sent there once, and batches are gathered where they are learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddrl.networks.device import send
from ddrl.replay.storage import Block, DenseRows, PackedRows, as_input, stacked_slots, with_back


class DeviceRows(DenseRows):
    """As `storage.DenseRows`, but observations are tensors on a device; the training thread alone uses it.

    Args:
        device: where they are.
        options: of `DenseRows`.
    """

    def __init__(self, device: torch.device, **options: int) -> None:
        super().__init__(**options)
        self._device = device

    def pack(self, block: Block) -> PackedRows:
        """As `DenseRows.pack`."""
        observation = np.require(block.observation, requirements=["C", "W"])  # as tensors want it
        return PackedRows(with_back({"observation": observation}, block))

    def append(self, packed: PackedRows) -> int:
        """As `DenseRows.append`."""
        columns: dict[str, Any] = dict(packed.columns)
        columns["observation"] = send(torch.from_numpy(columns["observation"]), self._device)
        return self.ring.append(**columns)

    def plan(self, rows: NDArray[np.int64]) -> Callable[[], Any]:
        """As `DenseRows.plan`; the stacks are a tensor on the device, which later appends leave alone."""
        slots = send(torch.from_numpy(stacked_slots(self.ring, rows, self._frame_stack)), self._device)
        stacks = as_input(self.ring.columns["observation"][slots], rows.ndim, self._frame_stack)
        return lambda: stacks
