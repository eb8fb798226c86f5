"""The interface of an algorithm, and how its name in a config finds its modules (see the package's docstring)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ddrl.algorithms.options import AlgorithmConfig
from ddrl.config import ConfigError, ModuleError, RunConfig, load_module, parse
from ddrl.networks.placement import new_layers_on
from ddrl.types import EnvSpec, SequenceShape

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ddrl.networks.ranks import Ranks

RecurrentState = dict[str, np.ndarray]
"""The recurrent state of a policy, a row for each of N environments; {} for policies without one.

`hidden` [N, H] float32 is the policy's; `advance` zeros it at an episode's end. `previous_action` [N] int64 (-1 at an
episode's start) and `previous_reward` [N] float32, in training units, are inputs of the next step, where it has such.
"""

NO_STATE: RecurrentState = {}


class Policy(Protocol):
    """The acting side of an algorithm, on the CPU."""

    @property
    def evaluation_epsilon(self) -> float:
        """Share of random actions in evaluations, which the caller of `act` mixes in."""

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights: CPU tensors or arrays.

        Raises:
            ValueError: they are of another configuration or environment.
        """

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return the recurrent state at the start of an episode; {} for policies without one."""

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the deterministic action: [N, *I] -> [N, *A], in the environment's unit.

        A row depends on its own observation and state only, to the last bit. A recurrent policy updates
        `state["hidden"]` in place.
        """

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Return exploring actions [N, *A] within the bounds, and the extras [N, ...] that the learner needs.

        A recurrent policy updates `state["hidden"]` in place.
        """


class Exportable(Policy, Protocol):
    """A policy that `ddrl export --onnx` can take."""

    def module(self) -> nn.Module:
        """Return what `act` computes, with the weights loaded, on the CPU.

        Its inputs are observations [N, *I] as `trunks.to_input` gives them, and those arrays that `initial_state` has,
        in its order. Its outputs are the actions [N, *A] of continuous ones, or of choices the scores [N, A] of which
        the largest of each dimension is chosen, before the mask; and the new `hidden` of a recurrent one.
        """


class Learner(Protocol):
    """The learning side of an algorithm: networks and optimizers on the learner's device."""

    num_updates: int
    from_policy: bool
    """The run began with a given policy, which the first updates must not spoil; set before the first update."""

    def update(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Learn from tensors: a `Batch` or `Sequences` off-policy, `Trajectories` on-policy.

        `num_updates` grows by the number of optimizer steps.

        Returns:
            Detached scalars by name; reading one waits for the device. With prioritized replay also `priority` [B],
            the absolute TD errors, or the losses.
        """

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return what a Policy needs, as CPU copies."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return everything needed to continue bit for bit, as CPU copies."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned. The current options apply; a state holds none.

        Raises:
            ValueError: the state is from another configuration; nothing is changed.
        """

    def apply_options(self, options: Any) -> None:
        """Apply changed live options from the next update on.

        Raises:
            ValueError: an option differs that is not live; nothing is changed.
        """

    def load_initial_weights(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Load published weights; call before the first update.

        Returns:
            What starts fresh because such weights do not hold it, as one clause for the run's journal.

        Raises:
            ValueError: the weights are of another configuration; nothing is changed.
        """


@dataclass(frozen=True)
class Resolved:
    """An algorithm chosen and configured for one environment.

    Attributes:
        name: of the algorithm.
        config: the algorithm's own options, validated; an `AlgorithmConfig`.
        spec: spaces of the environment.
    """

    name: str
    config: Any
    spec: EnvSpec

    @property
    def on_policy(self) -> bool:
        """See `AlgorithmConfig.on_policy`."""
        return bool(self.config.on_policy)

    @property
    def sequences(self) -> SequenceShape | None:
        """See `AlgorithmConfig.sequences`."""
        return cast("SequenceShape | None", self.config.sequences)

    @property
    def can_start_at_random(self) -> bool:
        """True if the run may begin with random actions."""
        return not self.on_policy and self.sequences is None

    @property
    def context(self) -> int:
        """Most steps of history that a fragment includes: for its first stacks, and sums of rewards or sequences."""
        sums = 0 if self.on_policy else self.config.n_step - 1
        return self.spec.frame_stack - 1 + (self.sequences.context if self.sequences else sums)

    def policy(self, *, producer: int = 0) -> Policy:
        """Return a policy without weights; a collector's exploration may depend on its producer id."""
        made = _module(self.name, "policy").Policy(self.config, self.spec, producer=producer)
        return cast(Policy, _whole(made, Policy, self.name))

    def learner(self, *, device: torch.device, seed: int, ranks: Ranks | None = None) -> Learner:
        """Return a fresh learner; the same seed gives the same initial weights on every device.

        Args:
            device: where networks and batches are.
            seed: of the initial weights and all that is random.
            ranks: that learn together; None: it learns alone.
        """
        place = {"device": device, "seed": seed} | ({} if ranks is None else {"ranks": ranks})
        made = _module(self.name, "learner").make_learner(self.config, self.spec, **place)
        return cast(Learner, _whole(made, Learner, self.name))


def initial_state(num_envs: int, size: int) -> RecurrentState:
    """Return the recurrent state at the start of `num_envs` episodes, with H = `size`."""
    return {
        "hidden": np.zeros((num_envs, size), np.float32),
        "previous_action": np.full(num_envs, -1, np.int64),
        "previous_reward": np.zeros(num_envs, np.float32),
    }


def check_state(state: RecurrentState, num_envs: int, size: int) -> None:
    """Refuse the lack of a recurrent state, or one of another shape than `num_envs` environments need, H = `size`.

    Raises:
        ValueError: names the remedy.
    """
    if not state:
        raise ValueError(
            "state: a recurrent policy needs one; pass what initial_state(num_envs) returned, and update it after "
            "each step by ddrl.algorithms.base.advance"
        )
    if state["hidden"].shape != (num_envs, size):
        raise ValueError(
            f"state: hidden has shape {state['hidden'].shape}, but {num_envs} observations need {(num_envs, size)}; "
            f"make it by initial_state({num_envs})"
        )


def advance(state: RecurrentState, action: np.ndarray, reward: np.ndarray, ended: np.ndarray) -> None:
    """Update a recurrent state in place after a step; rows whose episode ended start anew. {} stays {}.

    Args:
        state: of N environments.
        action: [N] taken.
        reward: [N], in training units.
        ended: [N] bool.
    """
    if state:
        state["hidden"][ended] = 0.0
    if "previous_action" in state:
        state["previous_action"][:] = np.where(ended, -1, action)
        state["previous_reward"][:] = np.where(ended, 0.0, reward)


def best_choices(scores: np.ndarray, sections: np.ndarray) -> np.ndarray:
    """Return the choice of the largest score in each of D dimensions.

    Args:
        scores: [N, A], dimension after dimension.
        sections: [D - 1] where the scores of each dimension but the first begin.

    Returns:
        [N, D] int64.
    """
    parts = np.split(scores, sections, axis=1) if len(sections) else [scores]
    return np.stack([part.argmax(axis=1) for part in parts], axis=1)


def random_choices(spec: EnvSpec, seen: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return discrete actions [N, *A], uniform over those allowed where the policy sees [N, *I]."""
    shape = (len(seen), *spec.action_shape)
    if not spec.has_mask:
        return generator.integers(np.reshape(spec.action_sizes, spec.action_shape), size=shape)
    scores = generator.random((len(seen), sum(spec.action_sizes)), np.float32)
    sections = np.cumsum(spec.action_sizes)[:-1]
    return best_choices(spec.only_allowed(scores, seen), sections).reshape(shape)


def check_shapes(given: Mapping[str, Any], expected: Mapping[str, Sequence[int]], *, source: str) -> None:
    """Compare arrays or tensors with the shapes that are expected by name.

    Raises:
        ValueError: one is missing, unknown or of another shape in the source, such as "weights".
    """
    for name in sorted(expected.keys() | given.keys()):
        found = tuple(given[name].shape) if name in given else None
        wanted = tuple(expected[name]) if name in expected else None
        if found != wanted:
            raise ValueError(
                f"{name}: shape {found} in the {source}, {wanted} here; use the configuration and the environment "
                "that wrote it"
            )


def names() -> list[str]:
    """Return the algorithms that a config may name: the folders beside this file that have a config."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.py"))


def is_custom(name: str) -> bool:
    """Return whether an algorithm's name is that of a module of the user's, such as my_pkg.mine."""
    return "." in name


def config_class(name: str) -> type[AlgorithmConfig]:
    """Return the options class of an algorithm.

    Raises:
        ConfigError: there is no such algorithm, or the user's module cannot be loaded or is none.
    """
    if not is_custom(name) and name not in names():
        raise ConfigError(
            f"algorithm.name: {name!r} is unknown; known are {', '.join(names())}, or a module such as my_pkg.mine"
        )
    try:
        module = _module(name, "config")
        found = getattr(module, "Config", None)
        if not (isinstance(found, type) and issubclass(found, AlgorithmConfig)):
            raise ModuleError(
                f"{name}: has no class Config of {AlgorithmConfig.__module__}.AlgorithmConfig; add it"
            )
        for part in ("Policy", "make_learner") if is_custom(name) else ():
            if not callable(getattr(module, part, None)):
                raise ModuleError(f"{name}: has no {part}; add it as the guide shows")
        lacks = sorted(found.__abstractmethods__)
        if not (found.on_policy or "n_step" in found.model_fields or hasattr(found, "n_step")):
            lacks.append("n_step")
        if is_custom(name) and lacks:
            raise ModuleError(f"{name}: its Config has no {lacks[0]}; add it as the guide shows")
    except ModuleError as error:
        raise ConfigError(f"algorithm.name: {error}") from None
    return found


def resolve(config: RunConfig, spec: EnvSpec) -> Resolved:
    """Validate the algorithm's part of a config against its environment, and return the configured algorithm.

    Raises:
        ConfigError: an unknown algorithm or option, a value that cannot be used, or an unsuitable environment.
    """
    options = dict(config.algorithm)
    name = options.pop("name")
    own = parse(config_class(name), options, prefix="algorithm.")
    try:
        with new_layers_on("meta"):
            own.check(spec)
            own = own.fitted(spec)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if (num := config.learner.num_learners) > 1 and own.learns_alone:
        raise ConfigError(f"learner.num_learners: {num}, but {name} as it is configured learns alone; use 1")
    return Resolved(name, own, spec)


def _module(name: str, part: str) -> Any:
    if is_custom(name):  # all parts are in one
        return load_module(f"{name}:{part}")
    return importlib.import_module(f"ddrl.algorithms.{name}.{part}")


def _whole(made: Any, protocol: type, name: str) -> Any:
    """Return what an algorithm has made.

    Raises:
        ConfigError: it lacks a part of the protocol.
    """
    for part in sorted({*vars(protocol), *protocol.__annotations__}):
        if not part.startswith("_") and not hasattr(made, part):
            kind = type(made).__name__
            raise ConfigError(f"algorithm.name: {name}: its {kind} has no {part}; add it as the guide shows")
    return made
