"""The sections of a run's configuration, with their defaults.

What a field does and what more or less of it causes stands in its description (`ddrl schema` prints them). Fields
marked LIVE can be changed while the run goes on, by `ddrl set`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field
from pydantic.config import JsonDict

LIVE: JsonDict = {"live": True}


def parse_duration(value: Any) -> Any:
    """Seconds from 90, "90s", "15m" or "2h"; anything else goes on to pydantic, which refuses it."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", value.strip())):
        unit = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]
        return float(match[1]) * unit
    return value


Duration = Annotated[float, BeforeValidator(parse_duration)]


class Section(BaseModel):
    """Base of every part: frozen, and no unknown key passes."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())


class AtariConfig(Section):
    """How ALE games are played: the standard protocol. Frames are the emulator's, steps the agent's."""

    noop_max: int = Field(
        30,
        ge=0,
        le=1000,
        description="An episode begins with 0 to so many idle frames, drawn anew.",
    )
    fire_reset: bool = Field(
        True, description="Press FIRE as the first of them, where the game has that button."
    )
    frame_skip: int = Field(
        4, ge=1, le=64, description="Frames per step; the last two are merged by their maximum."
    )
    screen_size: int = Field(
        84, ge=16, le=210, description="Grey frames are scaled to this square, in pixels."
    )
    episodic_life: bool = Field(
        True,
        description="In training a lost life counts as termination; the game goes on, and returns count it whole. "
        "Usual: yes; R2D2 usually plays without it.",
    )
    sticky: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability that a frame repeats the action before instead (sticky actions: 0.25).",
    )
    full_actions: bool = Field(False, description="All 18 actions instead of those that the game uses.")
    max_frames: int = Field(108_000, ge=1, description="Episodes are truncated after so many frames.")


class EnvConfig(Section):
    """What is played."""

    id: str = Field(description='Gymnasium id, or "module:callable" returning an environment.')
    kwargs: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    num_envs: int = Field(
        16, ge=1, le=4096, description="Environments side by side in one process; more amortise the policy."
    )
    action_repeat: int = Field(
        1, ge=1, le=64, description="Each action is played this often; rewards add up."
    )
    reward_scale: float = Field(
        1.0, gt=0, description="Training rewards are multiplied by this; reported returns are not."
    )
    reward_sign: bool = Field(
        False,
        description="Training rewards are -1, 0 or 1 by their sign; reported returns are not. Usual for Atari.",
    )
    max_episode_steps: int | None = Field(
        None, ge=1, description="Truncate episodes here instead of at the environment's own limit."
    )
    same_versions: bool = Field(
        True,
        description="Machines with other versions of ddrl, gymnasium or the environment's package than the "
        "submitter's do not play the run. False: they do, and experience of several versions mixes.",
    )
    frame_stack: int = Field(
        1,
        ge=1,
        le=16,
        description="Newest observations that networks see at once; sent and stored one by one. Usual: 4 for Atari.",
    )
    atari: AtariConfig = AtariConfig()


class RolloutConfig(Section):
    """How experience is collected."""

    segment_s: Duration = Field(
        5.0, gt=0, description="Length of one rollout task; shorter shares the fleet finer, at more overhead."
    )
    fragment_s: Duration = Field(
        0.25, gt=0, description="Play between two appends; less is fresher, more compresses better."
    )
    max_fragment_steps: int = Field(512, ge=1, le=65536, description="Upper bound of T, whatever the speed.")
    random_until_learned: bool | None = Field(
        None,
        description="Play version 0, which has learned nothing, by uniformly random actions. None: off-policy "
        "algorithms do, but for runs that begin with another's weights; on-policy ones cannot.",
    )
    action_noise: float = Field(
        0.0,
        ge=0,
        le=2,
        description="Standard deviation of Gaussian noise added to explored actions, in half action ranges.",
    )
    step_timeout_s: Duration = Field(
        60.0,
        gt=0,
        description="A step of the environments that takes longer hangs: its process is ended, and another starts.",
    )
    max_crashes: int = Field(
        5,
        ge=1,
        description="Processes that may end without a fragment, one after another, before the run is paused.",
    )


class ReplayConfig(Section):
    """The stream as replay buffer, and the pace between playing and learning."""

    capacity: int = Field(1_000_000, ge=1, description="Transitions that the learner's view holds.")
    max_bytes: ByteSize = Field(
        ByteSize(512 * 1024**2),
        ge=65536,
        description="Budget of the stream in Redis; writers wait at it.",
        json_schema_extra=LIVE,
    )
    warmup_steps: int = Field(1_000, ge=1, description="Transitions appended before the first update.")
    samples_per_insert: float = Field(
        32.0,
        gt=0,
        description="Transitions sampled per transition appended, kept on both sides; more reuses data harder.",
    )
    slack_steps: int = Field(
        1_000, ge=1, description="Transitions that collectors may be ahead of that ratio; bounds burstiness."
    )
    observations: Literal["auto", "dense", "compressed"] = Field(
        "auto",
        description="How the learner holds observations: `dense` arrays, fastest; `compressed` images, a thirtieth of "
        "the memory; `auto`: dense where capacity fits into memory_bytes.",
    )
    memory_bytes: ByteSize = Field(
        ByteSize(4 * 1024**3),
        ge=1024**2,
        description="Learner's memory up to which `auto` holds observations dense.",
    )
    threads: int = Field(
        1,
        ge=0,
        le=64,
        description="Threads that decompress batches ahead of the learner; 0: it waits for each. compressed only.",
    )


class OnPolicyConfig(Section):
    """How on-policy algorithms share time with play; versions count their iterations."""

    collect: Literal["async", "sync"] = Field(
        "async",
        description="`async`: play goes on while the learner learns, up to max_staleness ahead; `sync`: play waits "
        "for the next version. async uses two processors at once, sync is closest to on-policy.",
    )
    max_staleness: int = Field(
        1,
        ge=0,
        description="Versions that a fragment may be behind the weights that learn from it; older ones are `stale`. "
        "More keeps a large fleet busy, at the cost of older data. Usual: 1 to 4.",
    )
    stale: Literal["drop", "correct"] = Field(
        "drop",
        description="What happens to fragments older than max_staleness: dropped and counted, or learned from "
        "nevertheless, corrected by importance weights (V-trace and UPGO only).",
    )
    forced_lag: int = Field(
        0, ge=0, description="For studies: learning is held back so many versions behind play."
    )


class LearnerConfig(Section):
    """The training process."""

    device: str = Field(
        "auto", description='"auto" takes CUDA when there is one; else "cpu", "cuda", "cuda:1".'
    )
    num_threads: int = Field(1, ge=1, le=256, description="Torch threads of the training process on a CPU.")
    publish_every_s: Duration = Field(
        1.0, ge=0, description="Least time between two versions of the weights.", json_schema_extra=LIVE
    )
    checkpoint_every_s: Duration = Field(
        60.0, ge=1, description="Least time between two checkpoints.", json_schema_extra=LIVE
    )
    lockstep: bool = Field(
        False,
        description="Admit fragments one by one, with all updates that the pace allows between: then the stream alone "
        "decides what is learned, however often the learner is killed. For studies; slower. Off-policy only.",
    )
    metrics_every_s: Duration = Field(
        1.0, ge=0.1, description="Time between two rows of figures.", json_schema_extra=LIVE
    )


class WeightsConfig(Section):
    """Which published versions are kept in Redis."""

    keep_last: int = Field(10, ge=2, description="Newest versions kept.", json_schema_extra=LIVE)
    keep_every: int = Field(
        100, ge=1, description="Every so many versions one is kept for good.", json_schema_extra=LIVE
    )
    max_bytes: ByteSize = Field(
        ByteSize(64 * 1024**2),
        ge=1024,
        description="Cap of the versions kept for good; the oldest go first.",
        json_schema_extra=LIVE,
    )


class EvaluationConfig(Section):
    """When and how versions are evaluated (deterministic actions, fixed seeds)."""

    num_episodes: int = Field(20, ge=1, description="Episodes of one evaluation.", json_schema_extra=LIVE)
    confirm_episodes: int = Field(
        100, ge=0, description="Episodes on other seeds that must confirm; 0: none.", json_schema_extra=LIVE
    )
    num_envs: int = Field(20, ge=1, le=4096, description="Episodes played side by side.")
    every_s: Duration = Field(
        60.0, gt=0, description="Time between evaluations while the target is far.", json_schema_extra=LIVE
    )
    near_every_s: Duration = Field(
        2.0, gt=0, description="Time between them when training returns are near it.", json_schema_extra=LIVE
    )
    near: float = Field(
        50.0,
        ge=0,
        description="Near: mean of the last 20 training returns above stop.return minus this.",
        json_schema_extra=LIVE,
    )
    seed: int = Field(
        1_000_000, ge=0, description="First seed of the evaluations; the confirmation's follow."
    )
    timeout_s: Duration = Field(
        60.0,
        gt=0,
        description="An evaluation without result is sent again after this.",
        json_schema_extra=LIVE,
    )


class StopConfig(Section):
    """When the run ends; the first condition that holds ends it."""

    return_: float | None = Field(
        None, alias="return", description="Solved at this mean return, confirmed.", json_schema_extra=LIVE
    )
    time: Duration | None = Field(
        None, gt=0, description="Wall time of the learner, such as 15m.", json_schema_extra=LIVE
    )
    env_steps: int | None = Field(None, ge=1, description="Agent steps appended.", json_schema_extra=LIVE)
    updates: int | None = Field(None, ge=1, description="Updates of the learner.", json_schema_extra=LIVE)
