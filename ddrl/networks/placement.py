"""The device of new layers. Imports no torch, as processes whose networks are in NumPy do without it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_device = ContextVar("device", default="cpu")


def device() -> str:
    """Return the name of the torch device of new layers."""
    return _device.get()


@contextmanager
def new_layers_on(name: Literal["cpu", "meta"]) -> Iterator[None]:
    """Place new layers on this device: on "meta" they have shapes, but take no memory and no initial weights."""
    token = _device.set(name)
    try:
        yield
    finally:
        _device.reset(token)
