"""A run's configuration: its options and defaults, reading YAML, and the code that it names.

The docstring below each option says what it does and what more or less of it causes; `ddrl schema` prints them. Options
marked LIVE can be changed while the run goes on, by `ddrl set`. The algorithm's options stay a plain mapping here;
`algorithms.base.resolve` validates them.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

LIVE: JsonDict = {"live": True}
ALLOW_VARIABLE = "DDRL_ALLOW_MODULES"  # comma-separated modules whose code may be imported and run
# In an info: version of the weights that played the other side of a game; -1: another player.
OPPONENT = "opponent"
MAX_BYTES = 1_000_000  # of a YAML file
MAX_RESULT = 20_000  # numbers in the result of an evaluation, which is one entry of a stream
FORMER_OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"learning_rate": 3e-4, "normalize_observations": False, "normalize_returns": False}
}
"""Former defaults of options, by algorithm; a stored config that does not name them was written when these held."""

Durability = Literal["process", "disk", "replica"]

M = TypeVar("M", bound=BaseModel)


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, its value and the remedy, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class ModuleError(ValueError):
    """A "module:callable" that cannot be loaded; the message names it and the remedy in one line."""


def parse_duration(value: Any) -> Any:
    """Return seconds for 90, "90s", "15m" or "2h"; pass anything else on to pydantic, which refuses it."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", value.strip())):
        unit = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]
        return float(match[1]) * unit
    return value


def _refuse_beyond_json(name: str, value: Any) -> None:
    """Refuse what JSON, and so a stored run, cannot hold as it is."""
    why = "it has lists, and keys that are texts"
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return
    except (TypeError, ValueError) as error:
        why = str(error)
    raise ValueError(f"{name}: {value!r:.200} cannot be used; a run is stored as JSON: {why}")


Duration = Annotated[float, BeforeValidator(parse_duration)]
Trackers = Annotated[
    tuple[Literal["wandb", "mlflow", "trackio"], ...],
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
]


class Section(BaseModel):
    """Base of all sections, and of the options of algorithms: frozen; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # which JSON, and so a stored run, cannot hold
    )


class AtariConfig(Section):
    """The Atari protocol. Frames are the emulator's, steps are the agent's."""

    noop_max: int = Field(30, ge=0, le=1000)
    """An episode begins with a random number of idle frames, from 0 to this."""
    fire_reset: bool = True
    """Press FIRE after a reset, and in place of the first action after a lost life, in games that have that button."""
    frame_skip: int = Field(4, ge=1, le=64)
    """Frames per step; the last two are merged by their maximum."""
    screen_size: int = Field(84, ge=16, le=210)
    """Gray frames are scaled to this square, in pixels."""
    episodic_life: bool = True
    """In training, a lost life counts as termination; the game goes on, and episode returns count the whole
    game. Usual: true; R2D2 usually plays without it."""
    sticky: float = Field(0.0, ge=0, lt=1)
    """Probability that a frame repeats the previous action (sticky actions). Usual: 0 or 0.25."""
    full_actions: bool = False
    """Use all 18 actions instead of those that the game needs."""
    max_frames: int = Field(108_000, ge=1)
    """Episodes are truncated after this many frames."""


class WrapperConfig(Section):
    """A wrapper of the environment."""

    id: str
    """A class of Gymnasium's, such as "gymnasium.wrappers:RescaleAction", or your own, "module:callable"."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the wrapper."""


