"""Runs that begin with another's policy: what is taken over, what starts fresh, what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.algorithms import CONTINUOUS, CPU, DISCRETE
from support.learners import make_learner, take, training, until
from support.runs import play_steps, start, target_config, target_tree
from support.subjects import SMALL, SPECS, Subject
from test_cli import call, call_json

from ddrl import codec, policy
from ddrl.algorithms import base
from ddrl.cli import main
from ddrl.config import ConfigError, RunConfig, validate
from ddrl.policy import LoadedPolicy
from ddrl.runs.initial_weights import initial_weights
from ddrl.store import connection, runs, stream, weights
from ddrl.types import EnvSpec
from ddrl.worker.segment import Players, play

CASES: list[tuple[str, dict[str, Any], str]] = [  # algorithm, options, what starts fresh
    ("sac", {}, "critics, temperature and optimizers start fresh"),
    ("dqn", {}, "the optimizer starts fresh, and epsilon at 1 (algorithm.epsilon)"),
    ("dqn", {"noisy": True, "dueling": True}, "the optimizer starts fresh, and epsilon at 0 (algorithm.epsilon)"),
    ("dqn", {"epsilon_ladder": True}, "the optimizer starts fresh"),
    ("r2d2", {"epsilon": 0.1}, "the optimizer starts fresh, and epsilon at 0.1 (algorithm.epsilon)"),
    ("ppo", {"normalize_observations": True}, "the critic and the optimizer start fresh"),
    ("impala", {"shared": True}, "the critic's head and the optimizer start fresh"),
]  # fmt: skip
KEPT = {  # algorithm -> parts of a state that published weights do not hold
    "sac": ("critics.value", "target_critics.value", "temperature.value", "actor.exp_avg", "actor.step"),
    "dqn": ("network.exp_avg", "network.step", "num_updates"),
    "r2d2": ("network.exp_avg", "network.step", "num_updates"),
    "ppo": ("optimizer.exp_avg", "return_count", "num_steps"),
    "impala": ("optimizer.square_avg", "return_count", "num_steps"),
}


def trained(name: str, options: dict[str, Any]) -> Subject:
    subject = Subject(name, options)
    for number in range(3):
        subject.update(number)
    return subject


@pytest.mark.parametrize(("name", "options", "fresh"), CASES)
def test_starts_with_the_policy_and_the_rest_fresh(name: str, options: dict[str, Any], fresh: str) -> None:
    published = trained(name, options).learner.weights()
    subject, untouched = Subject(name, options), Subject(name, options).learner.state()
    assert subject.learner.load_initial_weights(published) == fresh
    found, state = subject.learner.weights(), subject.learner.state()
    assert found.keys() == published.keys()
    assert all(torch.equal(found[part], published[part]) for part in found if part != "epsilon")
    assert all(torch.equal(state[part], untouched[part]) for part in KEPT[name])
    if name in ("dqn", "r2d2"):
        assert torch.equal(state["target_network.value"], state["network.value"])
        assert float(found["epsilon"]) == pytest.approx(subject.config.epsilon)
    elif name in ("ppo", "impala"):
        net = subject.learner.network  # type: ignore[attr-defined]
        beside = Subject(name, options).learner.network.state_dict()  # type: ignore[attr-defined]
        critic = {part for part in beside if part.startswith(("critic.", "value_head."))}
        assert critic and all(torch.equal(net.state_dict()[part], beside[part]) for part in critic)
    assert subject.update(3) != Subject(name, options).update(3)


def test_published_statistics_of_observations_change_slowly() -> None:
    """The number that they are made of is not published: they count for many, so that the policy stays itself."""
    options = {"normalize_observations": True}
    published = trained("ppo", options).learner.weights()
    subject = Subject("ppo", options)
    subject.learner.load_initial_weights(published)
    for number in range(3):
        subject.update(number)
    after = subject.learner.weights()
    for part in ("observation_mean", "observation_std"):
        assert not torch.equal(after[part], published[part])
        torch.testing.assert_close(after[part], published[part], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_weights_of_another_network_change_nothing(name: str) -> None:
    published = Subject(name, {"hidden_sizes": (9, 9)}).learner.weights()
    subject = Subject(name, {})
    with pytest.raises(ValueError, match=r"shape \(.*\) in the state, \(.*\) here"):
        subject.learner.load_initial_weights(published)
    assert subject.update(0) == Subject(name, {}).update(0)


def loaded(algorithm: dict[str, Any], spaces: EnvSpec) -> LoadedPolicy:
    """A fresh policy as if a run had published it."""
    config = run_config(algorithm)
    resolved = base.resolve(config, spaces)
    published = {
        part: value.numpy() for part, value in resolved.learner(device=CPU, seed=3).weights().items()
    }
    return LoadedPolicy(resolved.policy(), config, spaces, "other-1", 7, published)


def run_config(algorithm: dict[str, Any]) -> RunConfig:
    return validate({"env": {"id": "Toy-v0"}, "algorithm": algorithm})


@pytest.mark.parametrize("name", sorted(SMALL))
def test_fitting_weights_are_passed_on_unchanged(name: str) -> None:
    algorithm = {"name": name, **SMALL[name]}
    source = loaded(algorithm, SPECS[name])
    other = run_config(algorithm | {"learning_rate": 1e-5, "gamma": 0.5})
    where, blob = initial_weights(source, other, replace(SPECS[name], env_id="Other-v0"))
    assert where == "other-1@7"
    found = weights.decode_weights(blob)
    assert found.keys() == source.weights.keys()
    assert all(np.array_equal(found[part], source.weights[part]) for part in found)


def test_actor_critics_share_their_policies() -> None:
    source = loaded({"name": "impala", "shared": True}, CONTINUOUS)
    config = run_config({"name": "ppo"})
    _, blob = initial_weights(source, config, CONTINUOUS)
    learner = base.resolve(config, CONTINUOUS).learner(device=CPU, seed=1)
    parts = weights.decode_weights(blob).items()
    learner.load_initial_weights({part: torch.from_numpy(array) for part, array in parts})


SMALLER = replace(DISCRETE, env_id="Small-v0", observation_shape=(2,))
FEWER = replace(DISCRETE, env_id="Few-v0", action_sizes=(3,))
PIXELS = replace(DISCRETE, env_id="Bytes-v0", observation_dtype="uint8")


@pytest.mark.parametrize(
    ("theirs", "there", "ours", "here", "message"),
    [
        ({"name": "dqn"}, DISCRETE, {"name": "ppo"}, DISCRETE,
         "is a policy of dqn, with which ppo cannot begin; set algorithm.name=dqn, or leave --from out"),
        ({"name": "dqn", "hidden_sizes": [64, 32]}, DISCRETE, {"name": "dqn"}, DISCRETE,
         "is [64, 3] there and [128, 3] here; set algorithm.hidden_sizes=[64, 32] as there"),
        ({"name": "sac", "hidden_sizes": [16]}, CONTINUOUS, {"name": "sac", "hidden_sizes": [16, 16]}, CONTINUOUS,
         "tensor weights.1 is [16, 4] there and [16, 16] here; set algorithm.hidden_sizes=[16] as there"),
        ({"name": "ppo"}, DISCRETE, {"name": "ppo"}, SMALLER,
         "tensor actor.layers.0.weight is [64, 3] there and [64, 2] here; Toy-v0 has observations float32 [3], "
         "Small-v0 float32 [2]: choose a policy of an environment with the same spaces"),
        ({"name": "ppo"}, DISCRETE, {"name": "impala"}, FEWER,
         "tensor policy_head.weight is [4, 64] there and [3, 64] here; Toy-v0 has actions discrete [] [4], Few-v0 "
         "discrete [] [3]"),
        ({"name": "ppo"}, DISCRETE, {"name": "ppo", "normalize_observations": True}, DISCRETE,
         "tensor observation_mean is missing there and [3] here; set algorithm.normalize_observations=False as there"),
        ({"name": "dqn", "noisy": True, "dueling": True}, DISCRETE, {"name": "dqn", "dueling": True}, DISCRETE,
         "set algorithm.noisy=True as there"),
        ({"name": "ppo", "activation": "relu"}, DISCRETE, {"name": "ppo"}, DISCRETE,
         "the same weights would be another policy here; set algorithm.activation=relu as there"),
        ({"name": "dqn", "distribution": "quantile"}, DISCRETE,
         {"name": "dqn", "distribution": "categorical"}, DISCRETE,
         "the same weights would be another policy here; set algorithm.distribution=quantile as there"),
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
    assert str(caught.value).startswith("--from other-1@7: ")


@pytest.fixture
def client(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The private server as the one that commands find; and an empty current folder."""
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    monkeypatch.chdir(tmp_path)
    return server.client


