"""Options of the learners of action values: DQN, R2D2 and PQN.

Steps are the agent's. All schedules count the learner's updates, which ddrl keeps in proportion to the steps
(`replay.samples_per_insert`): S steps make about S * samples_per_insert / batch_size updates; R2D2, whose batch holds
sequences, divides by sequence_length too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.options import Common, NetworkConfig, Prioritized, option
from ddrl.config import LIVE
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import Generator

    from ddrl.networks.q_network import QNetwork

AnyOptions = TypeVar("AnyOptions", bound="GreedyConfig")


class QNetworkConfig(NetworkConfig):
    """Options of the algorithms whose network has an output for each of an environment's discrete actions."""

    network_options: ClassVar[tuple[str, ...]] = ("hidden_sizes", "activation")
    """Options that are arguments of `QNetwork` by the same name."""

    hidden_sizes: tuple[PositiveInt, ...] = Field((128, 128), min_length=1)
    """Widths of the dense layers before the output. With dueling, the last width is per stream. With a recurrent core,
    these layers come after it. Wider fits more and costs time. Usual: (64, 64) to (256, 256) for vectors, (512,) after
    convolutions."""
    activation: Literal["relu", "tanh"] = "relu"
    """Activation of the hidden layers. relu is usual and faster; tanh bounds the features."""
    norm: Literal["none", "group", "batch", "layer"] = "none"
    """Normalization after each convolution of nature, impala and data_efficient. `group` steadies learning and needs
    less tuning, at some time per update; `batch`, which R2D2 refuses, mixes the transitions of a batch. `layer`
    normalizes every layer before the head, also of mlp and conv. Usual: none or group."""

    def make_network(self, spec: EnvSpec, *, generator: Generator | None = None) -> QNetwork:
        """Return the network that the options describe, on the CPU.

        Args:
            spec: spaces of the environment.
            generator: of the initial weights; torch's global one when None.

        Raises:
            ValueError: it cannot take these observations.
        """
        from ddrl.networks.q_network import QNetwork

        make = partial(self.make_trunk, spec, generator, activation=self.activation, norm=self.norm)
        options = {name: getattr(self, name) for name in self.network_options}
        return QNetwork(make, num_actions=spec.action_sizes[0], generator=generator, **options)

    def check(self, spec: EnvSpec) -> None:
        """Refuse an environment without discrete actions, and a network that cannot take its observations."""
        if spec.action_kind != "discrete":
            raise ValueError(
                f"{spec.env_id}: action_kind is {spec.action_kind!r}, but {self.name} needs discrete actions; choose "
                f"an environment with a Discrete space of actions, or algorithm.name "
                f"{'ppo' if spec.action_kind == 'multi_discrete' else 'sac or ppo'}"
            )
        self.check_network(spec, norm=self.norm)

    @property
    def _has_head_layer(self) -> bool:
        """The last of the dense layers is the head's, not the trunk's."""
        return any(getattr(self, name, False) for name in ("dueling", "noisy", "recurrent_state_size"))

    def refuse_unused_layers(self) -> None:
        """Refuse dense layers other than the head's for a custom network, which has its own.

        Raises:
            ValueError: more than the head's width is set, or without a layer of the head anything.
        """
        if ":" not in self.network:
            return
        sizes = self.hidden_sizes
        if not self._has_head_layer:
            when = f"on {self.network}, which one linear layer follows"
            self.refuse_changed(when, "hidden_sizes", "activation")
        elif len(sizes) > 1 and sizes != type(self).model_fields["hidden_sizes"].default:
            raise ValueError(
                f"hidden_sizes={sizes}: only the last one is used on {self.network}, which has its own layers before "
                f"it; set {sizes[-1:]}"
            )


