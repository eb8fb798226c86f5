"""A run's configuration: load YAML, override, validate, explain.

The sections are in `ddrl.sections`. The algorithm's part stays a plain mapping here; `algorithms.base.resolve`
validates it.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from ddrl.sections import (
    LIVE,
    AtariConfig,
    Duration,
    EnvConfig,
    EvaluationConfig,
    LearnerConfig,
    OnPolicyConfig,
    ReplayConfig,
    RolloutConfig,
    Section,
    StopConfig,
    WeightsConfig,
    parse_duration,
)

__all__ = [
    "LIVE",
    "AtariConfig",
    "ConfigError",
    "Duration",
    "EnvConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "OnPolicyConfig",
    "ReplayConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "StopConfig",
    "WeightsConfig",
    "duration",
    "live_options",
    "load",
    "parse",
    "parse_duration",
    "validate",
]


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, its value and the remedy, in one line."""


M = TypeVar("M", bound=BaseModel)


class RunConfig(Section):
    """One run, resolved: what `ddrl submit` stores and every process reads."""

    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$", description="First part of the run's id.")
    seed: int = Field(1, ge=0, lt=2**31, description="Seed of networks, draws, environments and exploration.")
    weight: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Share of the fleet's time among runs of one priority that want it; 2 gets twice what 1 gets.",
        json_schema_extra=LIVE,
    )
    priority: Literal["low", "normal", "high"] = Field(
        "normal",
        description="Runs of a higher priority take processes first, and from lower ones; weights share what is left.",
        json_schema_extra=LIVE,
    )
    env: EnvConfig
    algorithm: dict[str, Any] = Field(
        description="name: dqn, impala, ppo, r2d2 or sac, and that algorithm's own options."
    )
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig = ReplayConfig()
    on_policy: OnPolicyConfig = OnPolicyConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    stop: StopConfig = StopConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not isinstance(self.algorithm.get("name"), str):
            raise ValueError("algorithm.name: missing; name the algorithm, such as sac or ppo")
        if self.replay.warmup_steps > self.replay.capacity:
            raise ValueError(
                f"replay.warmup_steps: {self.replay.warmup_steps} is more than replay.capacity "
                f"{self.replay.capacity}; learning would never start: lower it or raise the capacity"
            )
        if self.rollout.fragment_s > self.rollout.segment_s:
            raise ValueError(
                f"rollout.fragment_s: {self.rollout.fragment_s:g} is longer than rollout.segment_s "
                f"{self.rollout.segment_s:g}; use at most {self.rollout.segment_s:g}"
            )
        return self


def duration(text: str, option: str) -> float:
    """Seconds from a command line's option.

    Raises:
        ConfigError: it is none.
    """
    value = parse_duration(text)
    if not isinstance(value, float) or value <= 0:
        raise ConfigError(f"{option}: {text!r} is no duration; use 90s, 15m or 2h")
    return value


def load(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply `a.b=c` overrides (values are YAML).

    Raises:
        ConfigError: the file is missing or no YAML mapping, or a setting cannot be used.
    """
    try:
        text = Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{source}: cannot be read ({error.strerror}); name an existing YAML file"
        ) from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: holds no settings; expected a mapping such as `env: {{id: ...}}`")
    tree.setdefault("name", re.sub(r"[^a-z0-9-]+", "-", Path(source).stem.lower()).strip("-") or "run")
    for override in overrides:
        _override(tree, override)
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from plain data.

    Raises:
        ConfigError: a setting cannot be used.
    """
    return parse(RunConfig, tree)


def live_options(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted names of the options that may change while a run goes on."""
    found: set[str] = set()
    for key, field in model.model_fields.items():
        name = prefix + (field.alias or key)
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("live"):
            found.add(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= live_options(field.annotation, name + ".")
    return found


def parse(model: type[M], tree: Mapping[str, Any], prefix: str = "") -> M:
    """Validate `tree` as `model`, with errors as one line each.

    Raises:
        ConfigError: some field cannot be used; `prefix` stands before its name.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, item, prefix) for item in error.errors())) from None


def _override(tree: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"-s {text}: expected NAME.NAME=VALUE, such as algorithm.gamma=0.99")
    node = tree
    for depth, name in enumerate(names[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"-s {text}: {'.'.join(names[: depth + 1])} is a value, not a section")
    try:
        node[names[-1]] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"-s {text}: the value is not valid YAML") from None


def _explain(model: type[BaseModel], item: Any, prefix: str) -> str:
    location = [str(part) for part in item["loc"]]
    name = prefix + ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{name}: unknown option; {hint}"
    if item["type"] == "missing":
        return f"{name}: missing; give it a value"
    message: str = item["msg"].removeprefix("Value error, ")
    if not location:
        return prefix + message
    return f"{name}: {item['input']!r} cannot be used; {message[0].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Names (aliases where there are any) that the model accepts at `path`."""
    for name in path:
        annotation: Any = next(
            (f.annotation for key, f in model.model_fields.items() if name in (key, f.alias)), None
        )
        if isinstance(annotation, types.UnionType):
            annotation = next((a for a in typing.get_args(annotation) if a is not type(None)), None)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [field.alias or key for key, field in model.model_fields.items()]
