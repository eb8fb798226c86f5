"""Requirements of a run on a machine: extras, modules, versions, and the queue named after them."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from support.runs import target_config

import ddrl
from ddrl import envs
from ddrl.config import EnvConfig, validate
from ddrl.envs import EnvError, requirements


@pytest.mark.parametrize(
    ("env_id", "extra"),
    [
        ("LunarLander-v3", "box2d"),
        ("Ant-v5", "mujoco"),
        ("ALE/Pong-v5", "atari"),
        ("pettingzoo/classic/rps-v2", "pettingzoo"),
    ],
)
def test_missing_extra_names_the_command(env_id: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvError, match=rf"^{env_id}: needs \w+; run pip install 'ddrl\[{extra}\]'"):
        envs.make_one(EnvConfig(id=env_id))
    assert extra not in envs.capabilities()


def test_requirement_knows_every_registered_environment() -> None:
    """The table of names against what Gymnasium itself says where the class lives."""
    for env_id, registered in gymnasium.registry.items():
        path = str(registered.entry_point).partition(":")[0].split(".")
        if path[0] == "gymnasium" and not env_id.startswith(("phys2d/", "tabular/", "ddrl/", "GymV")):
            expected = next((extra for extra in ("box2d", "mujoco") if extra in path), None)
            assert envs.requirement(env_id) == expected, env_id


def test_capabilities_are_extras_and_packages_of_allowed_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "my_pkg.envs, other,, my_pkg")
    found = envs.capabilities()
    assert found == sorted(set(found))
    assert {"my_pkg", "other"} <= set(found) <= {"my_pkg", "other", "box2d", "atari", "mujoco", "pettingzoo"}


@pytest.mark.parametrize(
    ("env_id", "code", "queue"),
    [
        ("CartPole-v1", None, "ddrl.rollout"),
        ("CartPole-v1", "mlp", "ddrl.rollout"),
        ("LunarLander-v3", None, "ddrl.rollout.box2d"),
        ("PongNoFrameskip-v4", None, "ddrl.rollout.atari"),
        ("my_pkg:make", None, "ddrl.rollout.my_pkg"),
        ("ALE/Pong-v5", "my_nets.wide:make", "ddrl.rollout.atari+my_nets"),
        ("my_pkg.envs:make", "my_pkg.nets:make", "ddrl.rollout.my_pkg+my_pkg"),
        ("CartPole-v1", "my_nets:make", "ddrl.rollout+my_nets"),
        ("CartPole-v1", "my_pkg.mine", "ddrl.rollout+my_pkg"),
        ("CartPole-v1", "wrapper of my_pkg.envs:Wide", "ddrl.rollout+my_pkg"),
    ],
)
def test_a_worker_that_has_all_it_takes_serves_the_queue_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch, env_id: str, code: str | None, queue: str
) -> None:
    """The user's code is a network, a wrapper, or an algorithm beside a network of another package."""
    env: dict[str, Any] = {"id": env_id}
    algorithm: dict[str, Any] = {"name": "ppo"} if code is None else {"name": "ppo", "network": code}
    if code is not None and code.startswith("wrapper of "):
        algorithm = {"name": "ppo"}
        wrappers = ("gymnasium.wrappers:ClipReward", code.removeprefix("wrapper of "))
        env["wrappers"] = [{"id": one} for one in wrappers]
    elif code is not None and "." in code and ":" not in code:
        algorithm = {"name": code, "network": "my_nets:make"}
    config = validate({"env": env, "algorithm": algorithm})
    assert envs.queue_for("ddrl.rollout", config) == queue
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "my_pkg.envs,my_pkg.nets,my_nets.wide")
    assert envs.queues("ddrl.rollout").count(queue) == 1
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    assert (queue in envs.queues("ddrl.rollout")) == ("my_" not in queue)


@pytest.mark.parametrize(
    ("env_id", "network", "packages"),
    [
        ("CartPole-v1", "mlp", set()),
        ("LunarLander-v3", "numpy.linalg:norm", {"box2d", "numpy"}),
        ("bad_envs:make", "mlp", set()),  # no package installed it
    ],
)
def test_versions_are_those_of_what_decides_how_a_run_is_played(
    env_id: str, network: str, packages: set[str]
) -> None:
    config = target_config(env={"id": env_id}, algorithm={"name": "ppo", "network": network})
    found = requirements.run_versions(config)
    assert set(found) == {"ddrl", "gymnasium", *packages}
    assert requirements.version_mismatch(found, "h") is None


def test_a_mismatch_names_host_package_both_versions_and_the_remedy() -> None:
    assert requirements.version_mismatch({"ddrl": "0.0.9"}, "h1") == (
        f"host h1: ddrl is {ddrl.__version__}, the run was submitted with 0.0.9; "
        "run pip install 'ddrl==0.0.9' there and restart the worker, or submit with env.same_versions=false"
    )
    found = requirements.version_mismatch({"no-such-package": "1.0"}, "h1")
    assert found is not None and "no-such-package is not installed" in found