class GreedyConfig(QNetworkConfig):
    """Options of every learner whose policy takes the action of largest value, or sometimes a random one."""

    network_options: ClassVar[tuple[str, ...]] = (*QNetworkConfig.network_options, "dueling")

    dueling: bool = False
    """Two streams, Q = V + A - mean A: states are valued without trying every action. Usual: yes where there are many
    actions or few of them matter."""
    learning_rate: float = option(NetworkConfig, "learning_rate", 5e-4)
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """adam, or rmsprop (decay 0.95, eps 3e-3 outside the root, not centered), close to the 2015 DQN's; then set
    learning_rate near 2.5e-4."""
    adam_eps: float = Field(1e-8, gt=0, json_schema_extra=LIVE)
    """Added to the root of Adam's second moment. More damps the steps of parameters with small gradients, which
    steadies sparse rewards. Usual: 1e-8 to 1e-5 for vectors, 1.5e-4 to 1e-3 for images."""
    weight_decay: float = Field(0.0, ge=0, lt=1, json_schema_extra=LIVE)
    """Times the parameters, added to their gradient after max_grad_norm (L2 regularization). More keeps weights
    smaller. Usual: 0; rainbow-with-ray 5e-5."""
    max_grad_norm: float | None = option(Common, "max_grad_norm", 10.0)
    epsilon: float = Field(1.0, ge=0, le=1, json_schema_extra=LIVE)
    """Share of random actions in training at first. More explores more. Usual: 1."""
    final_epsilon: float = Field(0.05, ge=0, le=1, json_schema_extra=LIVE)
    """Final epsilon, reached linearly. More never stops exploring. Usual: 0.01 to 0.1."""
    epsilon_anneal_updates: PositiveInt = Field(10_000, json_schema_extra=LIVE)
    """Updates until epsilon reaches its final value. S steps make S * replay.samples_per_insert / batch_size updates;
    R2D2 divides by sequence_length too. More explores longer. Usual: a tenth to a half of the run's updates."""
    epsilon_ladder: bool = False
    """Ape-X instead of a schedule: each environment keeps its own epsilon, from ladder_base down to ladder_base^(1 +
    ladder_exponent), so that a fleet of any size always covers all exploration rates."""
    ladder_base: float = Field(0.4, gt=0, lt=1)
    """The ladder's largest epsilon. More explores more. Usual: 0.4."""
    ladder_exponent: float = Field(7.0, gt=0)
    """More gives more environments that hardly explore. Usual: 7."""
    evaluation_epsilon: float = Field(0.0, ge=0, le=1)
    """Share of random actions in evaluations. Usual: 0; Atari 0.001 to 0.05; report it with results."""

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        if self.epsilon_ladder:
            schedule = ("epsilon", "final_epsilon", "epsilon_anneal_updates")
            self.refuse_changed("with epsilon_ladder=true", *schedule)
        else:
            self.refuse_changed("without epsilon_ladder=true", "ladder_base", "ladder_exponent")
            if self.epsilon == self.final_epsilon:
                self.refuse_changed("where epsilon is final from the start", "epsilon_anneal_updates")
        if self.optimizer != "adam":
            self.refuse_changed(f"with optimizer={self.optimizer}", "adam_eps")
        if self.network == "mlp" and self.norm in ("group", "batch"):
            self.refuse_changed("on mlp, which has no convolutions", "norm")
        if self.norm == "layer" and self.network == "mlp" and len(self.hidden_sizes) == self._has_head_layer:
            raise ValueError(
                f"norm=layer: hidden_sizes={self.hidden_sizes} is the head's layer, which has none; add another width, "
                "or set norm to none"
            )
        return self

    @property
    def reports_values(self) -> bool:
        """Policies report action values, of which first priorities are made."""
        return False

    def epsilon_at(self, num_updates: int) -> float:
        """Return the scheduled share of random actions after so many updates; a ladder ignores it."""
        reached = min(1.0, num_updates / self.epsilon_anneal_updates)
        return self.epsilon + (self.final_epsilon - self.epsilon) * reached


class Options(GreedyConfig, Prioritized):
    """Options of every learner of action values from a replay; rewards are in training units."""

    double: bool = False
    """The online network picks the next action, the target network values it: less overestimation, one more forward
    pass per update. Usual: yes."""
    n_step: PositiveInt = option(Common, "n_step", 1)
    batch_size: PositiveInt = option(NetworkConfig, "batch_size", 64)
    target_period: PositiveInt | None = Field(500, json_schema_extra=LIVE)
    """Updates between two copies of the network to its target. More is stabler and slower. null if target_rate is set;
    exactly one of the two. Usual: 100 to 1,000 for vectors, 2,000 to 10,000 for images."""
    target_rate: float | None = option(Common, "target_rate", None)

    @model_validator(mode="before")
    @classmethod
    def _target_rate_replaces_target_period(cls, values: Any) -> Any:
        """Set target_period to None if only target_rate is given."""
        if isinstance(values, dict) and values.get("target_rate") is not None:
            return {"target_period": None, **values}
        return values

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if (self.target_period is None) == (self.target_rate is None):
            raise ValueError(
                f"target_period={self.target_period}, target_rate={self.target_rate}: the target follows in one of two "
                "ways; set one and leave the other None"
            )
        self.refuse_unused_priorities()
        return self

    @property
    def reports_values(self) -> bool:
        """Policies report action values, of which first priorities are made."""
        return self.prioritized
