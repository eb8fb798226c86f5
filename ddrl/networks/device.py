"""Between NumPy and the learner's device: the one place where arrays become tensors, and where priorities come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of arrays as the same kind of batch of tensors, all on the device but what steers the host: burn_in.

    Numbers of items stay behind, where they are looked up.
    """
    arrays = {name: value for name, value in vars(batch).items() if value is not None and name != "number"}
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return type(batch)(
        **{name: value if name == "burn_in" else send(value, device) for name, value in tensors.items()}
    )


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """CPU values on the device; from a GPU nothing is waited for."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start to copy detached values back; what is returned waits for them, and for nothing the device does later."""
    if values.device.type != "cuda":
        return values.numpy
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> np.ndarray:
        copied.synchronize()
        array: np.ndarray = host.numpy()
        return array

    return wait
