"""All parameters of a module as one vector, or loaded from arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ddrl.networks.ranks import ALONE, Ranks


class FlatParameters:
    """All parameters of a module as views of one vector: one kernel per optimizer step or target update.

    Small networks spend more time on the overhead of calls than on arithmetic.

    Args:
        module: whose parameters they are.
        ranks: that learn them together.

    Attributes:
        vector: [P] the parameters in the module's order; its `.grad` is [P] and always allocated.
        parameters: the module's own parameters, which share the vector's memory.
    """

    def __init__(self, module: nn.Module, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._names, self.parameters = zip(*module.named_parameters(), strict=True)
        self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in self.parameters]))
        self.vector.grad = self._gradient = torch.zeros_like(self.vector)
        sections = self.vector.detach().split_with_sizes([p.numel() for p in self.parameters])
        for parameter, section in zip(self.parameters, sections, strict=True):
            parameter.data = section.view(parameter.shape)

    def differentiate(self, loss: Tensor) -> None:
        """Set `vector.grad` to the gradient of a scalar loss with respect to these parameters *only*.

        The loss is a mean over this rank's rows of the batch; the gradient is that of the mean over all ranks' rows.
        """
        gradients = torch.autograd.grad(loss, self.parameters)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=self._gradient)
        self._ranks.mean(self._gradient)

    def keep_gradient(self, *prefixes: str) -> None:
        """Set the gradient to 0 but for the parameters whose names in the module begin so."""
        parts = self._gradient.split_with_sizes([parameter.numel() for parameter in self.parameters])
        for name, part in zip(self._names, parts, strict=True):
            if not name.startswith(prefixes):
                part.zero_()

    def clip_gradient(self, max_norm: float) -> Tensor:
        """Scale `vector.grad` down to `max_norm` if it is longer; return its norm [] before."""
        norm: Tensor = self._gradient.norm()
        self._gradient.mul_((max_norm / norm).clamp(max=1.0))
        return norm

    def copies(self) -> dict[str, Tensor]:
        """Return CPU copies of the parameters by their names in the module, in one transfer."""
        vector = self.vector.detach().to("cpu", copy=True)
        sections = vector.split_with_sizes([parameter.numel() for parameter in self.parameters])
        parts = zip(self._names, self.parameters, sections, strict=True)
        return {name: part.view(parameter.shape) for name, parameter, part in parts}


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers that are saved with it, by name."""
    saved = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def take_scalar(arrays: dict[str, np.ndarray], name: str) -> float:
    """Remove a number that is published with the weights, and return it.

    Raises:
        ValueError: it is missing, or no number.
    """
    value = arrays.pop(name, None)
    if value is None or value.shape != ():
        raise ValueError(
            f"{name}: {'missing in' if value is None else f'shape {value.shape} in'} the weights, () here"
        )
    return float(value)


def load_arrays(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Load all parameters and buffers of a module by name.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs.
    """
    own, unknown = module.state_dict(), torch.empty(0)  # some of it may be on "meta": new_layers_on
    tensors = {
        name: torch.from_numpy(array).to(own.get(name, unknown).device) for name, array in arrays.items()
    }
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(" ".join(str(error).split())[:300]) from None