class EnvConfig(Section):
    """The environment."""

    id: str
    """Gymnasium id, "module:EnvId" for one that the module registers, or "module:callable" returning an environment."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers, each an `id` and its `kwargs`, the innermost first; they see observations before ddrl flattens them."""
    num_envs: int = Field(16, ge=1, le=4096)
    """Environments stepped together in one process; more of them make a call of the policy cheaper per step."""
    action_repeat: int = Field(1, ge=1, le=64)
    """Each action is repeated this many times; rewards add up."""
    reward_scale: float | None = Field(None, gt=0)
    """Training rewards are multiplied by this; reported returns are not. null: 0.1 for SAC, otherwise 1."""
    reward_sign: bool = False
    """Training rewards are -1, 0 or 1 by their sign; reported returns are not. Usual for Atari."""
    reward_clip: float | None = Field(None, gt=0)
    """Training rewards are limited to minus and plus this, before they are scaled; reported returns are not. It keeps
    one large penalty from deciding what is learned. null: unlimited."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes here instead of at the environment's own limit."""
    same_versions: bool = True
    """Machines whose versions of ddrl, gymnasium or the environment's package differ from the submitter's do
    not play the run. False: they do, and experience of several versions mixes."""
    action_mask: bool = False
    """The environment says at each step which of its discrete actions are allowed, 1 or 0 for each: by
    info["action_mask"], the part action_mask of a Dict observation, or a method action_masks()."""
    metrics: tuple[Annotated[str, Field(pattern=r"^[\w./-]{1,60}$")], ...] = Field((), max_length=20)
    """Keys of the info at the end of an episode, such as is_success, whose numbers are shown beside its return."""
    opponent: str = "random"
    """The other side of a game of two players in evaluations, and for whoever plays an exported policy: `random`;
    `lookahead`, in connect four, which wins or blocks if it can at once; or your own, "module:callable", called with
    what the game shows its side and a NumPy generator. For training see self_play."""
    frame_stack: int = Field(1, ge=1, le=16)
    """Newest observations that networks see at once; sent and stored one by one. Usual: 4 for Atari."""
    atari: AtariConfig = AtariConfig()


class RolloutConfig(Section):
    """Collecting experience."""

    segment_s: Duration = Field(5.0, gt=0)
    """Length of one rollout task; shorter shares the fleet finer, at more overhead."""
    fragment_s: Duration = Field(0.25, gt=0)
    """Time between two appends of a process; less keeps experience fresher, more compresses better."""
    max_fragment_steps: int = Field(512, ge=1, le=65536)
    """Largest number of steps T in a fragment, at any speed of the environment. R2D2 rounds it up to a multiple of
    its stride, sequence_length - overlap."""
    random_until_learned: bool | None = None
    """Play uniformly random actions under version 0, which has learned nothing; continuous ones drift in every
    second environment, so that they move what has inertia. null: true without initial weights, but on-policy and for
    R2D2, which cannot."""
    action_noise: float = Field(0.0, ge=0, le=2)
    """Standard deviation of Gaussian noise added to explored actions; 1 means half the action range. Only for
    continuous actions, off-policy."""
    step_timeout_s: Duration = Field(60.0, gt=0)
    """A step of the environments that takes longer counts as hung: its process is ended and replaced."""
    max_crashes: int = Field(5, ge=1)
    """Processes in a row that may crash without a fragment before the run is paused."""


class ReplayConfig(Section):
    """The replay buffer and its rate limiter; on-policy algorithms use only max_bytes and retain."""

    capacity: int = Field(1_000_000, ge=1)
    """Transitions that the learner holds."""
    max_bytes: ByteSize = Field(ByteSize(512 * 1024**2), ge=65536, json_schema_extra=LIVE)
    """Memory of the stream in Redis; collectors wait when it is used up."""
    retain: Literal["newest", "all"] = "newest"
    """Experience that leaves the stream: with `newest` it is gone, with `all` the learner writes it to files first, in
    the folder `recording` of the run's folder, for `ddrl rerun` and `ddrl submit --from-data`."""
    warmup_steps: int | None = Field(None, ge=1)
    """Transitions appended before the first update. More let random play find what is rare. null: 10,000 with SAC, else
    1,000, at most the capacity."""
    samples_per_insert: float = Field(32.0, gt=0)
    """Transitions sampled per transition appended; play and learning wait for each other to keep it. A sequence
    of R2D2 counts with all its steps. More reuses data more often."""
    slack_steps: int = Field(1_000, ge=1)
    """Transitions that collectors may be ahead of samples_per_insert; more lets play go on during a slow update."""
    hindsight: int = Field(0, ge=0, le=64)
    """Goals reached later in the episode, towards which each transition is learned from as well (HER). Needs Dict
    observations with achieved_goal and desired_goal, and the environment's compute_reward. 0: none. Usual: 4."""
    observations: Literal["auto", "dense", "compressed"] = "auto"
    """Storage of observations in the learner: `dense` arrays, fastest; `compressed` images, a thirtieth of the
    memory; `auto`: compressed for images that exceed memory_bytes, else dense. Dense images are held on the learner's
    GPU where half of its free memory suffices, of any memory_bytes."""
    memory_bytes: ByteSize = Field(ByteSize(4 * 1024**3), ge=1024**2)
    """Learner's memory up to which `auto` holds observations dense, and most for compressed ones: beyond it the oldest
    leave before there are `capacity` of them."""
    threads: int = Field(1, ge=0, le=64)
    """Threads that decompress batches ahead of the learner; 0: it decompresses itself. Only for compressed
    observations."""


