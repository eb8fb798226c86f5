"""The learner of an on-policy actor-critic; the loss and the steps of an iteration are the algorithm's.

An iteration learns from one batch of trajectories: values and log probabilities under the initial weights, targets
from them, then gradient steps. The statistics of observations and returns are constant within an iteration; those of
observations are published with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ddrl import returns
from ddrl.algorithms.actor_critic.options import OBSERVATION_CLIP, Options, num_policy_parameters
from ddrl.algorithms.optim import begin_anew, cpu_copies, optimizer_state, restore
from ddrl.algorithms.options import changed
from ddrl.networks.actor_critic import ActorCritic
from ddrl.networks.captured import Captured
from ddrl.networks.device import send
from ddrl.networks.distributions import categorical, gaussian
from ddrl.networks.parameters import FlatParameters
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.networks.trunks import to_input
from ddrl.types import EnvSpec, Trajectories

AnyOptions = TypeVar("AnyOptions", bound=Options)
Steps = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_INITIAL_COUNT = 100_000.0  # observations that published statistics count as; their number is not published
_RETURN_RATE = 0.1  # share of an iteration's returns in the running statistics of returns
_LEAST_STD = 1e-4
_SETTLED, _FARTHEST = 1_000, 100.0  # observations, and deviations of these within which later ones count


@dataclass(frozen=True)
class Prepared:
    """The M transitions of a batch with the inputs of the losses, without gradient.

    Attributes:
        observation: [M, *O], normalized; uint8 stays uint8.
        action: [M, *A], as drawn by the policy.
        behavior_log_prob: [M] under the policy that acted.
        log_prob: [M] under the policy before the iteration.
        value: [M] under the critic before the iteration, in units of the critic.
        advantage: [M] in units of the critic, so that policy gradients do not grow with the size of rewards.
        return_: [M] the critic's target, in units of the critic.
        length: [S] int64 on the CPU, transitions of each sequence, which lie one after another; of recurrent networks
            only, as `recurrent_state`, [S, H] before each.
    """

    observation: Tensor
    action: Tensor
    behavior_log_prob: Tensor
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    return_: Tensor
    length: Tensor | None = None
    recurrent_state: Tensor | None = None

    def __len__(self) -> int:
        """M."""
        return len(self.action)

    def first(self) -> Prepared:
        """Return the first transition, or sequence of them, alone."""
        num = 1 if self.length is None else int(self.length[0])
        of_sequences = ("length", "recurrent_state")
        columns = {name: column for name, column in vars(self).items() if column is not None}
        return Prepared(**{name: x[: 1 if name in of_sequences else num] for name, x in columns.items()})

    def minibatches(self, num: int, generator: torch.Generator) -> Iterator[Prepared]:
        """Yield the transitions in random order in `num` parts of about equal size; in fewer if sequences are few.

        Args:
            num: at least 1.
            generator: on the CPU.
        """
        device = self.action.device
        columns = dict(vars(self))
        length, state = columns.pop("length"), columns.pop("recurrent_state")
        if length is None:
            order = torch.randperm(len(self), generator=generator).to(device)
            parts = {name: column[order].tensor_split(num) for name, column in columns.items()}
            for i in range(num):
                yield Prepared(**{name: of_all[i] for name, of_all in parts.items()})
            return
        order = torch.randperm(len(length), generator=generator)
        last = torch.searchsorted(length[order].cumsum(0), torch.arange(1, num) * len(self) // num)
        first = length.cumsum(0) - length
        for part in order.tensor_split(torch.unique_consecutive(last[last < len(order) - 1] + 1)):
            own = length[part]
            index = torch.arange(int(own.sum())) + (first[part] - own.cumsum(0) + own).repeat_interleave(own)
            index, part = send(index, device), send(part, device)
            chosen = {name: column[index] for name, column in columns.items()}
            yield Prepared(**chosen, length=own, recurrent_state=state[part])


def targets(
    estimator: str, steps: Steps, log_rho: Tensor, *, lambda_: float, rho_bar: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns by the name of an estimator.

    Args:
        estimator: see `ppo.config.Config`.
        steps: reward, discount, value, next_value and continues, each [T, B] as `ddrl.returns` describes them.
        log_rho: [T, B], used by V-trace and UPGO.
        lambda_: used by all but Monte Carlo.
        rho_bar: used by V-trace and UPGO.
    """
    reward, discount, value, next_value, continues = steps
    if estimator == "gae":
        return returns.gae(*steps, lambda_=lambda_)
    if estimator in ("vtrace", "upgo"):
        advantage, return_ = returns.vtrace(
            *steps, log_rho, lambda_=lambda_, rho_bar=rho_bar, pg_rho_bar=rho_bar
        )
        if estimator == "upgo":  # its values are AlphaStar's TD(lambda), which V-trace's equal on fresh data
            advantage = returns.upgo(*steps, log_rho)[0]
        return advantage, return_
    if estimator == "monte_carlo":
        return_ = returns.monte_carlo(reward, discount, next_value, continues)
    else:
        return_ = returns.td_lambda(reward, discount, next_value, continues, lambda_=lambda_)
    return return_ - value, return_


