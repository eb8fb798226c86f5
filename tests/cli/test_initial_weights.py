"""Runs that begin with another's policy: what fits, what is refused with which remedy, and what such a run does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from support.algorithms import ALLOWED, CONTINUOUS, CPU, DISCRETE, SMALL
from support.commands import call, call_json, refused
from support.learners import Run, playing, restored, take, training, until
from support.private_server import PrivateServer
from support.runs import publish_initial, start, target_config

from ddrl import codec
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig, validate
from ddrl.policy import LoadedPolicy
from ddrl.runs.initial_weights import initial_weights, learner_state
from ddrl.store import runs, stream, weights
from ddrl.types import EnvSpec
from ddrl.worker.segment import Players, play


def run_config(algorithm: dict[str, Any]) -> RunConfig:
    return validate({"env": {"id": "Toy-v0"}, "algorithm": algorithm})


def loaded(algorithm: dict[str, Any], spaces: EnvSpec) -> LoadedPolicy:
    """A fresh policy as if a run had published it."""
    config = run_config(algorithm)
    resolved = base.resolve(config, spaces)
    published = resolved.learner(device=CPU, seed=3).weights()
    arrays = {part: value.numpy() for part, value in published.items()}
    return LoadedPolicy(resolved.policy(), config, spaces, "other-1", 7, arrays)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_fitting_weights_are_passed_on_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", ALLOWED)
    algorithm, spec = {"name": name, **SMALL[name]}, CONTINUOUS if name in ("sac", "td3", "bc") else DISCRETE
    source = loaded(algorithm, spec)
    other = run_config(algorithm | {"learning_rate": 1e-5, **({} if name == "bc" else {"gamma": 0.5})})
    where, blob = initial_weights(source, other, replace(spec, env_id="Other-v0"))
    assert where == "other-1@7"
    np.testing.assert_equal(dict(weights.decode_weights(blob)), source.weights)


def test_actor_critics_share_their_policies() -> None:
    config = run_config({"name": "ppo", "normalize_observations": False})
    _, blob = initial_weights(loaded({"name": "impala", "shared": True}, CONTINUOUS), config, CONTINUOUS)
    learner = base.resolve(config, CONTINUOUS).learner(device=CPU, seed=1)
    parts = weights.decode_weights(blob).items()
    learner.load_initial_weights({part: torch.from_numpy(array) for part, array in parts})


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE])
def test_iql_begins_with_a_policy_of_bc(spec: EnvSpec) -> None:
    config = run_config({"name": "iql"})
    _, blob = initial_weights(loaded({"name": "bc"}, spec), config, spec)
    learner = base.resolve(config, spec).learner(device=CPU, seed=1)
    arrays = weights.decode_weights(blob)
    learner.load_initial_weights({part: torch.from_numpy(array) for part, array in arrays.items()})
    assert all(np.array_equal(value, arrays[part]) for part, value in learner.weights().items())


def test_a_temperature_may_be_missing_or_unused() -> None:
    source = loaded({"name": "sac"}, CONTINUOUS)
    initial_weights(source, run_config({"name": "sac", "temperature": 0.2}), CONTINUOUS)
    fixed = loaded({"name": "sac", "temperature": 0.2}, CONTINUOUS)  # as policies of earlier versions
    assert source.weights.keys() - fixed.weights.keys() == {"log_temperature"}
    initial_weights(fixed, run_config({"name": "sac"}), CONTINUOUS)


SMALLER = replace(DISCRETE, env_id="Small-v0", observation_shape=(2,))
FEWER = replace(DISCRETE, env_id="Few-v0", action_sizes=(3,))
PIXELS = replace(DISCRETE, env_id="Bytes-v0", observation_dtype="uint8")


@pytest.mark.parametrize(
    ("theirs", "there", "ours", "here", "message"),
    [
        ({"name": "dqn"}, DISCRETE, {"name": "ppo"}, DISCRETE,
         "is a policy of dqn, with which ppo cannot begin; set algorithm.name=dqn, or begin without it"),
        ({"name": "dqn", "hidden_sizes": [64, 32]}, DISCRETE, {"name": "dqn"}, DISCRETE,
         "is [64, 3] there and [128, 3] here; set algorithm.hidden_sizes=[64, 32] as there"),
        ({"name": "sac", "hidden_sizes": [16]}, CONTINUOUS, {"name": "sac", "hidden_sizes": [16, 16]}, CONTINUOUS,
         "tensor weights.1 is [16, 4] there and [16, 16] here; set algorithm.hidden_sizes=[16] as there"),
        ({"name": "ppo"}, DISCRETE, {"name": "ppo"}, SMALLER,
         "tensor actor.layers.0.weight is [64, 3] there and [64, 2] here; Toy-v0 has observations float32 [3], "
         "Small-v0 float32 [2]: choose a policy of an environment with the same spaces"),
        ({"name": "ppo"}, DISCRETE, {"name": "ppo"}, FEWER,
         "tensor policy_head.weight is [4, 64] there and [3, 64] here; Toy-v0 has actions discrete [] [4], Few-v0 "
         "discrete [] [3]"),
        ({"name": "impala"}, DISCRETE, {"name": "ppo"}, DISCRETE,
         "tensor observation_mean is missing there and [3] here; set algorithm.normalize_observations=False as there"),
        ({"name": "dqn", "noisy": True, "dueling": True}, DISCRETE, {"name": "dqn", "dueling": True}, DISCRETE,
         "set algorithm.noisy=True as there"),
        ({"name": "ppo", "activation": "relu"}, DISCRETE, {"name": "ppo"}, DISCRETE,
         "the same weights would be another policy here; set algorithm.activation=relu as there"),
        ({"name": "dqn", "distribution": "quantile"}, DISCRETE,
         {"name": "dqn", "distribution": "categorical"}, DISCRETE,
         "the same weights would be another policy here; set algorithm.distribution=quantile as there"),
        ({"name": "discrete_sac", "form": "sqn", "average_critics": True}, DISCRETE,
         {"name": "discrete_sac", "form": "sqn"}, DISCRETE,
         "the same weights would be another policy here; set algorithm.average_critics=True as there"),
        ({"name": "ppo"}, DISCRETE, {"name": "ppo"}, PIXELS,
         "another policy here; Toy-v0 has observations float32 [3], Bytes-v0 uint8 [3]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_the_remedy(
    theirs: dict[str, Any], there: EnvSpec, ours: dict[str, Any], here: EnvSpec, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        initial_weights(loaded(theirs, there), run_config(ours), here)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("other-1@7: ")


def determined(client: Redis) -> str:
    """A run whose version 1 always goes as far up as it can."""
    run = start(client, target_config())
    token = take(client, run)
    publish_initial(client, run, token)
    arrays = published(client, run, 0)
    last = max(name for name in arrays if name.startswith("biases."))
    arrays[last] = np.array((20.0, -20.0), np.float32)  # mean, deviation
    blob = weights.encode_weights(arrays)
    weights.publish(client, run, token, version=1, blob=blob, allowance=10**6, updates=9)
    return run


def published(client: Redis, run: str, version: int) -> dict[str, np.ndarray]:
    return dict(weights.decode_weights(weights.get(client, run, version) or b""))


DETACHED = ("--detach", "--no-learner", "--workers", "0")


def test_a_run_starts_from_initial_weights(client: Redis, server: PrivateServer, target_file: str) -> None:
    """Version 0 is that policy, plays by itself from the first step on, and the journal says what it is."""
    before = determined(client)
    call("export", f"{before}@1", "--output", "policy.safetensors")
    for source in (f"{before}@1", before, "policy.safetensors"):
        run = call_json("submit", target_file, *DETACHED, "--from", source)["run"]
        assert runs.state(client, run).warm == f"{before}@1"
        learner = restored(client, run, server.url)
        np.testing.assert_equal(published(client, run, 0), published(client, before, 1))
        (entry,) = (row for row in runs.journal(client, run)[0] if row["event"] == "warm start")
        assert (
            entry["reason"]
            == f"begins with {before}@1; critics and optimizers start fresh, the temperature at 0.2"
        )
        if source != "policy.safetensors":
            learner.finish()
    try:
        play(client, client, Players(), run)
        played = [codec.decode(entry.fields).action for entry in stream.read(client, run, b"0-0", count=1000)]
        assert sum(action.size for action in played) >= 100 and min(map(np.min, played)) > 0.99
        with training(learner):
            until(lambda: learner.shared.updates >= 3 and learner.shared.version >= 1)
    finally:
        learner.finish()
    assert len(client.keys(f"*{run}*initial")) == 1
    again = restored(client, run, server.url)  # from its checkpoint, not from its initial weights
    again.finish()
    assert again.shared.updates >= 3
    assert sum(row["event"] == "warm start" for row in runs.journal(client, run)[0]) == 1


LEFT = {"stop": {"return": None, "time": 600}}


@pytest.mark.parametrize(
    "config",
    [
        target_config(**LEFT),
        target_config(algorithm={"prioritized": True}, **LEFT),
        target_config(algorithm={"name": "ppo", "batch_size": 64, "minibatch_size": 32}, **LEFT),
    ],
    ids=["replay", "prioritized", "on-policy"],
)
def test_a_run_goes_on_from_another_ones_learner(server: PrivateServer, config: RunConfig) -> None:
    """With its networks and optimizers, but with an empty replay, from version 0 and update 0 on."""
    before = Run(server, config)
    assert learner_state(server.client, before.id, begins_anew=False) is None
    learner = before.learner()
    with training(learner), playing(server.url, before.id):
        until(lambda: learner.shared.updates >= 20)
    learner.finish()  # saves a checkpoint
    begin = learner_state(server.client, before.id, begins_anew=False)
    assert begin is not None and begin.source == f"{before.id}, update {learner.shared.updates}"
    assert begin.spent["updates"] == learner.shared.updates
    run = start(server.client, config, state=(begin.source, begin.blob))
    after = Run(server, run=run)
    follower = after.learner()
    try:
        there, here = learner.algorithm.state(), follower.algorithm.state()
        assert there.keys() == here.keys() and int(there["num_updates"]) >= 20
        for name in there.keys() - {"num_updates"}:
            assert torch.equal(there[name], here[name]), name
        assert (
            follower.shared.updates == follower.algorithm.num_updates == 0
            and after.state.warm == begin.source
        )
        np.testing.assert_equal(
            published(server.client, run, 0),
            {name: value.numpy() for name, value in learner.algorithm.weights().items()},
        )
        with training(follower), playing(server.url, run):
            until(lambda: follower.shared.updates >= 3 and follower.shared.version >= 1)
    finally:
        follower.finish()
    again = after.learner()  # from its own checkpoint
    again.finish()
    assert again.shared.updates >= 3
    after.audit()


def test_the_schedules_of_a_branch_begin_anew(client: Redis, server: PrivateServer) -> None:
    ppo = {"name": "ppo", "batch_size": 64, "minibatch_size": 32} | {
        "final_learning_rate": 0.0,
        "anneal_steps": 100,
    }
    before = Run(server, target_config(algorithm=ppo, **LEFT))
    learner = before.learner()
    with training(learner), playing(server.url, before.id):
        until(lambda: learner.algorithm.num_steps > 100)
    learner.finish()
    assert learner.algorithm.scheduled("learning_rate") == 0.0
    run = call_json("branch", f"{before.id}@0", *DETACHED)["run"]
    follower = Run(server, run=run).learner()
    assert follower.algorithm.scheduled("learning_rate") > 0.0
    follower.finish()


def test_a_branch_has_the_policy_of_its_version_and_the_rest_of_the_checkpoint(
    client: Redis, server: PrivateServer
) -> None:
    before = Run(server, target_config(**LEFT))
    learner = before.learner()
    with training(learner), playing(server.url, before.id):
        until(lambda: learner.shared.updates >= 20)
    learner.finish()
    options = ("-s", "algorithm.learning_rate=1e-4", "-s", "stop.time=5m")
    run = call_json("branch", f"{before.id}@0", *DETACHED, *options)["run"]
    config = runs.config(client, run)
    assert float(config.algorithm["learning_rate"]) == 1e-4 and config.stop.time == 300
    assert (
        config.env == runs.config(client, before.id).env and runs.state(client, run).warm == f"{before.id}@0"
    )
    follower = Run(server, run=run).learner()
    try:
        np.testing.assert_equal(published(client, run, 0), published(client, before.id, 0))
        there, here = learner.algorithm.state(), follower.algorithm.state()
        same = {name for name in there if torch.equal(there[name], here[name])}
        others = {name.split(".")[0] for name in there.keys() - same}
        assert others <= {
            "actor",
            "temperature",
            "num_updates",
        }  # these are the version's; critics the checkpoint's
        assert [name for name in there.keys() - same if name.startswith("actor")]
        reasons = [row["reason"] for row in runs.journal(client, run)[0] if row["event"] == "warm start"]
        where = f"{before.id}, update {learner.shared.updates}, and the policy of {before.id}@0"
        assert reasons == [f"begins with the networks and optimizers of {where}"]
    finally:
        follower.finish()
    other = refused("branch", f"{before.id}@0", *DETACHED, "-s", "env.id=Pendulum-v1")
    assert "observations" in other and "choose a policy of an environment with the same spaces" in other


def test_the_command_refuses_in_one_line_and_creates_nothing(client: Redis, target_file: str) -> None:
    before = determined(client)
    options = (*DETACHED, "--from", before, "-s", "rollout.random_until_learned=true")
    line = refused("submit", target_file, *options)
    assert "rollout.random_until_learned: true would play at random instead" in line
    assert runs.names(client) == [before]