class OnPolicyConfig(Section):
    """Play and learning of on-policy algorithms; their versions count iterations."""

    collect: Literal["async", "sync"] = "async"
    """`async`: play goes on while the learner learns, up to max_staleness versions ahead; `sync`: play waits for
    the next version. async uses two processors at once, sync is closest to on-policy."""
    max_staleness: int = Field(1, ge=0)
    """Versions that a fragment may be behind the weights that learn from it; older ones are `stale`. More
    keeps a large fleet busy, at the cost of older data. Usual: 1 to 4."""
    stale: Literal["drop", "correct"] = "drop"
    """Treatment of fragments older than max_staleness: dropped and counted, or learned from nevertheless,
    corrected by importance weights (V-trace and UPGO only)."""
    forced_lag: int = Field(0, ge=0)
    """For studies: learn from data that are this many versions old."""


class LearnerConfig(Section):
    """The training process."""

    device: str = "auto"
    """`auto`: CUDA if available, otherwise CPU. Or name a device: `cpu`, `cuda`, `cuda:1`."""
    num_threads: int = Field(1, ge=1, le=256)
    """Torch threads of the training process on a CPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: the factors of matrix products are rounded, on a CPU with AMX to bfloat16, on a GPU to TF32.
    Faster where networks are wide; results differ a little. Refused where the machine does not round. Convolutions and
    recurrent layers round to TF32 on a GPU with either, as torch does."""
    publish_every_s: Duration = Field(1.0, ge=0, json_schema_extra=LIVE)
    """Minimum time between two versions of the weights. Off-policy only."""
    checkpoint_every_s: Duration = Field(60.0, ge=1, json_schema_extra=LIVE)
    """Minimum time between two checkpoints."""
    lockstep: bool = False
    """Admit fragments one by one, with all updates that the rate limiter allows in between: the stream alone
    then decides what is learned, however often the learner is killed. For studies; slower. Off-policy
    only."""
    metrics_every_s: Duration = Field(1.0, ge=0.1, json_schema_extra=LIVE)
    """Time between two rows of metrics."""
    num_learners: int = Field(1, ge=1, le=256)
    """Learners that learn the run together: one leads, each holds part of the experience and learns from its part of
    each batch. `ddrl submit` starts them here; `ddrl learner` on other machines joins a run that wants more."""
    address: str | None = Field(None, pattern=r"^([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?$")
    """Address of the leader for the other learners, HOST or HOST:PORT, IPv6 in brackets. null: its address towards the
    server, any port. Whoever reaches it can disturb the run."""
    rank_timeout_s: Duration = Field(10.0, ge=1)
    """A learner that does not answer the others for this long is lost; those left go on without it."""
    stall_s: Duration = Field(45.0, ge=5)
    """A training thread that neither learns nor looks for experience for this long hangs: its process ends, and
    another learner takes over."""


class WeightsConfig(Section):
    """Versions of the weights that Redis keeps."""

    keep_last: int = Field(10, ge=2, json_schema_extra=LIVE)
    """Number of newest versions kept."""
    keep_every: int = Field(100, ge=1, json_schema_extra=LIVE)
    """Versions divisible by this are kept beyond keep_last, within max_bytes."""
    max_bytes: ByteSize = Field(ByteSize(64 * 1024**2), ge=1024, json_schema_extra=LIVE)
    """Memory of the versions kept by keep_every; the oldest are dropped first."""
    onnx: bool = False
    """Publish each version as an ONNX file too, for actors in other languages. The learner needs the extra onnx."""


