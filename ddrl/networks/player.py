"""The actor alone as a torch module that plays: for networks that NumPy cannot evaluate by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ddrl.networks.trunks import make_trunk, to_input


class ModulePlayer:
    """A trunk with a policy head, on the CPU; arguments as of `make_trunk`."""

    def __init__(
        self,
        network: str,
        observation_shape: tuple[int, ...],
        *,
        num_outputs: int,
        hidden_sizes: Sequence[int],
        activation: str,
        kwargs: Mapping[str, Any],
    ) -> None:
        trunk, width = make_trunk(
            network, observation_shape, hidden_sizes=hidden_sizes, activation=activation, kwargs=kwargs
        )
        self._module = nn.ModuleDict({"actor": trunk, "policy_head": nn.Linear(width, num_outputs)})
        self._module.eval()

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over the entries actor.* and policy_head.* of a learner's weights.

        Raises:
            ValueError: one is missing or of another shape.
        """
        state = {
            name: torch.from_numpy(array)
            for name, array in arrays.items()
            if name.startswith(("actor.", "policy_head."))
        }
        try:
            self._module.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(" ".join(str(error).split())[:300]) from None

    @torch.inference_mode()
    def forward(self, observation: np.ndarray, by_row: bool) -> np.ndarray:
        """[N, *O] -> [N, P] policy parameters; each row by itself if `by_row`."""
        x = to_input(torch.from_numpy(np.ascontiguousarray(observation)))
        # Copies, for kernels round differently by the strides (NumPy's [None] gives 0) and the place of a row too.
        layout = torch.contiguous_format
        rows = [x[i : i + 1].clone(memory_format=layout) for i in range(len(x))] if by_row else [x]
        outputs = [self._module["policy_head"](self._module["actor"](row)) for row in rows]
        return torch.cat(outputs).numpy()
