"""What learners share to go on with other options: which ones may differ, and how optimizers take them over."""

from __future__ import annotations

from typing import TypeVar

import torch
from pydantic import BaseModel

from ddrl.config import live_options

AnyConfig = TypeVar("AnyConfig", bound=BaseModel)


def adopted(old: AnyConfig, new: AnyConfig) -> AnyConfig:
    """The options to go on with: `new`.

    Raises:
        ValueError: an option differs that cannot change while a learner learns.
    """
    live = live_options(type(new))
    was, is_now = old.model_dump(by_alias=True), new.model_dump(by_alias=True)
    fixed = sorted(name for name in is_now if was[name] != is_now[name] and name not in live)
    if fixed:
        name = fixed[0]
        raise ValueError(
            f"algorithm.{name}: {was[name]} cannot become {is_now[name]} while the run goes on; submit another run"
        )
    return new


def retune(optimizer: torch.optim.Optimizer, **settings: float) -> None:
    """Give the parameters of an optimizer other settings, such as `lr`, from its next step on."""
    for group in optimizer.param_groups:
        group.update(settings)