class EvaluationConfig(Section):
    """Evaluation of versions, with deterministic actions and fixed seeds."""

    num_episodes: int = Field(20, ge=1, json_schema_extra=LIVE)
    """Episodes of one evaluation."""
    confirm_episodes: int = Field(100, ge=0, json_schema_extra=LIVE)
    """Episodes on other seeds that must confirm a solution; 0: none."""
    num_envs: int = Field(20, ge=1, le=4096)
    """Episodes played at the same time; ALE games are played one by one."""
    max_steps: int | None = Field(None, ge=1, json_schema_extra=LIVE)
    """Agent steps after which an episode is truncated; training has no such limit. null: the environment's own
    limit, or 27,000 if it names none."""
    every_s: Duration = Field(60.0, gt=0, json_schema_extra=LIVE)
    """Time between evaluations while the target is far. The first one is at once, of 5 episodes."""
    near_every_s: Duration = Field(2.0, gt=0, json_schema_extra=LIVE)
    """Time between evaluations when training returns are near the target."""
    near: float = Field(0.15, ge=0, json_schema_extra=LIVE)
    """Training returns are near the target when the mean of the last 20 training episodes is within this share of the
    way from the lowest mean of an evaluation, or this mean if it is lower, to stop.return; 1: always. Larger notices a
    solution earlier, and takes more of the fleet's time."""
    seed: int = Field(1_000_000, ge=0, lt=2**52)
    """First seed of the evaluations; those of the confirmation follow."""
    timeout_s: Duration = Field(60.0, gt=0, json_schema_extra=LIVE)
    """An evaluation that no worker reports on for this long is sent again."""


class SelfPlayConfig(Section):
    """Opponents in the training of a game of two players: the policy itself, and versions of its weights that the
    server keeps (weights.keep_every).
    """

    opponents: Literal["prioritized", "uniform", "latest"] = "prioritized"
    """Versions that play the other side: `uniform`: each as often; `prioritized`: those more often against which the
    policy loses; `latest`: none but the policy itself."""
    latest_share: float = Field(0.5, ge=0, le=1)
    """The newest version plays the other side in this share of the games against versions of the policy. More learns
    faster, less forgets less."""
    opponent_share: float = Field(0.0, ge=0, le=1)
    """Share of all training games in which env.opponent plays the other side, as it does in evaluations."""
    pool: int = Field(20, ge=1, le=1000)
    """Most versions to draw from, spread evenly over those that the server keeps."""
    opening_moves: int = Field(0, ge=0, le=1000)
    """Training games begin with up to so many random moves of both sides, each number as likely. More shows the policy
    positions that it would not come to by itself."""


class StopConfig(Section):
    """The end of the run: the first condition that holds."""

    return_: float | None = Field(None, alias="return", json_schema_extra=LIVE)
    """The run is solved when an evaluation's mean return reaches this, and that of the confirmation does too."""
    time: Duration | None = Field(None, gt=0, json_schema_extra=LIVE)
    """Time of training from the first environment step, pauses excluded, such as 15m."""
    env_steps: int | None = Field(None, ge=1, json_schema_extra=LIVE)
    """Agent steps appended to the stream."""
    updates: int | None = Field(None, ge=1, json_schema_extra=LIVE)
    """Updates of the learner."""


