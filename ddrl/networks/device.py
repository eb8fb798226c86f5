"""The learner's device, and transfers to it: arrays become tensors here only, and priorities arrays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ddrl.config import ConfigError, LearnerConfig

_ALIGNMENT = 256  # bytes, of a column of a batch on a GPU


def set_up(learner: LearnerConfig) -> torch.device:
    """Set torch up in this process as a run's config wants it; return the device.

    Raises:
        ConfigError: this machine lacks the device or the precision.
    """
    device, is_rounded = choose_device(learner.device), learner.precision == "bfloat16"
    torch.set_float32_matmul_precision("medium" if is_rounded else "highest")
    if is_rounded and not (_rounds_on_cpu() if device.type == "cpu" else torch.cuda.is_bf16_supported()):
        raise ConfigError(
            f"learner.precision: bfloat16 is not on this machine ({device}); use float32, or a learner on a machine"
            " that has it"
        )
    torch.set_num_threads(learner.num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def all_digits() -> Iterator[None]:
    """Multiply matrices without rounding while the context lasts, also in a process that `set_up` has set to round."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _rounds_on_cpu() -> bool:
    """Return whether matrix products round as they are set to; a CPU may have bfloat16 and not use it for float32."""
    thirds = torch.full((64, 64), 1 / 3)
    return float((thirds @ thirds)[0, 0]) > 64 / 9 + 1e-3  # a third is 0.33398 in bfloat16


def choose_device(name: str) -> torch.device:
    """Return the torch device of a config's `learner.device`; takes no memory of it.

    With `auto`, learners of one machine take its GPUs in turns, by LOCAL_RANK.

    Raises:
        ConfigError: it is not on this machine.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    with contextlib.suppress(RuntimeError):  # no such kind of device
        device = torch.device(name)
        if (device.index or 0) < torch.get_device_module(device).device_count():
            return device
    raise ConfigError(
        f"learner.device: {name!r} is not on this machine; use auto or cpu, or a learner on a machine that has it"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch of arrays, or of tensors that are there already, as one of tensors on the device.

    `burn_in` and `length` stay on the CPU, which packs sequences by them; `number`, which is looked up on the CPU, is
    left out.
    """
    arrays = {name: value for name, value in vars(batch).items() if value is not None and name != "number"}
    tensors = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }
    if device.type != "cpu":
        sent = {
            name: value
            for name, value in tensors.items()
            if name not in ("burn_in", "length") and value.device.type == "cpu"
        }
        tensors |= _send_together(sent, device)
    return type(batch)(**tensors)


def _send_together(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy CPU tensors to another device in one transfer, without waiting for it."""
    sizes = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in tensors.values()]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")

    def parts(memory: torch.Tensor) -> dict[str, torch.Tensor]:
        pairs = zip(tensors.items(), memory.split_with_sizes(sizes), strict=True)
        return {name: part[: like.nbytes].view(like.dtype).view(like.shape) for (name, like), part in pairs}

    for name, part in parts(host).items():
        part.copy_(tensors[name])
    return parts(host.to(device, non_blocking=True))


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy CPU values to the device, without waiting for a GPU."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start copying detached values to the CPU; return a function that waits for this copy only and returns it."""
    if values.device.type != "cuda":
        return values.numpy
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> np.ndarray:
        copied.synchronize()
        return host.numpy()

    return wait
