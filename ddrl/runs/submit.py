"""Submit a run: check all of its configuration first, then create it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ddrl import envs
from ddrl.algorithms import base
from ddrl.config import FORMER_OPTIONS, OPPONENT, ConfigError, RunConfig, Section, load
from ddrl.envs import requirements
from ddrl.envs.goals import find_goals
from ddrl.replay.experience import is_compressed, longest_fragment_steps, rate_limiter
from ddrl.store import connection, runs
from ddrl.store.connection import Redis
from ddrl.types import EnvSpec

# The stream holds at least so many of the largest fragments; with fewer, one may exceed the free room.
FRAGMENTS_IN_BUDGET = 8
UNLIMITED = 1e6  # samples for each transition inserted
# Configs that earlier versions wrote name all options.
FORMER_DEFAULTS = {"replay.warmup_steps": 1_000}
# Room for checkpoints while the networks are unknown; the learner checks the real size (`needed_bytes`).
CHECKPOINTS_BYTES = 64 * 1024**2


def prepare(config: RunConfig, spaces: EnvSpec | None = None, *, processes: int = 1) -> EnvSpec:
    """Check that a run's settings fit together and to its environment; return the environment's spaces.

    Args:
        config: of the run.
        spaces: of its environment; None: make it to find them.
        processes: the fewest that will play.

    Raises:
        EnvError: the environment cannot be made here, or lacks what an option needs.
        ConfigError: the algorithm cannot be used, or not with this environment, or settings contradict.
    """
    spaces = spaces or envs.describe(config.env)
    check(config, spaces, processes=processes)
    if config.replay.hindsight:
        find_goals(config.env)
    return spaces


def check(config: RunConfig, spaces: EnvSpec, *, processes: int = 1) -> None:
    """Check that a run's settings fit together on an environment of these spaces.

    Raises:
        ConfigError: the algorithm cannot be used, or not with this environment, or settings contradict.
    """
    resolved = base.resolve(config, spaces)
    policy = resolved.policy() if base.is_custom(resolved.name) else None
    try:
        _check_pairs(config)
        if config.weights.onnx:
            if spaces.image_shapes and spaces.input_shape[0] > sum(map(math.prod, spaces.image_shapes)):
                raise ValueError(
                    "weights.onnx: numbers beside images are not for ONNX; remove it, or the numbers"
                )
            if policy is not None and not hasattr(policy, "module"):
                raise ValueError(f"weights.onnx: the Policy of {resolved.name} has no method module; add it")
        if resolved.on_policy:
            _check_on_policy(config, resolved, processes)
        else:
            _check_off_policy(config, resolved)
        _check_self_play(config, resolved)
        _check_budget(config, resolved)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_pairs(config: RunConfig) -> None:
    """Refuse options that do not go together, whatever the algorithm.

    Raises:
        ValueError: two do not.
    """
    env, learner = config.env, config.learner
    if env.action_mask and env.action_repeat > 1:
        raise ValueError(
            f"env.action_repeat: {env.action_repeat} would repeat actions that env.action_mask forbids meanwhile; use 1"
        )
    if learner.num_learners > 1 and learner.rank_timeout_s >= learner.stall_s:
        raise ValueError(
            f"learner.rank_timeout_s: {learner.rank_timeout_s:g} is not less than learner.stall_s "
            f"{learner.stall_s:g}, at which a learner that waits for another one ends; lower it or raise stall_s"
        )


def _check_budget(config: RunConfig, resolved: base.Resolved) -> None:
    """Refuse a stream that holds fewer than FRAGMENTS_IN_BUDGET of the largest fragments, uncompressed.

    Raises:
        ValueError: it holds fewer.
    """
    longest, num_envs = longest_fragment_steps(config.rollout, resolved.sequences), config.env.num_envs
    if resolved.on_policy:  # a fragment is no longer than a batch
        longest = min(longest, resolved.config.batch_size // num_envs + 1)
    budget, stride = int(config.replay.max_bytes), resolved.sequences.stride if resolved.sequences else 1

    def needed_bytes(steps: int) -> int:
        return FRAGMENTS_IN_BUDGET * num_envs * _environment_bytes(resolved, steps)

    if needed_bytes(longest) > budget:
        shorter = range(longest - stride, 0, -stride)
        fits = next((steps for steps in shorter if needed_bytes(steps) <= budget), None)
        remedy = f", or rollout.max_fragment_steps {fits}" if fits else ""
        raise ValueError(
            f"replay.max_bytes: {budget} holds fewer than {FRAGMENTS_IN_BUDGET} of the largest fragments; use at least "
            f"{needed_bytes(longest)}{remedy}"
        )


def _environment_bytes(resolved: base.Resolved, steps: int) -> int:
    """Return the uncompressed bytes of one environment's part of a fragment of `steps`, with its context."""
    spec, sequences = resolved.spec, resolved.sequences
    row = np.dtype(spec.observation_dtype).itemsize * math.prod(spec.observation_shape)
    # The raw and the scaled action, float32 (or one int64); a reward; a log probability or two values; flags.
    transition = row + 8 * math.prod(spec.action_shape) + 16
    # Of float16 states where sequences begin inside an episode, and their indices.
    num_states = -(-steps // sequences.stride) if sequences else 1
    states: int = num_states * (2 * resolved.config.recurrent_state_size + 8)
    return row + (resolved.context + steps) * transition + states


def _check_off_policy(config: RunConfig, resolved: base.Resolved) -> None:
    """Check the settings of an off-policy run.

    Raises:
        ValueError: settings contradict, or one has no effect.
    """
    replay, spec, options, sequences = config.replay, resolved.spec, resolved.config, resolved.sequences
    rate_limiter(replay, options)
    where = f"on algorithm {resolved.name}"
    _refuse_changed(config, "on_policy", type(config.on_policy).model_fields, where)
    if spec.action_kind != "continuous":
        _refuse_changed(config, "rollout", ["action_noise"], f"{where} with {spec.action_kind} actions")
    if replay.hindsight and (sequences or options.n_step > 1 or spec.frame_stack > 1):
        raise ValueError(
            f"replay.hindsight: {replay.hindsight} is for transitions of one step, without stacks of frames; set "
            "algorithm.n_step and env.frame_stack to 1, or remove it"
        )
    fragment_steps, num_envs = config.rollout.max_fragment_steps, config.env.num_envs
    stride = sequences.stride if sequences else 1
    if fragment_steps < stride:
        raise ValueError(
            f"rollout.max_fragment_steps: {fragment_steps} is less than the stride of {stride} steps between "
            f"sequences; use at least {stride}, or a larger algorithm.overlap"
        )
    if options.n_step > fragment_steps:
        raise ValueError(
            f"algorithm.n_step: {options.n_step} is longer than a fragment, rollout.max_fragment_steps "
            f"{fragment_steps}; use at most {fragment_steps}"
        )
    if config.rollout.random_until_learned and not resolved.can_start_at_random:
        raise ValueError(
            f"rollout.random_until_learned: true, but random play records no recurrent states, which {resolved.name} "
            "needs; remove it"
        )
    repeated = 0 if sequences else options.n_step - 1  # steps of the fragment before, whose sums it completes
    largest = (longest_fragment_steps(config.rollout, sequences) + repeated) * num_envs
    if sequences is not None and sequences.length > replay.capacity:
        raise ValueError(
            f"replay.capacity: {replay.capacity} cannot hold one sequence of {sequences.length} steps; use at "
            f"least {max(largest, sequences.length)}"
        )
    if largest > replay.capacity:
        most = (replay.capacity // num_envs - repeated) // stride * stride
        remedy = f"use at most {most}" if most > 0 else f"use replay.capacity {largest}"
        strides = f", in strides of {stride}," if stride > 1 else ""
        raise ValueError(
            f"rollout.max_fragment_steps: {fragment_steps} steps of {num_envs} environments{strides} exceed "
            f"replay.capacity {replay.capacity}; {remedy}"
        )
    are_images = spec.observation_dtype == "uint8"
    if replay.observations == "compressed" and not are_images:
        raise ValueError(
            f"replay.observations: compressed is for images, but {spec.env_id} has observations "
            f"{spec.observation_dtype} {list(spec.observation_shape)}; use dense"
        )
    if not is_compressed(replay, spec, sequences):
        _refuse_changed(config, "replay", ["threads"], "on observations that are stored dense")
    if replay.observations == "dense":
        _refuse_changed(config, "replay", ["memory_bytes"], "on observations: dense")
    if not are_images:
        _refuse_changed(config, "replay", ["memory_bytes"], "on observations that are not images")


def _check_on_policy(config: RunConfig, resolved: base.Resolved, processes: int) -> None:
    """Check the settings of an on-policy run.

    Raises:
        ValueError: settings contradict, or one has no effect.
    """
    options, batch_size, num_envs = config.on_policy, resolved.config.batch_size, config.env.num_envs
    collect, max_staleness, name = options.collect, options.max_staleness, resolved.name
    if collect == "async" and max_staleness < 1:
        raise ValueError(
            "on_policy.max_staleness: 0 cannot be met while play goes on during learning; use 1, or "
            "on_policy.collect: sync"
        )
    if options.forced_lag > max_staleness:
        raise ValueError(
            f"on_policy.max_staleness: {max_staleness} is below on_policy.forced_lag {options.forced_lag}; "
            f"use at least {options.forced_lag}"
        )
    if num_envs * processes > batch_size:
        most = batch_size // processes
        remedy = f"env.num_envs {most}" if most else f"algorithm.batch_size {num_envs * processes}"
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise ValueError(
            f"env.num_envs: one step of {num_envs} environments{each} exceeds algorithm.batch_size {batch_size}, so "
            f"on_policy.max_staleness {max_staleness} cannot hold; use {remedy}"
        )
    if options.stale == "correct" and not resolved.config.corrects_staleness:
        which, remedy = name, "on_policy.stale: drop"
        if estimator := getattr(resolved.config, "estimator", None):
            which, remedy = f"estimator {estimator}", f"algorithm.estimator vtrace, or {remedy}"
        raise ValueError(
            f"on_policy.stale: correct needs importance weights, which {which} does not have; use {remedy}"
        )
    if collect == "sync" and options.forced_lag:
        raise ValueError(
            f"on_policy.forced_lag: {options.forced_lag} needs play during learning; use on_policy.collect: async"
        )
    if collect == "sync" and options.stale == "correct":
        where = f"on {name} with collect: sync and stale: correct"
        _refuse_changed(config, "on_policy", ["max_staleness"], where)
    if config.rollout.random_until_learned:
        raise ValueError(
            f"rollout.random_until_learned: true, but {name} cannot learn from random actions; remove it"
        )
    where = f"on algorithm {name}"
    off_policy = [
        option for option in type(config.replay).model_fields if option not in ("max_bytes", "retain")
    ]
    _refuse_changed(config, "rollout", ["action_noise"], where)
    _refuse_changed(config, "replay", off_policy, where)
    _refuse_changed(config, "learner", ["publish_every_s", "lockstep"], where)


def _check_self_play(config: RunConfig, resolved: base.Resolved) -> None:
    """Check the settings of self-play.

    Raises:
        ValueError: one has no effect, or the policy cannot be an opponent.
    """
    if not resolved.spec.is_two_player:
        _refuse_changed(
            config, "self_play", type(config.self_play).model_fields, "but in a game of two players"
        )
    elif config.self_play.opponents == "latest":
        _refuse_changed(config, "self_play", ["latest_share", "pool"], "with self_play.opponents: latest")
    elif config.self_play.opponent_share == 1:
        names = ["opponents", "latest_share", "pool"]
        _refuse_changed(config, "self_play", names, "with self_play.opponent_share: 1")
    if resolved.spec.is_two_player and resolved.policy().initial_state(1):
        raise ValueError(
            f"algorithm.name: {resolved.name} has a recurrent state here, which opponents do not keep; use a network "
            "without one"
        )


def _refuse_changed(config: RunConfig, section: str, names: Iterable[str], where: str) -> None:
    """Refuse settings that differ from their default but have no effect here.

    Raises:
        ValueError: one has another value.
    """
    part: Section = getattr(config, section)
    for name in names:
        default = type(part).model_fields[name].default
        if (value := getattr(part, name)) not in (default, FORMER_DEFAULTS.get(f"{section}.{name}", default)):
            raise ValueError(f"{section}.{name}: {value} has no effect {where}; remove it")


def create(
    client: Redis,
    config: RunConfig,
    spaces: EnvSpec,
    *,
    initial: tuple[str, bytes] | None = None,
    state: tuple[str, bytes] | None = None,
) -> str:
    """Create the run: from now on learners and workers find it. Return its id.

    Args:
        client: connection to the server.
        config: of the run.
        spaces: as `prepare` returned them.
        initial: name of the source of the initial weights, and the weights as safetensors; None: random weights.
        state: as of `initial_weights.learner_state`; initial weights replace those that it has.

    Raises:
        ConfigError: the server's memory cannot hold what the run may need, or it cannot give its durability.
    """
    if spaces.is_two_player and OPPONENT not in config.env.metrics:  # for the ratings
        env = config.env.model_copy(update={"metrics": (OPPONENT, *config.env.metrics)})
        config = config.model_copy(update={"env": env})
    config = named(config, spaces)
    check_memory(client, config)
    if reason := connection.why_not_durable(client, config.durability):
        raise ConfigError(f"durability: {config.durability}, but {reason}, or use durability process")
    queues = envs.queue_for("ddrl.rollout", config), envs.queue_for("ddrl.evaluate", config)
    versions = requirements.run_versions(config)
    begins: Any = {"initial": initial, "state": state}
    run = runs.create(client, config, spaces, queues=queues, versions=versions, **begins)
    if state is not None:
        text = f"begins with the networks and optimizers of {state[0]}"
        text += f", and the policy of {initial[0]}" if initial else ""
        runs.note(client, run, "warm start", text)
    return run


def named(config: RunConfig, spaces: EnvSpec) -> RunConfig:
    """Return a config that names the options in FORMER_OPTIONS, as it is to be stored."""
    own, options = base.resolve(config, spaces).config, dict(config.algorithm)
    options |= {name: getattr(own, name) for name in FORMER_OPTIONS.get(options["name"], {})}
    return config.model_copy(update={"algorithm": options})


def shadow_config(client: Redis, source: str, options: Sequence[str]) -> RunConfig:
    """Return the config of a shadow: that of the run that it shadows, with other settings.

    Args:
        client: connection to the server.
        source: the run that it shadows.
        options: settings, such as algorithm.name=td3; those of another algorithm begin with its defaults.
    """
    theirs, spaces = runs.config(client, source), runs.spaces(client, source)
    tree = theirs.model_dump(mode="json", by_alias=True) | {"name": f"{theirs.name[:40]}-shadow"}
    given = load({"algorithm": {"name": theirs.algorithm["name"]}, "env": {"id": theirs.env.id}}, [*options])
    if given.algorithm["name"] != theirs.algorithm["name"]:
        tree["algorithm"] = {"name": given.algorithm["name"]}
        tree |= (
            {name: {} for name in ("on_policy", "replay")} if base.resolve(theirs, spaces).on_policy else {}
        )
    return load(tree, [*options])


def config_of_data(client: Redis, source: str, config: RunConfig) -> RunConfig:
    """Return the config of a run that learns from the experience of one that has ended.

    As nobody plays, nothing holds updates back: `replay.samples_per_insert` is as good as none.

    Raises:
        ConfigError: it is for another environment.
    """
    theirs = runs.config(client, source)
    if config.env.id != theirs.env.id:
        raise ConfigError(f"env.id: {config.env.id}, but the data are of {theirs.env.id}; name that one")
    replay = config.replay.model_copy(update={"samples_per_insert": UNLIMITED})
    return config.model_copy(update={"env": theirs.env, "rollout": theirs.rollout, "replay": replay})


def create_shadow(client: Redis, source: str, config: RunConfig) -> str:
    """Create a run that learns from the experience of another one, which nobody plays but that one; return its id.

    Raises:
        ConfigError: it cannot learn from what that run plays, or settings of play differ.
    """
    theirs, spaces = runs.config(client, source), runs.spaces(client, source)
    for name in ("env", "rollout"):
        if getattr(config, name) != getattr(theirs, name):
            raise ConfigError(f"{name}: a shadow plays nothing; leave it as {source} has it")
    ours, recorded = base.resolve(config, spaces), base.resolve(theirs, spaces)
    if ours.on_policy or ours.sequences not in (None, recorded.sequences):
        raise ConfigError(
            f"algorithm.name: {ours.name} cannot learn from what {recorded.name} plays; choose one that is off-policy "
            "and not recurrent"
        )
    check(config, spaces)
    check_memory(client, config)
    queues = runs.NOBODY, envs.queue_for("ddrl.evaluate", config)
    versions = requirements.run_versions(config)
    run = runs.create(client, config, spaces, queues=queues, versions=versions, reads=source)
    runs.note(client, run, "shadow", f"of {source}")
    return run


def check_memory(client: Redis, config: RunConfig, *, run: str | None = None) -> None:
    """Refuse a run whose stream, weights and checkpoints exceed the server's memory, beside other runs' streams.

    Args:
        client: connection to the server.
        config: of the run.
        run: its id if it exists already.

    Raises:
        ConfigError: they exceed it.
    """
    maxmemory = connection.maxmemory(client)  # 0: no limit
    others = runs.reserved_bytes(client, but=run)
    needed = int(config.replay.max_bytes) + int(config.weights.max_bytes) + CHECKPOINTS_BYTES
    if 0 < maxmemory < needed + others:
        also = f", the streams of other runs {others >> 20} MiB," if others else ""
        raise ConfigError(
            f"replay.max_bytes: {config.replay.max_bytes.human_readable()}; with weights and checkpoints the run needs "
            f"{needed >> 20} MiB{also or ','} but the server's maxmemory is {maxmemory >> 20} MiB; lower "
            "replay.max_bytes or raise maxmemory"
        )