class RunConfig(Section):
    """A run's resolved configuration; `ddrl submit` stores it and every process reads it."""

    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    """First part of the run's id."""
    seed: int = Field(1, ge=0, lt=2**31)
    """Seed of networks, replay sampling and play; play also depends on process ids and is not reproducible."""
    weight: float = Field(1.0, gt=0, le=100, json_schema_extra=LIVE)
    """Relative share of the fleet's time among runs of equal priority; 2 gets twice as much as 1."""
    priority: Literal["low", "normal", "high"] = Field("normal", json_schema_extra=LIVE)
    """Runs of a higher priority take processes first, also from running segments of lower ones; runs of equal
    priority share by weight."""
    durability: Durability = "process"
    """What a fragment or a version of the weights outlives once it is acknowledged. `process`: the end of the
    server's process, if it keeps an append-only file; `disk`: that of its machine, as it is on the disk;
    `replica`: the loss of the server, as a replica has it, too. Each costs more time per fragment."""
    env: EnvConfig
    algorithm: dict[str, Any]
    """The algorithm's `name`, and its own options."""
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig = ReplayConfig()
    on_policy: OnPolicyConfig = OnPolicyConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    self_play: SelfPlayConfig = SelfPlayConfig()
    stop: StopConfig = StopConfig()
    tracking: Trackers = ()
    """Tools that the learner's machine tells of the run while it goes on; each is an extra of ddrl, set up by its own
    environment variables, such as MLFLOW_TRACKING_URI or WANDB_MODE=offline."""

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not isinstance(self.algorithm.get("name"), str):
            raise ValueError("algorithm.name: missing; name the algorithm, such as sac or ppo")
        _refuse_beyond_json("env.kwargs", self.env.kwargs)
        _refuse_beyond_json("env.wrappers", [wrapper.kwargs for wrapper in self.env.wrappers])
        _refuse_beyond_json("algorithm.network_kwargs", self.algorithm.get("network_kwargs"))
        if self.env.reward_scale is None:
            scale = 0.1 if self.algorithm["name"] == "sac" else 1.0
            object.__setattr__(self, "env", self.env.model_copy(update={"reward_scale": scale}))
        if self.env.reward_sign and self.env.reward_clip is not None:
            raise ValueError(
                f"env.reward_clip: {self.env.reward_clip:g} has no effect with env.reward_sign; remove one"
            )
        if (self.replay.warmup_steps or 1) > self.replay.capacity:
            raise ValueError(
                f"replay.warmup_steps: {self.replay.warmup_steps} is more than replay.capacity "
                f"{self.replay.capacity}; learning would never start: lower it or raise the capacity"
            )
        if self.rollout.fragment_s > self.rollout.segment_s:
            raise ValueError(
                f"rollout.fragment_s: {self.rollout.fragment_s:g} is longer than rollout.segment_s "
                f"{self.rollout.segment_s:g}; use at most {self.rollout.segment_s:g}"
            )
        most = MAX_RESULT // (2 + len(self.env.metrics))
        for name in ("num_episodes", "confirm_episodes"):
            if (num := getattr(self.evaluation, name)) > most:
                raise ValueError(
                    f"evaluation.{name}: one result of {num} episodes is too long; use at most {most}"
                )
        return self


# --- reading and validating --------------------------------------------------------------------------


def duration(text: str, option: str) -> float:
    """Return the seconds of a command-line option.

    Raises:
        ConfigError: `text` is not a duration.
    """
    value = parse_duration(text)
    if not isinstance(value, float) or value <= 0:
        raise ConfigError(f"{option}: {text!r} is not a duration; use 90s, 15m or 2h")
    return value


def presets() -> dict[str, Path]:
    """Return the YAML files that ddrl ships, by name."""
    here = Path(__file__).parent  # a wheel holds configs/ in the package; in a checkout it is beside it
    folder = here / "configs" if (here / "configs").is_dir() else here.parent / "configs"
    return dict(sorted((path.stem, path) for path in folder.glob("*.yaml")))


def find(name: str) -> Path:
    """Return the local file `name` or `name`.yaml, else the preset of that name.

    Raises:
        ConfigError: there is neither.
    """
    for local in (name, f"{name}.yaml"):
        if os.path.exists(local) and not os.path.isdir(local):
            return Path(local)
    shipped, stem = presets(), name.removesuffix(".yaml")
    if stem not in shipped:
        near = difflib.get_close_matches(Path(stem).name.lower(), shipped, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"{name}: no such file or preset; {hint}`ddrl presets` lists the presets")
    return shipped[stem]