def determined(client: Any) -> str:
    """A run whose version 0 always goes as far up as it can."""
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 8)
    blob = weights.get(client, run, 0)
    assert blob is not None
    arrays = {name: array.copy() for name, array in weights.decode_weights(blob).items()}
    last = max(name for name in arrays if name.startswith("biases."))
    arrays[last][:] = (20.0, -20.0)  # mean, deviation
    blob = weights.encode_weights(arrays)
    weights.publish(client, run, token, version=1, blob=blob, allowance=10**6, updates=9)
    return run


def submit(*options: str, **sections: Any) -> str:
    """Start a run by the command, without workers and learner; its id."""
    Path("target.yaml").write_text(yaml.safe_dump(target_tree(**sections)), encoding="utf-8")
    return str(
        call_json("submit", "target.yaml", "--detach", "--no-learner", "--workers", "0", *options)["run"]
    )


def actions(client: Any, run: str) -> np.ndarray:
    fragments = [codec.decode(entry.fields) for entry in stream.read(client, run, b"0-0", count=1000)]
    return np.concatenate([fragment.action.ravel() for fragment in fragments])


@pytest.mark.parametrize("kind", ["version", "run", "file"])
def test_a_run_starts_from_initial_weights(client: Any, server: Any, kind: str) -> None:
    """Version 0 is that policy, plays by itself from the first step on, and the journal says what it is."""
    before = determined(client)
    call("export", f"{before}@1", "--output", "policy.safetensors")
    target = {"version": f"{before}@1", "run": before, "file": "policy.safetensors"}[kind]
    run = submit("--from", target)
    assert runs.state(client, run).warm == f"{before}@1"
    learner = make_learner(client, run, take(client, run), server.url)
    learner.restore()
    try:
        blobs = [weights.get(client, name, version) for name, version in ((before, 1), (run, 0))]
        found, expected = (weights.decode_weights(blob) for blob in blobs if blob is not None)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[part], expected[part]) for part in found)
        (entry,) = (row for row in runs.journal(client, run) if row["event"] == "warm start")
        assert entry["reason"] == f"begins with {before}@1; critics, temperature and optimizers start fresh"
        play(client, client, Players(), run)
        played = actions(client, run)
        assert len(played) >= 100 and played.min() > 0.99
        with training(learner):
            until(lambda: learner.shared.updates >= 3 and learner.shared.version >= 1)
    finally:
        learner.finish()
    assert len(client.keys(f"*{run}*initial")) == 1
    again = make_learner(client, run, take(client, run), server.url)
    again.restore()  # from its checkpoint, not from where it once began
    again.finish()
    assert again.shared.updates >= 3
    assert sum(row["event"] == "warm start" for row in runs.journal(client, run)) == 1


