"""What a run needs of a worker, in the words of queues and versions; and what an ended process is called."""

from __future__ import annotations

import pytest
from support.runs import target_config

import ddrl
from ddrl import envs
from ddrl.envs import requirements
from ddrl.worker import watchdog


@pytest.mark.parametrize(
    ("env_id", "network", "queue"),
    [
        ("CartPole-v1", None, "ddrl.rollout"),
        ("CartPole-v1", "mlp", "ddrl.rollout"),
        ("LunarLander-v3", None, "ddrl.rollout.box2d"),
        ("ALE/Pong-v5", "my_nets.wide:make", "ddrl.rollout.atari+my_nets"),
        ("my_pkg.envs:make", "my_pkg.nets:make", "ddrl.rollout.my_pkg+my_pkg"),
        ("CartPole-v1", "my_nets:make", "ddrl.rollout+my_nets"),
    ],
)
def test_a_worker_that_has_all_it_takes_serves_the_queue_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch, env_id: str, network: str | None, queue: str
) -> None:
    assert envs.queue_for("ddrl.rollout", env_id, network) == queue
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


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("Worker exited prematurely: signal 11 (SIGSEGV) Job: 3.", "native code crashed"),
        ("Worker exited prematurely: signal 9 (SIGKILL) Job: 3.", "was killed (signal 9)"),
        ("Worker exited prematurely: signal 14 (SIGALRM) Job: 3.", "held the interpreter"),
        (f"Worker exited prematurely: exitcode {watchdog.UNREPORTED} Job: 3.", "its log says why"),
        ("Worker exited prematurely: exitcode 3 Job: 3.", "it ended by"),
    ],
)
def test_the_end_of_a_process_is_explained(status: str, words: str) -> None:
    explained = watchdog.explain(status)
    assert explained is not None and words in explained


def test_what_a_watchdog_has_reported_is_not_explained_again() -> None:
    assert watchdog.explain(f"Worker exited prematurely: exitcode {watchdog.REPORTED} Job: 3.") is None
