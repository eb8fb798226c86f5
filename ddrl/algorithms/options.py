"""Base of every algorithm's options, and the options that several algorithms share."""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, Field, PositiveInt, model_validator

from ddrl.config import LIVE, Section, live_options
from ddrl.types import EnvSpec, SequenceShape

if TYPE_CHECKING:
    from torch import Generator, nn

AnyConfig = TypeVar("AnyConfig", bound="AlgorithmConfig")


class AlgorithmConfig(Section):
    """Options of an algorithm, and what the rest of ddrl needs to know of it; off-policy ones also have `n_step`."""

    on_policy: ClassVar[bool] = False
    """Each fragment is learned from once, in order, soon after it was collected."""
    warmup_steps: ClassVar[int] = 1_000
    """Transitions before the first update, unless `replay.warmup_steps` says otherwise; off-policy."""

    learning_rate: float = Field(1e-3, gt=0, json_schema_extra=LIVE)
    """Step size of the optimizers. Larger learns faster until values or policy diverge. Usual: 3e-4 to 3e-3 for
    vectors, 6e-5 to 5e-4 for images."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per agent step; the horizon is about 1 / (1 - gamma) steps. Larger sees further and learns more slowly.
    Usual: 0.97 to 0.999."""
    batch_size: PositiveInt = 256
    """Transitions per update. Larger gives less noisy and slower updates. Usual: 32 to 512."""

    @property
    def corrects_staleness(self) -> bool:
        """Stale fragments are corrected by importance weights; on-policy algorithms only."""
        return False

    @property
    def learns_alone(self) -> bool:
        """Its learner takes no `ranks`, so that it needs whole batches."""
        return self.__module__.partition(".")[0] != __name__.partition(".")[0]

    @property
    def sequences(self) -> SequenceShape | None:
        """The sequences of a recurrent algorithm; None for the others."""
        return None

    @property
    def recurrent_state_size(self) -> int:
        """H, numbers in the recurrent state of one environment; 0 without one."""
        return 0

    @property
    def transitions_per_update(self) -> int:
        """Transitions that one update counts for in `replay.samples_per_insert`."""
        return self.batch_size

    def fitted(self, spec: EnvSpec) -> Self:
        """Return the options, with a value for each that was left to the environment."""
        return self

    @abstractmethod
    def check(self, spec: EnvSpec) -> None:
        """Refuse an environment or a network that the algorithm cannot use.

        Raises:
            ValueError: one line naming the thing, its value and the remedy.
        """

    def refuse_changed(self, when: str, *names: str, remedy: str = "remove it") -> None:
        """Refuse options that have no effect, unless they have their default values.

        Args:
            when: why they have no effect.
            names: of the options.
            remedy: ends the message.

        Raises:
            ValueError: one has another value.
        """
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value}: has no effect {when}; {remedy}")


class NetworkConfig(AlgorithmConfig):
    """Options of the algorithms whose network can be chosen."""

    name: ClassVar[str]
    """Name of the algorithm, for messages."""

    network: str = "mlp"
    """From observation to features: `mlp` for vectors; for images `conv` (small ones), `nature` (DQN of 2015), `impala`
    (residual: learns more per step at several times the cost) or `data_efficient` (small, fast); or your own,
    "module:callable", called with the observation shape and returning a torch module."""
    network_kwargs: dict[str, Any] = {}
    """Keyword arguments of your own network."""

    @model_validator(mode="after")
    def _refuse_unused_network_kwargs(self) -> Self:
        if self.network_kwargs and ":" not in self.network:
            raise ValueError(f"network_kwargs: are for your own network; {self.network} takes none")
        return self

    def make_trunk(
        self, spec: EnvSpec, generator: Generator | None = None, **layers: Any
    ) -> tuple[nn.Module, int]:
        """Return a new trunk and the number of its features; see `ddrl.networks.trunks.make_trunk`.

        Args:
            spec: spaces of the environment.
            generator: of the initial weights.
            layers: `hidden_sizes`, `activation` and `norm` of a built-in trunk; without, it has no dense layers.

        Raises:
            ValueError: it cannot take these observations.
        """
        from ddrl.networks.trunks import make_trunk

        shape, images = spec.input_shape, spec.image_shapes
        options = {"hidden_sizes": (), "activation": "relu", "kwargs": self.network_kwargs} | layers
        is_stack = spec.frame_stack > 1 and len(shape) == 3
        return make_trunk(
            self.network, shape, image_shapes=images, is_stack=is_stack, generator=generator, **options
        )

    def check_network(self, spec: EnvSpec, **layers: Any) -> None:
        """Refuse observations that the network cannot take, as `make_trunk`; `mlp` is checked without torch.

        Raises:
            ValueError: it cannot take these observations.
        """
        if self.network != "mlp":
            self.make_trunk(spec, **layers)
        elif not spec.is_vector:
            seen = spec.image_shapes or spec.input_shape
            raise ValueError(
                f"algorithm.network: mlp needs a vector, but {spec.env_id} has observations {seen}; use "
                "nature or conv, or gymnasium.wrappers.FlattenObservation"
            )