def test_without_initial_weights_version_0_acts_at_random(client: Any) -> None:
    run = submit()
    play_steps(client, run, take(client, run), 100)
    assert runs.state(client, run).warm == "" and runs.initial(client, run) is None
    assert actions(client, run).min() < 0.0


def test_the_command_refuses_in_one_line(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = determined(client)
    known = runs.names(client)
    refuse = _refusing(capsys)
    target_tree_ = yaml.safe_dump(target_tree())
    Path("target.yaml").write_text(target_tree_, encoding="utf-8")
    assert "is not a policy" in refuse("--from", "target.yaml")
    assert "cannot be read" in refuse("--from", "other.safetensors")
    assert "version 9 is not kept; kept are 0, 1" in refuse("--from", f"{before}@9")
    message = refuse("--from", before, "-s", "algorithm.hidden_sizes=[16, 16]")
    assert "tensor weights.0 is [" in message and "set algorithm.hidden_sizes=[32, 32] as there" in message
    message = refuse("--from", before, "-s", "rollout.random_until_learned=true")
    assert message.startswith("ddrl: error: rollout.random_until_learned: true would play at random instead")
    assert runs.names(client) == known  # nothing was created
    assert policy.from_run(client, before, 1).version == 1


def _refusing(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def refuse(*options: str) -> str:
        capsys.readouterr()
        assert main(["submit", "target.yaml", "--detach", "--no-learner", "--workers", "0", *options]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    return refuse
