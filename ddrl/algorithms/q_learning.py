"""What DQN and R2D2 share: their options, how they explore, and what they can serve.

Steps are the agent's; the clock of every schedule is the learner's updates, which ddrl keeps in proportion to the steps
(`replay.samples_per_insert`): S steps make about S * samples_per_insert / batch_size updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from ddrl.config import LIVE
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import Generator

    from ddrl.networks.q_network import QNetwork

_RUNGS = 256  # of the ladder
AnyOptions = TypeVar("AnyOptions", bound="Options")


class Options(BaseModel):
    """Options of every learner of action values; rewards are as scaled for training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    network: str = Field(
        "mlp",
        description="From observation to features: `mlp` for vectors; for images `conv` (small ones), `nature` (DQN of "
        "2015), `impala` (residual: learns more per step at several times the cost), `data_efficient` (small, fast); "
        'or your own, "module:callable", called with the observation shape and returning a torch module.',
    )
    network_kwargs: dict[str, Any] = Field({}, description="Keyword arguments of a network of your own.")
    hidden_sizes: tuple[PositiveInt, ...] = Field(
        (128, 128),
        min_length=1,
        description="Widths of the dense layers before the output; with dueling the last one is that of each stream. "
        "Wider fits more and costs time. Usual: (64, 64) to (256, 256) for vectors, (512,) after convolutions.",
    )
    activation: Literal["relu", "tanh"] = Field(
        "relu", description="Of the hidden layers. relu is usual and faster; tanh bounds the features."
    )
    norm: Literal["none", "group", "batch"] = Field(
        "none",
        description="Normalization after each convolution of nature and impala. `group` steadies learning and needs "
        "less tuning, at some time per update; `batch` mixes the transitions of a batch. Usual: none or group.",
    )
    dueling: bool = Field(
        False,
        description="Two streams, Q = V + A - mean A: states are valued without trying every action. Usual: yes where "
        "there are many actions or few of them matter.",
    )
    double: bool = Field(
        False,
        description="The online network picks the next action that the target network values: less overestimation, one "
        "more forward pass per update. Usual: yes.",
    )
    learning_rate: float = Field(
        5e-4,
        gt=0,
        description="Step size of the optimizer. Larger is faster until values diverge. Usual: 6.25e-5 to 2.5e-4 for "
        "images, 3e-4 to 2e-3 for vectors.",
        json_schema_extra=LIVE,
    )
    optimizer: Literal["adam", "rmsprop"] = Field(
        "adam",
        description="adam, or rmsprop (decay 0.95, eps 3e-3 outside the root, not centered), near that of 2015; it "
        "needs about 2.5e-4.",
    )
    adam_eps: float = Field(
        1e-8,
        gt=0,
        description="Added to the root of Adam's second moment. More damps the steps of parameters with small "
        "gradients, which steadies sparse rewards. Usual: 1e-8 for vectors, 1.5e-4 to 1e-3 for images.",
        json_schema_extra=LIVE,
    )
    max_grad_norm: float | None = Field(
        10.0,
        gt=0,
        description="The gradient is scaled down to this norm: less bounds rare large errors harder. None: never. "
        "Usual: 10 to 40.",
        json_schema_extra=LIVE,
    )
    gamma: float = Field(
        0.99,
        ge=0,
        le=1,
        description="Discount per agent step; the horizon is about 1 / (1 - gamma). Larger sees further and learns "
        "more slowly. Usual: 0.97 to 0.999.",
    )
    n_step: PositiveInt = Field(
        1,
        description="Rewards summed before bootstrapping. More carries rewards back faster, but is biased towards the "
        "older policies that played them. Usual: 1 to 5.",
    )
    batch_size: PositiveInt = Field(
        64, description="Items per update. Larger gives less noisy and slower updates. Usual: 32 to 512."
    )
    prioritized: bool = Field(
        False,
        description="Replay what surprises more often, instead of everything alike; costs some time per update.",
    )
    priority_exponent: float = Field(
        0.6,
        ge=0,
        le=1,
        description="Probability goes by surprise to this power: more replays the surprising harder, 0 everything "
        "alike. Usual: 0.5 to 0.6; R2D2 0.9.",
    )
    importance_exponent: float = Field(
        0.4,
        ge=0,
        le=1,
        description="How much of the bias of prioritized draws the weights take back at first: 0 nothing, 1 all, at "
        "smaller steps. Usual: 0.4 to 0.6.",
        json_schema_extra=LIVE,
    )
    final_importance_exponent: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Where importance_exponent goes linearly. Usual: 1; R2D2 stays at 0.6.",
        json_schema_extra=LIVE,
    )
    importance_anneal_updates: PositiveInt = Field(
        100_000,
        description="Updates within which it goes there. Fewer is less biased earlier. Usual: those of the run.",
        json_schema_extra=LIVE,
    )
    target_period: PositiveInt | None = Field(
        500,
        description="Updates between two copies of the network to its target. More is stabler and slower. None with "
        "target_rate, which is the other way. Usual: 100 to 1,000 for vectors, 2,000 to 10,000 for images.",
        json_schema_extra=LIVE,
    )
    target_rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the network mixed into its target at each update (tau), instead of target_period. Larger "
        "tracks faster and is less stable. Usual: 0.002 to 0.02.",
        json_schema_extra=LIVE,
    )
    epsilon: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of random actions in training at first. More explores more. It is shipped with the weights, "
        "for its clock is the learner's updates, which ddrl keeps in proportion to the steps. Usual: 1.",
        json_schema_extra=LIVE,
    )
    final_epsilon: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Where epsilon goes linearly. More never stops exploring. Usual: 0.01 to 0.1.",
        json_schema_extra=LIVE,
    )
    epsilon_anneal_updates: PositiveInt = Field(
        10_000,
        description="Updates within which it goes there; S steps make S * replay.samples_per_insert / batch_size of "
        "them. More explores longer. Usual: a tenth to a half of the run's.",
        json_schema_extra=LIVE,
    )
    epsilon_ladder: bool = Field(
        False,
        description="Ape-X instead of a schedule: each environment keeps an epsilon of its own, from ladder_base down "
        "to ladder_base^(1 + ladder_exponent), so that a fleet of any size explores in all degrees at any time.",
    )
    ladder_base: float = Field(
        0.4, gt=0, lt=1, description="The ladder's largest epsilon. More explores more. Usual: 0.4."
    )
    ladder_exponent: float = Field(
        7.0, gt=0, description="More gives more environments that hardly explore. Usual: 7."
    )
    evaluation_epsilon: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of random actions in evaluations. Usual: 0; Atari 0.001 to 0.05, said with every figure.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_way_to_the_target(cls, values: Any) -> Any:
        """Who names a target_rate alone does not have to take the default of target_period back."""
        if isinstance(values, dict) and values.get("target_rate") is not None:
            return {"target_period": None, **values}
        return values

    @model_validator(mode="after")
    def _refuse_contradictions(self: AnyOptions) -> AnyOptions:
        if (self.target_period is None) == (self.target_rate is None):
            raise ValueError(
                f"target_period={self.target_period}, target_rate={self.target_rate}: the target follows in one of two "
                "ways; set one and leave the other None"
            )
        if not self.prioritized:
            options = ("priority_exponent", "importance_exponent", "final_importance_exponent")
            self.refuse_changed((*options, "importance_anneal_updates"), "without prioritized=true")
        elif self.importance_exponent == self.final_importance_exponent:
            self.refuse_changed(
                ["importance_anneal_updates"], "where importance_exponent is final from the start"
            )
        if self.epsilon_ladder:
            schedule = ("epsilon", "final_epsilon", "epsilon_anneal_updates")
            self.refuse_changed(schedule, "with epsilon_ladder=true")
        else:
            self.refuse_changed(["ladder_base", "ladder_exponent"], "without epsilon_ladder=true")
            if self.epsilon == self.final_epsilon:
                self.refuse_changed(["epsilon_anneal_updates"], "where epsilon is final from the start")
        if self.optimizer != "adam":
            self.refuse_changed(["adam_eps"], f"with optimizer={self.optimizer}")
        if ":" not in self.network and self.network_kwargs:
            raise ValueError(f"network_kwargs: are for a network of your own; {self.network} takes none")
        if self.network == "mlp":
            self.refuse_changed(["norm"], "on mlp, which has no convolutions")
        return self

    def refuse_changed(self, names: Iterable[str], when: str) -> None:
        """Refuse options that have no effect here, unless they have their default values.

        Raises:
            ValueError: one has another value.
        """
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value}: has no effect {when}; remove it")

    def refuse_layers_of_ones_own(self) -> None:
        """Refuse dense layers for a network of one's own, but for the head's: it takes none.

        Raises:
            ValueError: more than one is set.
        """
        sizes = self.hidden_sizes
        if (
            ":" in self.network
            and len(sizes) > 1
            and sizes != type(self).model_fields["hidden_sizes"].default
        ):
            raise ValueError(
                f"hidden_sizes={sizes}: only the last one is used on {self.network}, which brings the layers before it "
                f"itself; set {sizes[-1:]}"
            )

    def epsilon_at(self, num_updates: int) -> float:
        """The share of random actions after so many updates; without meaning on a ladder."""
        reached = min(1.0, num_updates / self.epsilon_anneal_updates)
        return self.epsilon + (self.final_epsilon - self.epsilon) * reached

    def network_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `QNetwork` that the options decide."""
        return {
            "hidden_sizes": self.hidden_sizes,
            "activation": self.activation,
            "norm": self.norm,
            "dueling": self.dueling,
            "kwargs": self.network_kwargs,
        }


def ladder(config: Options, *, producer: int, num_envs: int) -> NDArray[np.float32]:
    """Each environment's own epsilon: base^(1 + exponent * x), with x spread over [0, 1].

    A fleet that grows and shrinks has no number of environments to divide by. So they stand on 256 rungs, in the order
    of the van der Corput sequence of base 2 (their number's eight bits backwards): any run of neighbors is spread
    evenly, and 256 of them take every rung once.
    Source: Horgan et al. 2018, arXiv:1803.00933, section 4.1, where x = i / (N - 1).

    Args:
        config: options.
        producer: id of the collector.
        num_envs: N, side by side in each collector.

    Returns:
        [N] shares of random actions.
    """
    start = producer * num_envs % _RUNGS
    number = (np.arange(start, start + num_envs) % _RUNGS).astype(np.uint8)
    rung = np.packbits(np.unpackbits(number[:, None], axis=1)[:, ::-1], axis=1)[:, 0]  # [N]
    epsilon = config.ladder_base ** (1.0 + config.ladder_exponent * rung / (_RUNGS - 1))
    return np.asarray(epsilon, np.float32)


def make_network(config: Options, spec: EnvSpec, *, generator: Generator | None = None) -> QNetwork:
    """The network that the options describe, on the CPU.

    Args:
        config: options.
        spec: spaces of the environment.
        generator: of the initial weights; torch's global one when None.

    Raises:
        ValueError: it cannot serve these observations.
    """
    from ddrl.networks.q_network import QNetwork

    return QNetwork(
        config.network,
        spec.input_shape,
        num_actions=spec.action_sizes[0],
        generator=generator,
        **config.network_arguments(),
    )


def load_weights(network: QNetwork, weights: Mapping[str, Any]) -> float:
    """Give a network what the learner's `weights` returned: CPU tensors, or arrays as they come off the wire.

    Returns:
        epsilon, which is shipped with them.

    Raises:
        ValueError: they are those of another configuration or environment.
    """
    import torch

    arrays = {name: np.asarray(value).copy() for name, value in weights.items()}
    epsilon = arrays.pop("epsilon", None)
    if epsilon is None or epsilon.shape != ():
        found = "missing in" if epsilon is None else f"shape {epsilon.shape} in"
        raise ValueError(f"epsilon: {found} the weights, () here")
    try:
        network.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except RuntimeError as error:
        raise ValueError(" ".join(str(error).split())[:300]) from None
    return float(epsilon)


def check(config: Options, spec: EnvSpec, *, name: str) -> None:
    """Refuse an environment, or a network, that cannot serve.

    Args:
        config: options.
        spec: spaces of the environment.
        name: of the algorithm, for the message.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    if spec.action_kind != "discrete":
        raise ValueError(
            f"{spec.env_id}: action_kind is {spec.action_kind!r}, but {name} needs discrete actions; choose an "
            f"environment with a Discrete space of actions, or algorithm.name "
            f"{'ppo' if spec.action_kind == 'multi_discrete' else 'sac or ppo'}"
        )
    if config.network == "mlp":  # known without torch, which `ddrl submit` would pay for
        if len(spec.input_shape) != 1:
            raise ValueError(
                f"algorithm.network: mlp needs a vector, but {spec.env_id} has observations {spec.input_shape}; use "
                f"nature or conv, or gymnasium.wrappers.FlattenObservation"
            )
    else:
        make_network(config, spec)
