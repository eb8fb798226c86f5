"""R2D2, recurrent Q-learning from replayed sequences: its options, what it can serve, the Policy that plays.

Source: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (ICLR); defaults
are those of its appendix but for the network, which goes by the observations. What learns is in r2d2_learner.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms import q_learning
from ddrl.algorithms.r2d2_policy import Policy
from ddrl.config import LIVE
from ddrl.types import EnvSpec, SequenceShape

__all__ = ["ON_POLICY", "Config", "Policy", "check"]

ON_POLICY = False


class Config(q_learning.Options):
    """Options of R2D2; an update is one minibatch of sequences."""

    recurrent: Literal["lstm", "gru"] = Field(
        "lstm", description="The recurrent core. gru has three quarters of the weights and half the state."
    )
    recurrent_size: PositiveInt = Field(
        512,
        description="Its width. Wider remembers more and costs time in proportion to the square. Usual: 64 to 512.",
    )
    hidden_sizes: tuple[PositiveInt, ...] = Field(
        (512,),
        min_length=1,
        description="Widths of the dense layers: the last one follows the recurrent core (with dueling, in each "
        "stream), those before it lead there. Usual: (512,) after convolutions, (64, 64) to (256, 256) for vectors.",
    )
    sequence_length: PositiveInt = Field(
        80,
        description="Training steps of a sequence. More carries gradients further back and gives fewer, more alike "
        "sequences. Usual: 20 to 120.",
    )
    overlap: int = Field(
        40,
        ge=0,
        description="Steps that neighboring sequences share, less than sequence_length. More replays each step in more "
        "contexts, but stores and sends it more often. Usual: half of sequence_length.",
    )
    burn_in: int = Field(
        40,
        ge=0,
        description="Steps before a sequence that only warm the recurrent state up, for the stored one is that of "
        "older weights. More repairs it better and costs time. Usual: 20 to 40.",
    )
    rescale_values: bool = Field(
        True,
        description="Networks learn h(Q), about the root of Q, so that rewards of any size do without clipping. Usual: "
        "yes, with rewards as they are.",
    )
    loss_reduction: Literal["mean", "sum"] = Field(
        "sum",
        description="Over the steps of a sequence. `sum`, as in SEED RL and Acme, gives gradients sequence_length "
        "times as long, for which adam_eps=1e-3 and max_grad_norm=40 were chosen; `mean` needs a smaller adam_eps.",
    )
    priority_mix: float = Field(
        0.9,
        ge=0,
        le=1,
        description="A sequence's priority is this share of its largest error and the rest of its mean one. More lets "
        "single surprises through. Usual: 0.9.",
    )
    double: bool = Field(
        True,
        description="The online network picks the next action that the target network values: less overestimation. "
        "Usual: yes.",
    )
    dueling: bool = Field(True, description="Two streams, Q = V + A - mean A. Usual: yes.")
    learning_rate: float = Field(
        1e-4,
        gt=0,
        description="Step size of the optimizer. Larger is faster until values diverge. Usual: 1e-4; vectors to 1e-3.",
        json_schema_extra=LIVE,
    )
    adam_eps: float = Field(
        1e-3,
        gt=0,
        description="Added to the root of Adam's second moment. More damps the steps of parameters with small "
        "gradients, which steadies sparse rewards. Usual: 1e-3; vectors 1e-5 to 1e-8.",
        json_schema_extra=LIVE,
    )
    max_grad_norm: float | None = Field(
        40.0,
        gt=0,
        description="The gradient is scaled down to this norm: less bounds rare large errors harder. None: never. "
        "Usual: 40.",
        json_schema_extra=LIVE,
    )
    gamma: float = Field(
        0.997,
        ge=0,
        le=1,
        description="Discount per agent step; the horizon is about 1 / (1 - gamma). Larger sees further and learns "
        "more slowly. Usual: 0.99 to 0.997.",
    )
    n_step: PositiveInt = Field(
        5,
        description="Rewards summed before bootstrapping; fewer towards a sequence's end. More carries rewards back "
        "faster, but is biased towards the older policies that played them. Usual: 5.",
    )
    batch_size: PositiveInt = Field(
        64,
        description="Sequences per update. Larger gives less noisy and slower updates. Usual: 32 to 128.",
    )
    prioritized: bool = Field(
        True,
        description="Replay what surprises more often, instead of everything alike; costs little beside an update.",
    )
    priority_exponent: float = Field(
        0.9,
        ge=0,
        le=1,
        description="Probability goes by surprise to this power: more replays the surprising harder, 0 everything "
        "alike. Usual: 0.9.",
    )
    importance_exponent: float = Field(
        0.6,
        ge=0,
        le=1,
        description="How much of the bias of prioritized draws the weights take back at first: 0 nothing, 1 all, at "
        "smaller steps. Usual: 0.6.",
        json_schema_extra=LIVE,
    )
    final_importance_exponent: float = Field(
        0.6,
        ge=0,
        le=1,
        description="Where importance_exponent goes linearly. Usual: 0.6, from the start.",
        json_schema_extra=LIVE,
    )
    target_period: PositiveInt | None = Field(
        2_500,
        description="Updates between two copies of the network to its target. More is stabler and slower. None with "
        "target_rate, which is the other way. Usual: 2,500; vectors 100 to 1,000.",
        json_schema_extra=LIVE,
    )
    epsilon_ladder: bool = Field(
        True,
        description="Each environment keeps an epsilon of its own, from ladder_base down to ladder_base^(1 + "
        "ladder_exponent), so that a fleet of any size explores in all degrees at any time; false for a schedule.",
    )

    @model_validator(mode="after")
    def _refuse_impossible_sequences(self) -> Config:
        length = self.sequence_length
        if self.overlap >= length:
            raise ValueError(
                f"overlap={self.overlap}: leaves nothing new in sequences of {length} steps; use at most {length - 1}, "
                "or raise sequence_length"
            )
        if self.n_step > length:
            raise ValueError(
                f"n_step={self.n_step}: is longer than a sequence of {length} steps; use at most {length}, or raise "
                "sequence_length"
            )
        if self.norm == "batch":
            raise ValueError(
                "norm=batch: would take the statistics of rows that only fill sequences up; use group or none"
            )
        if not self.prioritized:
            self.refuse_changed(["priority_mix"], "without prioritized=true")
        self.refuse_layers_of_ones_own()
        return self

    @property
    def sequences(self) -> SequenceShape:
        """How episodes are cut."""
        return SequenceShape(burn_in=self.burn_in, length=self.sequence_length, overlap=self.overlap)

    @property
    def memory_size(self) -> int:
        """H, numbers of the recurrent state of one environment."""
        return self.recurrent_size * (2 if self.recurrent == "lstm" else 1)

    @property
    def transitions_per_update(self) -> int:
        """What an update counts for in `replay.samples_per_insert`: the training steps of full sequences."""
        return self.batch_size * self.sequence_length

    def network_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `QNetwork` that the options decide."""
        return super().network_arguments() | {
            "recurrent": self.recurrent,
            "recurrent_size": self.recurrent_size,
        }


def check(config: Config, spec: EnvSpec) -> None:
    """Refuse an environment, or a network, that R2D2 cannot serve.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    q_learning.check(config, spec, name="r2d2")