def load(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> RunConfig:
    """Read a YAML file and apply overrides.

    Args:
        source: file, or what it would hold.
        overrides: "a.b=c" each, where c is YAML, or values by dotted names.

    Raises:
        ConfigError: the file is missing or no YAML mapping, or a setting cannot be used.
    """
    tree = plain("the settings", source) if isinstance(source, Mapping) else _read(source)
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            _put(tree, str(name), plain(str(name), value))
    else:
        for override in overrides:
            _override(tree, override)
    return validate(tree)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a tree by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def plain(name: str, value: Any) -> Any:
    """Return a value as YAML would give it: numbers of NumPy as Python's, any mapping as a dictionary.

    Raises:
        ConfigError: it is none that YAML could give; the message begins with `name`.
    """

    def simpler(part: Any) -> Any:
        if isinstance(part, Mapping):
            return dict(part)
        if hasattr(part, "tolist"):
            return part.tolist()
        raise TypeError

    try:
        return json.loads(json.dumps(value, default=simpler))
    except (TypeError, ValueError):
        kinds = "give numbers, texts, lists and mappings"
        raise ConfigError(f"{name}: {value!r:.200} cannot be used; {kinds}") from None


def _read(source: str | Path) -> dict[str, Any]:
    try:
        with open(source, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{source}: cannot be read ({error.strerror}); name an existing YAML file"
        ) from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: is larger than {MAX_BYTES:,} bytes; name a YAML file of settings")
    try:
        tree = parse_yaml(text.decode())
    except ValueError as error:
        raise ConfigError(f"{source}: not valid YAML ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: holds no settings; expected a mapping such as `env: {{id: ...}}`")
    tree.setdefault("name", re.sub(r"[^a-z0-9-]+", "-", Path(source).stem.lower()).strip("-") or "run")
    return tree


def parse_yaml(text: str) -> Any:
    """Return the plain data of a YAML text without aliases: a short text of aliases fills any memory.

    Raises:
        ValueError: it is not such a text; the message is one line.
    """
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, AttributeError, LookupError) as error:
        raise ValueError(" ".join(str(error).split())) from None


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not taken; write the values out")
        return super().compose_node(parent, index)


def validate(tree: Mapping[str, Any]) -> RunConfig:
    """Return the RunConfig of plain data.

    Raises:
        ConfigError: a setting cannot be used.
    """
    return parse(RunConfig, tree)


def validate_stored(tree: Any) -> RunConfig:
    """Return the RunConfig that was stored as `tree`, with the defaults of its time.

    Raises:
        ConfigError: a setting cannot be used.
    """
    if isinstance(tree, dict) and isinstance(algorithm := tree.get("algorithm"), dict):
        tree = tree | {"algorithm": FORMER_OPTIONS.get(str(algorithm.get("name")), {}) | algorithm}
    return validate(tree)


