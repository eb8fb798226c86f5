"""Actor and critic as one module: trunks, an optional recurrent core, a policy head, a value head.

Source: Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization" (ICLR blog track):
detail 2 (orthogonal weights, gain 0.01 for the policy's head and 1 for the value's; biases of zero) and, for
continuous actions, a log standard deviation that does not depend on the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ddrl.networks.custom import refuse
from ddrl.networks.layers import orthogonal_linear
from ddrl.networks.recurrent import RecurrentCore


class ActorCritic(nn.Module):
    """Policy parameters and values of observations.

    Parameters are named `core.*` (recurrent only; see `RecurrentCore`), `actor.*` and `critic.*` (the trunks; no critic
    when shared), `policy_head.weight` [P, F], `policy_head.bias` [P], `value_head.weight` [1, F], `value_head.bias` [1]
    and, if it has dimensions, `log_std` [log_std_dims]. The same generator gives the same actor and policy head, shared
    or not.

    Args:
        network: name of each trunk, for messages.
        make_trunk: returns a new trunk of that name, on the CPU, and the number F of its features.
        num_outputs: P, parameters of the policy: means, or logits.
        shared: the critic's head sits on the actor's trunk; otherwise each has a trunk of its own.
        recurrent: the core between trunk and heads; not "none" needs `shared`.
        recurrent_size: units of the core.
        log_std_dims: dimensions of a log standard deviation that is the same for all states; 0 for none.
        initial_log_std: initial value of each of them.
        generator: CPU generator of the heads' initial weights; torch's global one when None.

    Raises:
        NetworkError: as `make_trunk`, or it returned one module twice when two are needed.
    """

    log_std: nn.Parameter

    def __init__(
        self,
        network: str,
        make_trunk: Callable[[], tuple[nn.Module, int]],
        *,
        num_outputs: int,
        shared: bool,
        recurrent: Literal["none", "lstm", "gru"] = "none",
        recurrent_size: int = 128,
        log_std_dims: int = 0,
        initial_log_std: float = 0.0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        trunk, num_features = make_trunk()
        self.core: RecurrentCore | None = None
        if recurrent != "none":
            # Registered first: cuDNN needs its weights aligned, at the start of the vector of `FlatParameters`.
            self.core = RecurrentCore(recurrent, num_features, recurrent_size, generator=generator)
            num_features = recurrent_size
        self.actor = trunk
        self.policy_head = orthogonal_linear(num_features, num_outputs, 0.01, generator)
        if not shared:
            self.critic, num_features = make_trunk()
            if set(self.actor.parameters()) & set(self.critic.parameters()):
                remedy = "make new ones at each call, or set shared to true"
                refuse(network, f"returned the same parameters twice; {remedy}")
        self.value_head = orthogonal_linear(num_features, 1, 1.0, generator)
        if log_std_dims:
            self.log_std = nn.Parameter(torch.full((log_std_dims,), initial_log_std))
        self.shared = shared
        # To find a parameter through its module costs as much as a small operation.
        self._policy_head = self.policy_head.weight, self.policy_head.bias
        self._value_head = self.value_head.weight, self.value_head.bias

    def forward(
        self, observation: Tensor, state: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, *O] -> policy parameters [B, P] and values [B].

        A recurrent network takes sequences that lie one after another, the states [S, H] before them, and their lengths
        [S] int64, on the CPU.
        """
        features = self.actor(observation)
        if self.core is not None:
            assert state is not None and lengths is not None, "a recurrent network takes sequences"
            features = self.core.flat(features, state, lengths)
        parameters = F.linear(features, *self._policy_head)
        weight, bias = self._value_head
        if not self.shared:
            features = self.critic(observation)
        return parameters, torch.addmv(bias, features, weight.squeeze(0))

    def policy_state(self) -> dict[str, Tensor]:
        """Return what a policy needs by name: all but the critic; detached, but not copied."""
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not name.startswith(("critic.", "value_head."))
        }
