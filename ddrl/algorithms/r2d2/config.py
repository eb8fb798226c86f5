"""Options of R2D2, recurrent Q-learning from replayed sequences.

Source: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (ICLR). Defaults
are those of its appendix, except for the network, which depends on the observations.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.options import option
from ddrl.algorithms.value_learning.options import Options
from ddrl.types import SequenceShape


class Config(Options):
    """Options of R2D2; an update is one minibatch of sequences."""

    name: ClassVar[str] = "r2d2"
    network_options: ClassVar[tuple[str, ...]] = (*Options.network_options, "recurrent", "recurrent_size")

    recurrent: Literal["lstm", "gru"] = "lstm"
    """The recurrent core. gru has three quarters of the weights and half the state."""
    recurrent_size: PositiveInt = 512
    """Width of the recurrent core. Wider remembers more and costs time in proportion to the square. Usual: 64 to 512.
    """
    hidden_sizes: tuple[PositiveInt, ...] = option(Options, "hidden_sizes", (512,))
    sequence_length: PositiveInt = 80
    """Training steps of a sequence. More carries gradients further back and gives fewer, more alike sequences. Usual:
    20 to 120."""
    overlap: int = Field(40, ge=0)
    """Steps that neighboring sequences share, less than sequence_length. More replays each step in more contexts, but
    stores and sends it more often. Usual: half of sequence_length."""
    burn_in: int = Field(40, ge=0)
    """Steps before the training steps of a sequence that only warm up the recurrent state; the stored one comes from
    older weights. More corrects it better and costs time. Usual: 20 to 40."""
    rescale_values: bool = True
    """Networks learn h(Q), roughly the signed square root of Q, so that rewards need no clipping. Usual: yes, with
    unclipped rewards."""
    loss_reduction: Literal["mean", "sum"] = "sum"
    """The sum or the mean of the loss over a sequence's steps. `sum`, as in SEED RL and Acme, gives gradients
    sequence_length times as large, for which adam_eps=1e-3 and max_grad_norm=40 were chosen; `mean` needs a smaller
    adam_eps."""
    priority_mix: float = Field(0.9, ge=0, le=1)
    """A sequence's priority is this share of its largest error plus the rest of its mean error. More favors single
    large errors. Usual: 0.9."""
    double: bool = option(Options, "double", True)
    dueling: bool = option(Options, "dueling", True)
    learning_rate: float = option(Options, "learning_rate", 1e-4)
    adam_eps: float = option(Options, "adam_eps", 1e-3)
    max_grad_norm: float | None = option(Options, "max_grad_norm", 40.0)
    gamma: float = option(Options, "gamma", 0.997)
    batch_size: PositiveInt = 64
    """Sequences per update. Larger gives less noisy and slower updates. Usual: 64."""
    n_step: PositiveInt = 5
    """Rewards summed before bootstrapping, fewer at the end of a sequence. More carries rewards back faster, but is
    biased towards the older policies that collected them. Usual: 5."""
    prioritized: bool = option(Options, "prioritized", True)
    priority_exponent: float = option(Options, "priority_exponent", 0.9)
    importance_exponent: float = option(Options, "importance_exponent", 0.6)
    final_importance_exponent: float = option(Options, "final_importance_exponent", 0.6)
    target_period: PositiveInt | None = option(Options, "target_period", 2_500)
    epsilon_ladder: bool = option(Options, "epsilon_ladder", True)

    @model_validator(mode="after")
    def _refuse_impossible_sequences(self) -> Config:
        length = self.sequence_length
        if self.overlap >= length:
            raise ValueError(
                f"overlap={self.overlap}: sequences of {length} steps would not advance; use at most {length - 1}, "
                "or raise sequence_length"
            )
        if self.n_step > length:
            raise ValueError(
                f"n_step={self.n_step}: is longer than a sequence of {length} steps; use at most {length}, or raise "
                "sequence_length"
            )
        if self.norm == "batch":
            raise ValueError(
                "norm=batch: its statistics would include padding rows of sequences; use group, layer or none"
            )
        if not self.prioritized:
            self.refuse_changed("without prioritized=true", "priority_mix")
        self.refuse_unused_layers()
        return self

    @property
    def sequences(self) -> SequenceShape:
        """Burn-in, length and overlap of sequences."""
        return SequenceShape(burn_in=self.burn_in, length=self.sequence_length, overlap=self.overlap)

    @property
    def recurrent_state_size(self) -> int:
        """H, numbers in the recurrent state of one environment."""
        return self.recurrent_size * (2 if self.recurrent == "lstm" else 1)

    @property
    def transitions_per_update(self) -> int:
        """Training steps of the sequences of one update, if all are full."""
        return self.batch_size * self.sequence_length