def options(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return all options by their dotted names."""
    found: dict[str, FieldInfo] = {}
    for key, field in model.model_fields.items():
        name, part = prefix + (field.alias or key), field.annotation
        if isinstance(part, type) and issubclass(part, BaseModel):
            found |= options(part, f"{name}.")
        else:
            found[name] = field
    return found


def live_options(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the options that can change while a run goes on, by their dotted names."""
    return {name: field for name, field in options(model, prefix).items() if field.json_schema_extra == LIVE}


def allowed(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return which values a field of this type takes, such as "number > 0" or "duration or null"."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        return allowed(parts[0], [*metadata, *parts[1:]])
    if parts:  # of a union, or a Literal
        return " or ".join("null" if part is types.NoneType else allowed(part, metadata) for part in parts)
    is_duration = any(isinstance(each, BeforeValidator) for each in metadata)
    kinds = {int: "integer", float: "duration" if is_duration else "number", ByteSize: "size"}
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [f"{s} {getattr(each, n)}" for each in metadata for n, s in signs.items() if hasattr(each, n)]
    return f"{kinds.get(annotation, annotation)} {', '.join(bounds)}".strip()


def parse(model: type[M], tree: Mapping[str, Any], prefix: str = "") -> M:
    """Validate `tree` as `model`, with errors as one line each.

    Raises:
        ConfigError: some field cannot be used; `prefix` stands before its name.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, item, prefix) for item in error.errors()[:9])) from None


def _override(tree: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"-s {text}: expected NAME.NAME=VALUE, such as algorithm.gamma=0.99")
    try:
        parsed = parse_yaml(value)
    except ValueError:
        raise ConfigError(f"-s {text}: the value is not valid YAML") from None
    _put(tree, name.strip(), parsed, f"-s {text}")


def _put(tree: dict[str, Any], name: str, value: Any, given: str = "") -> None:
    """Set an option by its dotted name; messages begin with `given`, the name by default."""
    *sections, option = name.split(".")
    if not all((*sections, option)):
        raise ConfigError(f"{given or repr(name)}: expected NAME.NAME=VALUE, such as algorithm.gamma=0.99")
    for depth, section in enumerate(sections, start=1):
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{given or name}: {'.'.join(sections[:depth])} is a value, not a section")
    tree[option] = value


def _explain(model: type[BaseModel], item: Any, prefix: str) -> str:
    location = [str(part) for part in item["loc"]]
    name = prefix + ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known)) or 'none'}"
        return f"{name}: unknown option; {hint}"
    if item["type"] == "missing":
        return f"{name}: missing; give it a value"
    message: str = item["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if not location:
        return prefix + message
    return f"{name}: {item['input']!r:.200} cannot be used; {message[0].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the option names (aliases where they exist) that the model accepts at `path`."""
    prefix = "".join(f"{section}." for section in path)
    below = [name.removeprefix(prefix) for name in options(model) if name.startswith(prefix)]
    return [*dict.fromkeys(name.partition(".")[0] for name in below)]  # sections once


# --- code that a config names ------------------------------------------------------------------------
# Code that a run names as "module:callable" is imported and executed on every machine that plays or learns it. So each
# machine lists the modules that it trusts in DDRL_ALLOW_MODULES; the default is none.


def allowed_modules() -> list[str]:
    """Return the modules named in DDRL_ALLOW_MODULES, in its order."""
    return [name.strip() for name in os.environ.get(ALLOW_VARIABLE, "").split(",") if name.strip()]


def is_allowed(module: str) -> bool:
    """Return True if DDRL_ALLOW_MODULES names `module` or one of its parent packages."""
    return any(module == name or module.startswith(name + ".") for name in allowed_modules())


def load_module(name: str) -> types.ModuleType:
    """Import and return the module of "module:callable" or "module:EnvId"; the current folder comes last on the path.

    Raises:
        ModuleError: `name` has another form, or its module is not allowed or cannot be imported.
    """
    if (found := re.fullmatch(r"(\w+(?:\.\w+)*):[^:\s]+", name)) is None:
        raise ModuleError(f'{name}: is not of the form "module:callable"; write it like my_pkg.module:make')
    module_name = found[1]
    if not is_allowed(module_name):
        raise ModuleError(
            f"{name}: module {module_name} may not be imported here; "
            f"set {ALLOW_VARIABLE}={module_name.partition('.')[0]} on every machine that uses it"
        )
    if "" not in sys.path:  # the command `ddrl` and Celery leave it out
        sys.path.append("")
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise ModuleError(
            f"{name}: {first_line(error)}; on every machine that uses it, start ddrl in its folder, add that "
            "to PYTHONPATH or install it (pip install -e FOLDER)"
        ) from None
    except Exception as error:
        raise ModuleError(
            f"{name}: importing {module_name} raised {type(error).__name__} ({first_line(error)}); "
            "make the module importable"
        ) from None


def load_callable(name: str) -> Callable[..., Any]:
    """Import and return the callable named by "module:callable".

    Raises:
        ModuleError: as `load_module`, or the module has no such callable.
    """
    module = load_module(name)
    module_name, _, attribute = name.partition(":")
    if not hasattr(module, attribute):
        raise ModuleError(f"{name}: module {module_name} has no {attribute!r}; name a callable of it")
    found: Callable[..., Any] = getattr(module, attribute)
    if not callable(found):
        raise ModuleError(f"{name}: is {type(found).__name__}, which cannot be called; name a callable of it")
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