class ActorCriticLearner(Generic[AnyOptions]):
    """Network, optimizer, statistics and random state; see `base.Learner`.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where the network and batches are.
        seed: of the initial weights, which are the same on every device, and of the order of minibatches.
        make_optimizer: of the vector of parameters.
        update: the algorithm: takes this learner and a batch of tensors, does its steps, returns detached metrics.
        loss: of this learner on a minibatch for `learn`, with numbers and flags by name.
        ranks: that learn together.

    Attributes:
        num_steps: transitions learned from.
        generator: on the CPU, so that every device shuffles alike.
        parameters: of the network, with their gradient.
    """

    def __init__(
        self,
        config: AnyOptions,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        make_optimizer: Callable[[Tensor], torch.optim.Optimizer],
        update: Callable[[ActorCriticLearner[AnyOptions], Trajectories], dict[str, Tensor]],
        loss: Callable[..., Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.num_updates = self.num_steps = 0
        self.from_policy = False
        self._is_observed = False  # `prepare` has added the batch to the statistics
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.ranks = device, ranks
        self.config = config
        self._spec, self._update, self._loss = spec, update, loss
        self._is_continuous = spec.action_kind == "continuous"
        num_outputs, generator = num_policy_parameters(spec), torch.Generator().manual_seed(seed)
        self.network = ActorCritic(
            config.network,
            partial(config.make_trunk, spec, generator),
            num_outputs=num_outputs,
            shared=config.shared,
            recurrent=config.recurrent,
            recurrent_size=config.recurrent_size,
            log_std_dims=num_outputs if self._is_continuous else 0,
            initial_log_std=config.initial_log_std,
            generator=generator,
        ).to(device)
        self.parameters = FlatParameters(self.network, ranks)
        self._optimizer = make_optimizer(self.parameters.vector)
        self._captured = Captured(self._learn, device, ranks=ranks)
        shape = spec.input_shape if config.normalize_observations else (0,)
        self._statistics = {
            "observation_count": torch.zeros((), dtype=torch.float64),
            "observation_mean": torch.zeros(shape, dtype=torch.float64),
            "observation_variance": torch.ones(shape, dtype=torch.float64),
            "return_count": torch.zeros((), dtype=torch.float64),
            "return_mean": torch.zeros((), dtype=torch.float64),
            "return_variance": torch.ones((), dtype=torch.float64),
        }

    def update(self, batch: Trajectories) -> dict[str, Tensor]:
        """Do one iteration on a batch of tensors; return the algorithm's metrics."""
        return self._update(self, batch)

    def scheduled(self, name: str) -> float:
        """Return an option's present value, which goes linearly to final_<name> within anneal_steps."""
        first: float = getattr(self.config, name)
        final: float | None = getattr(self.config, f"final_{name}")
        if final is None or self.config.anneal_steps is None:
            return first
        return first + (final - first) * min(1.0, self.num_steps / self.config.anneal_steps)

    @torch.no_grad()
    def prepare(
        self, batch: Trajectories, *, estimator: str, rho_bar: float = 1.0, reward_clip: float | None = None
    ) -> Prepared:
        """Return a batch with values, log probabilities and targets; update the statistics of returns.

        Args:
            batch: tensors on the device.
            estimator: see `targets`.
            rho_bar: cap of V-trace's rho in targets and advantages; with upgo, in the value targets only.
            reward_clip: rewards are clipped to +- this; None: not at all.
        """
        config = self.config
        if config.normalize_observations and self._statistics["observation_count"] == 0:
            self.observe(batch)  # an untrained policy hardly depends on them
            self._is_observed = True
        observation = self.normalized(batch.observation)
        place = batch.valid.reshape(-1).nonzero().squeeze(1) if batch.place is None else batch.place  # [M]
        row, action = batch.row.reshape(-1)[place], batch.action.reshape(-1, *batch.action.shape[2:])[place]
        parameters, value, next_value = self._values(batch, observation, place, row)
        mean, std = self.return_scale
        log_prob, _ = self.log_prob(parameters, action)
        is_first = config.normalize_returns and self._statistics["return_count"] == 0
        # Before the first returns the critic's outputs have no unit and count as 0.
        values = [torch.zeros_like(one) if is_first else one * std + mean for one in (value, next_value)]
        behavior_log_prob = batch.behavior_log_prob.reshape(-1)[place]

        def lanes(column: Tensor) -> Tensor:
            """[M] -> [T, B], 0 in padding."""
            return column.new_zeros(batch.row.numel()).index_copy_(0, place, column).view(batch.row.shape)

        reward = batch.reward if reward_clip is None else batch.reward.clamp(-reward_clip, reward_clip)
        here, following = map(lanes, values)
        # The same value where a recurrent state was sent anew amid an episode.
        following = here.roll(-1, 0).where(batch.continues, following)
        steps = (reward, batch.discount, here, following, batch.continues)
        log_rho = lanes(log_prob - behavior_log_prob)
        advantage, return_ = targets(estimator, steps, log_rho, lambda_=config.lambda_, rho_bar=rho_bar)
        return_ = return_.reshape(-1)[place]
        if config.normalize_returns:
            self._rescale(return_)
            mean, std = self.return_scale
            value = value if is_first else (values[0] - mean) / std
        return Prepared(
            observation=observation[row],
            action=action,
            behavior_log_prob=behavior_log_prob,
            log_prob=log_prob,
            value=value,
            advantage=advantage.reshape(-1)[place] / std,
            return_=(return_ - mean) / std,
            length=batch.length,
            recurrent_state=batch.recurrent_state,
        )

    def _values(
        self, batch: Trajectories, observation: Tensor, place: Tensor, row: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return policy parameters [M, P], values [M] and next values [M] of the transitions at [M] places.

        Args:
            batch: of them.
            observation: [R, *O], normalized.
            place: t * B + b of each.
            row: of each in `observation`.
        """
        next_row = batch.next_row.reshape(-1)[place]
        if batch.length is None:
            parameters, value = self._forward(observation)  # [R, P], [R]
            return parameters[row], value[row], value[next_row]
        # Each sequence gets one more row, the observation after its last transition.
        length = batch.length + 1
        is_step = torch.ones(int(length.sum()), dtype=torch.bool)
        is_step[length.cumsum(0) - 1] = False
        step = send(is_step.nonzero().squeeze(1), self.device)  # [M]
        rows = row.new_zeros(len(is_step))
        rows[step + 1] = next_row  # all but each sequence's last are those of the next transition
        rows[step] = row
        parameters, value = self._forward(observation[rows], batch.recurrent_state, length)
        return parameters[step], value[step], value[step + 1]

    def minibatches(self, prepared: Prepared, num: int) -> Iterator[Prepared]:
        """Return a shuffled batch in `num` parts; of several ranks, its part of every minibatch."""
        return self.ranks.each(prepared.minibatches(num, self.generator), prepared.first(), num)

    def evaluate(self, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """Return log probability, entropy and value, each [B], of transitions under the present network."""
        parameters, value = self._forward(prepared.observation, prepared.recurrent_state, prepared.length)
        log_prob, entropy = self.log_prob(parameters, prepared.action)
        return log_prob, entropy, value

    def _forward(
        self, observation: Tensor, state: Tensor | None = None, length: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return policy parameters [B, P], of choices the allowed ones, and values [B] of normalized observations.

        See `ActorCritic.forward` for the recurrent state and lengths of sequences.
        """
        parameters, value = self.network(to_input(observation), state, length)
        return self._spec.only_allowed(parameters, observation), value

    def log_prob(self, parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log probability and entropy, each [B], of actions [B, *A] under policy parameters [B, P]."""
        if self._is_continuous:
            return gaussian(parameters, self.network.log_std, action.reshape(parameters.shape))
        return categorical(parameters, action, self._spec.action_sizes)

    def learn(self, part: Prepared, *, learning_rate: float, has_bonus: bool, **numbers: float) -> None:
        """Take one optimizer step on the loss of a minibatch."""
        numbers["learning_rate"] = learning_rate
        self._captured(part, numbers=numbers, has_bonus=has_bonus, **self._phase)
        self.num_updates += 1

    def _learn(
        self, part: Prepared, *, learning_rate: float, warms_up: bool, begins: bool, **others: Any
    ) -> dict[str, Tensor]:
        """Do the part of `learn` that can be captured."""
        assert self._loss is not None
        loss = self._loss(self, part, **others)
        self._step(loss, learning_rate, warms_up=warms_up, begins=begins)
        return {}

    def step(self, loss: Tensor, *, learning_rate: float) -> None:
        """Take one optimizer step on a scalar loss."""
        self._step(loss, learning_rate, **self._phase)
        self.num_updates += 1

    @property
    def _phase(self) -> dict[str, bool]:
        """Flags of the next step: the critic warms up beside a given policy; its updates or the policy's begin."""
        warmup = self.config.critic_warmup_updates if self.from_policy else 0
        return {
            "warms_up": self.num_updates < warmup,
            "begins": warmup > 0 and self.num_updates in (0, warmup),
        }

    def _step(self, loss: Tensor, learning_rate: float, *, warms_up: bool, begins: bool) -> None:
        """Take one optimizer step; of the critic only, while it warms up."""
        self.parameters.differentiate(loss)
        if begins:  # a branch brings the optimizer of its checkpoint
            begin_anew(self._optimizer, self.parameters.vector)
        if warms_up:
            self.parameters.keep_gradient("critic.", "value_head.")
        if self.config.max_grad_norm is not None:
            self.parameters.clip_gradient(self.config.max_grad_norm)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()

    def finish(self, batch: Trajectories, num_steps: int) -> None:
        """End an iteration: count its transitions, and add its observations to the statistics."""
        self.ranks.settle()
        if not self._is_observed:
            self.observe(batch)
        self._is_observed = False
        self.num_steps += self.ranks.count(num_steps)

    @torch.no_grad()
    def observe(self, batch: Trajectories) -> None:
        """Add a batch's observations to the statistics, in which all observations have the same weight.

        Values far from those of many before count as less far, so that a few cannot make the others all alike.
        Source: Chan, Golub, LeVeque 1979, the parallel update of mean and variance.
        """
        if not self.config.normalize_observations:
            return
        seen, old = batch.observation.to("cpu", torch.float64), self._statistics
        count = float(old["observation_count"])
        if count >= _SETTLED:
            far = _FARTHEST * old["observation_variance"].sqrt()
            far[far == 0] = torch.inf  # what was constant may begin to vary
            seen = seen.clamp(old["observation_mean"] - far, old["observation_mean"] + far)
        num, mean, variance = self._moments(seen)
        total = count + num
        difference = mean - old["observation_mean"]
        old["observation_variance"].copy_(
            (old["observation_variance"] * count + variance * num) / total
            + difference.square() * (count * num / total**2)
        )
        old["observation_mean"] += difference * (num / total)
        old["observation_count"].fill_(total)

    def _moments(self, rows: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the number, mean and variance of rows [N, ...], on the CPU in float64, of all ranks together."""
        if self.ranks.size == 1:
            return len(rows), rows.mean(dim=0), rows.var(dim=0, correction=0)
        num = int(self.ranks.add(torch.tensor(len(rows) if self.ranks.share else 0)))
        return num, *self._mean_and_variance(rows, num)

    def _mean_and_variance(self, rows: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of rows [N, ...] in float64 and those of the other ranks, `num` in all."""
        sums = torch.stack((rows.sum(dim=0), rows.square().sum(dim=0)))
        mean, square = self.ranks.add(sums if self.ranks.share else sums.zero_()).div_(num).unbind()
        return mean, (square - mean.square()).clamp(min=0.0)  # what is constant may come out below 0

    def standardized(self, values: Tensor) -> Tensor:
        """Return [B] less their mean over the minibatch, divided by their deviation; a single one as it is."""
        if self.ranks.count(len(values)) == 1:
            return values
        if self.ranks.size == 1:
            std, mean = torch.std_mean(values)
            return (values - mean) / (std + 1e-8)
        num = self.ranks.total
        mean, variance = self._mean_and_variance(values.double(), num)
        std = (variance * num / (num - 1)).sqrt()
        return (values - mean.to(values)) / (std.to(values) + 1e-8)

    def normalized(self, observation: Tensor) -> Tensor:
        """Return [R, *O] in running deviations from the running mean, clipped, if configured."""
        if not self.config.normalize_observations:
            return observation
        mean, std = (part.to(self.device) for part in self._observation_scale())
        return ((observation.float() - mean) / std).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)

    def _observation_scale(self) -> tuple[Tensor, Tensor]:
        mean, variance = (self._statistics[f"observation_{name}"].float() for name in ("mean", "variance"))
        std = variance.sqrt().clamp(min=_LEAST_STD)
        if num := self._spec.num_masked:  # a mask stays as it is
            mean[-num:], std[-num:] = 0.0, 1.0
        return mean, std

    @property
    def return_scale(self) -> tuple[float, float]:
        """Mean and deviation that define the critic's unit, in reward units."""
        variance = float(self._statistics["return_variance"])
        return float(self._statistics["return_mean"]), max(variance**0.5, _LEAST_STD)

    def _rescale(self, return_: Tensor) -> None:
        """Update the statistics of returns, and the critic's head so that its predictions do not change.

        The first returns only define the unit of the untrained critic's outputs, whatever the size of rewards.
        Source: van Hasselt et al. 2016, arXiv:1602.07714 (Pop-Art), equations 5 to 7.
        """
        old_mean, old_std = self.return_scale
        count = float(self._statistics["return_count"])
        rate = max(_RETURN_RATE, 1.0 / (count + 1.0))
        sample = return_.to("cpu", torch.float64)  # the difference of two squares would lose float32's digits
        moments = torch.stack((sample.mean(), sample.square().mean()))
        sample_mean, sample_square = self.ranks.mean(moments).tolist()
        mean = (1 - rate) * old_mean + rate * sample_mean
        square = (1 - rate) * (old_std**2 + old_mean**2) + rate * sample_square
        variance = max(square - mean**2, _LEAST_STD**2)
        for name, value in (("count", count + 1.0), ("mean", mean), ("variance", variance)):
            self._statistics[f"return_{name}"].fill_(value)
        mean, std = self.return_scale
        if count:
            head = self.network.value_head
            head.weight.mul_(old_std / std)
            head.bias.mul_(old_std).add_(old_mean - mean).div_(std)

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's parameters, and the statistics of observations if used, as CPU copies."""
        published = dict(self.network.policy_state())
        if self.config.normalize_observations:
            published["observation_mean"], published["observation_std"] = self._observation_scale()
        return cpu_copies(published)

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue, as CPU copies."""
        counts = {"num_updates": torch.tensor(self.num_updates), "num_steps": torch.tensor(self.num_steps)}
        return cpu_copies(self._tensors()) | counts | {"generator": self.generator.get_state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        scalar = torch.Size(())
        restore(self._tensors(), state, {"generator": self.generator}, num_updates=scalar, num_steps=scalar)
        self.num_updates, self.num_steps = int(state["num_updates"]), int(state["num_steps"])

    def apply_options(self, options: AnyOptions) -> None:
        """Apply changed live options from the next update on; each `step` sets the learning rate of its time."""
        self.config = changed(self.config, options)
        self._captured.forget()

    def load_initial_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Start from a published actor and its statistics of observations; return what starts fresh."""
        normalized = self.config.normalize_observations
        scale = ("observation_mean", "observation_std") if normalized else ()
        shape = self._statistics["observation_mean"].shape
        restore(self.network.policy_state(), weights, **dict.fromkeys(scale, shape))
        if normalized:
            self._statistics["observation_count"].fill_(_INITIAL_COUNT)
            self._statistics["observation_mean"].copy_(weights["observation_mean"])
            self._statistics["observation_variance"].copy_(weights["observation_std"].double().square())
        critic = "the critic's head" if self.network.shared else "the critic"
        return f"{critic} and the optimizer start fresh"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that updates change, by name; not copied."""
        named = {"network": self.parameters.vector, **self._statistics}
        named |= {f"buffer.{name}": buffer for name, buffer in self.network.named_buffers()}
        return named | optimizer_state("optimizer", self._optimizer, self.parameters.vector)