class Prioritized(AlgorithmConfig):
    """Options of the algorithms that may draw items of the replay by priority."""

    prioritized: bool = False
    """Replay items with large errors more often, instead of all alike; costs some time per update."""
    priority_exponent: float = Field(0.6, ge=0, le=1)
    """Items are drawn in proportion to their priority to this power: more concentrates on large errors, 0 draws all
    alike. Usual: 0.5 to 0.6; R2D2 0.9."""
    importance_exponent: float = Field(0.4, ge=0, le=1, json_schema_extra=LIVE)
    """Initial exponent of the importance weights: 0 corrects no bias of prioritized draws, 1 all of it. More also
    shrinks steps. Usual: 0.4 to 0.6."""
    final_importance_exponent: float = Field(1.0, ge=0, le=1, json_schema_extra=LIVE)
    """Final importance_exponent, reached linearly. Usual: 1; R2D2 stays at 0.6."""
    importance_anneal_updates: PositiveInt = Field(100_000, json_schema_extra=LIVE)
    """Updates until importance_exponent reaches its final value. Fewer is less biased earlier. Usual: the run's total
    updates."""
    importance_maximum: Literal["batch", "replay"] = "batch"
    """Importance weights are divided by the largest of the batch, or of the whole replay: steadier and smaller steps.
    Usual: batch."""

    def refuse_unused_priorities(self) -> None:
        """Refuse options of priorities that have no effect.

        Raises:
            ValueError: one is set.
        """
        importance = ("importance_exponent", "final_importance_exponent", "importance_anneal_updates")
        if not self.prioritized:
            unused = ("priority_exponent", "importance_maximum", *importance)
            self.refuse_changed("without prioritized=true", *unused)
        elif self.importance_exponent == self.final_importance_exponent:
            self.refuse_changed("where importance_exponent is final from the start", importance[-1])


class Common(Section):
    """Options that some algorithms have; they take them from here by `option`, with their own defaults."""

    hidden_sizes: tuple[PositiveInt, ...] = Field((128, 128), min_length=1)
    """Widths of the dense layers. Wider fits more and costs time per update in proportion to the square. Usual:
    (64, 64) to (400, 300) for vectors, (256,) to (512,) after convolutions."""
    max_grad_norm: float | None = Field(None, gt=0, json_schema_extra=LIVE)
    """The gradient is scaled down to this norm. Less limits rare large errors more. null: never. Usual: 0.5 (PPO), 10
    (DQN), 40 (IMPALA, whose gradient is summed over the batch; R2D2, Ape-X)."""
    n_step: PositiveInt = 1
    """Rewards summed before bootstrapping, fewer at the end of an episode. More carries rewards back faster, but is
    biased towards the older policies that collected them. Usual: 1 to 10."""
    target_rate: float = Field(0.005, gt=0, le=1, json_schema_extra=LIVE)
    """Share of the network mixed into its target at each update (tau; 1 - polyak). Larger tracks faster and is less
    stable. Usual: 0.002 to 0.05."""
    critic_warmup_updates: int = Field(1_000, ge=0)
    """In a run that begins with a given policy (`ddrl submit --from`): updates of the fresh critic before the first one
    of the policy, which untrained values would spoil. More keeps the policy longer and learns later."""


def option(source: type[BaseModel], name: str, default: Any) -> Any:
    """Return the field `name` of another class, text and limits included, with another default."""
    field = copy(source.model_fields[name])
    field.default = default
    return field


def changed(old: AnyConfig, new: AnyConfig) -> AnyConfig:
    """Return `new`, the options to continue with.

    Raises:
        ValueError: an option differs that cannot change during a run.
    """
    live = live_options(type(new))
    before, after = old.model_dump(by_alias=True), new.model_dump(by_alias=True)
    for name in sorted(after):
        if before[name] != after[name] and name not in live:
            raise ValueError(
                f"algorithm.{name}: {before[name]} cannot become {after[name]} during a run; submit another run"
            )
    return new


def check_bounds(name: str, spec: EnvSpec) -> None:
    """Refuse, for an algorithm of that name, continuous actions without bounds, or with a dimension that has no choice.

    Raises:
        ValueError: a bound is missing or infinite, or a lower one is not below the upper one.
    """
    num_dims = math.prod(spec.action_shape)
    for side, bounds in (("action_low", spec.action_low), ("action_high", spec.action_high)):
        if len(bounds) != num_dims or not all(map(math.isfinite, bounds)):
            raise ValueError(
                f"{spec.env_id}: {side} is {bounds}, but {name} needs {num_dims} finite bounds; wrap the "
                f"environment in gymnasium.wrappers.RescaleAction or ClipAction"
            )
    if any(low >= high for low, high in zip(spec.action_low, spec.action_high, strict=True)):
        raise ValueError(
            f"{spec.env_id}: action_low {spec.action_low} is not below action_high {spec.action_high}; remove the "
            "action dimensions that have no choice"
        )


def check_continuous(name: str, spec: EnvSpec) -> None:
    """Refuse, for an algorithm of that name, an environment without bounded continuous actions.

    Raises:
        ValueError: names the space and the remedy.
    """
    if spec.action_kind != "continuous":
        raise ValueError(
            f"{spec.env_id}: action_kind is {spec.action_kind!r}, but {name} needs continuous actions; "
            f"choose an environment with a Box of actions, or algorithm.name "
            f"{'discrete_sac' if spec.action_kind == 'discrete' else 'ppo'}"
        )
    check_bounds(name, spec)
