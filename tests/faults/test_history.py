"""A small fleet is played, learned, and killed part by part; then its history is judged by tests/checker."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checker.history import ACCEPTED, NO_REPLY, Recorder
from checker.raw import Follower, Raw
from checker.tagged import LOG_VARIABLE
from checker.verdict import Rules, verdict
from redis import Redis
from support.private_server import PrivateServer, require_program
from support.processes import ROOT, Processes
from support.proxy import Proxy
from support.runs import start, target_tree

from ddrl.config import validate
from ddrl.store import checkpoints, connection, runs

pytestmark = pytest.mark.faults
# Slow, so that what is played in vain between a checkpoint and the next learner does not fill the replay: steps that
# leave it before the learner has made its updates again are rightly never drawn.
TAGGED = {"id": "checker.tagged:Tagged", "num_envs": 4, "kwargs": {"sleep_s": 0.005}}
NETWORK = {"network": "checker.tagged:network"}
ENDLESS: dict[str, Any] = {
    "env": TAGGED,
    "stop": {"return": 100.0, "time": 3600},
    "evaluation": {"every_s": 2, "near": 0},
    "rollout": {"max_fragment_steps": 10, "fragment_s": 0.5},  # 0.2 s each
    "learner": {"checkpoint_every_s": 4},  # trims fall between a checkpoint and a kill
}
OFF_POLICY = ENDLESS | {
    "algorithm": NETWORK | {"name": "dqn", "batch_size": 32},
    "replay": {"samples_per_insert": 4, "warmup_steps": 200, "slack_steps": 500, "capacity": 2_000},
}
PPO = NETWORK | {"name": "ppo", "estimator": "vtrace", "shared": True, "num_epochs": 2, "batch_size": 512}
ON_POLICY = ENDLESS | {
    "algorithm": PPO | {"minibatch_size": 256},
    "on_policy": {"stale": "correct"},
    "learner": {"checkpoint_every_s": 12},  # several iterations, so that not each is followed by one
}
KINDS = {
    "off-policy": (
        OFF_POLICY,
        Rules(samples_per_insert=4, capacity=2_000, warmup_steps=200, slack_steps=500),
    ),
    "on-policy": (ON_POLICY, Rules(epochs=2)),
}


class Recorded:
    """A fleet whose clients reach the server through a recording proxy."""

    def __init__(
        self, folder: Path, stack: contextlib.ExitStack, sections: dict[str, Any], rules: Rules
    ) -> None:
        self.rules = rules
        self.folder, self.recorder, self.logs = folder, Recorder(), folder / "steps"
        self.logs.mkdir()
        self.server = server = PrivateServer("--appendonly", "yes", "--appendfsync", "no")
        stack.callback(server.close)
        self.proxy = Proxy(server.url, tap=self.recorder.tap)
        stack.callback(self.proxy.close)
        self.processes = stack.enter_context(Processes(folder))
        self.env = {
            "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}",
            "DDRL_ALLOW_MODULES": "checker.tagged",
        }
        self.worker = self.processes.celery(self.proxy.url, env=self.env)
        self.learner = self.start_learner()
        tree = target_tree(**sections) | {"algorithm": sections["algorithm"]}
        self.run = start(server.client, validate(tree))
        raw = Redis(unix_socket_path=str(server.socket))
        self.follower = stack.enter_context(Follower(raw, self.run))

    def start_learner(self) -> Any:
        return self.processes.learner(self.proxy.url, env={**self.env, LOG_VARIABLE: str(self.logs)})

    def goes_on(self, fragments: int = 60) -> None:
        """Wait until so many more fragments are acknowledged, and updates made."""
        history, before = self.recorder.history, runs.state(self.server.client, self.run)
        known = len(history.appends)

        def has_gone_on() -> bool:
            with contextlib.suppress(*connection.UNREACHABLE):
                now = runs.state(self.server.client, self.run)
                return now.updates > before.updates and now.version > before.version
            return False

        self.until(lambda: len(history.appends) > known + fragments and has_gone_on())

    def trims(self) -> None:
        """Wait until the learner has had time to trim what it learned from after its newest checkpoint."""
        learned_at: dict[int, float] = {}  # of each checkpoint: when updates after it were first seen

        def has_trimmed() -> bool:
            pointer = checkpoints.newest_pointer(self.server.client, self.run)
            if not pointer or runs.state(self.server.client, self.run).updates <= pointer["meta"]["updates"]:
                return False
            return time.monotonic() - learned_at.setdefault(pointer["number"], time.monotonic()) > 1.0

        self.until(has_trimmed)

    def is_sent_again(self) -> bool:
        """Return whether a fragment is acknowledged whose first answer was lost."""
        appends = self.recorder.history.copy().appends
        lost = {one.name for one in appends if one.answer == NO_REPLY}
        return any(one.name in lost and one.answer in ACCEPTED for one in appends)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait; if the run ends meanwhile, which it should not, fail with what is wrong with it."""

        def has_ended() -> bool:
            with contextlib.suppress(*connection.UNREACHABLE):
                return runs.state(self.server.client, self.run).ended
            return False

        self.processes.until(lambda: condition() or has_ended())
        assert not has_ended(), "; ".join(["the run has ended", *self.judge()[0]])

    def judge(self) -> tuple[list[str], Raw]:
        """Return what is wrong, and what is stored."""
        raw = self.follower.finish(self.folder / "runs" / self.run)
        return verdict(self.recorder.history.copy(), raw, self.run, self.rules, self.logs), raw

    def settle(self) -> None:
        """End all processes in order; the run is paused while a fragment is played, which is appended then."""
        appends, client = self.recorder.history.appends, self.server.client
        is_appended_paused = False
        while not is_appended_paused:  # on a busy machine players may wait for the learner when it is paused
            runs.set_status(client, self.run, "active", "by the test")
            known = len(appends)
            self.until(lambda known=known: any(one.answer == "GO" for one in appends[known:]))
            runs.set_status(client, self.run, "paused", "by the test")
            known, until = len(appends), time.monotonic() + 2.0
            while not is_appended_paused and time.monotonic() < until:
                time.sleep(0.01)
                is_appended_paused = len(appends) > known
        self.worker.send_signal(signal.SIGTERM)
        self.worker.wait()
        self.learner.send_signal(signal.SIGTERM)
        self.learner.wait()


@pytest.fixture
def recorded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recorded]:
    require_program()
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "checker.tagged")
    with contextlib.ExitStack() as stack:
        yield Recorded(tmp_path, stack, *KINDS[request.param])


@pytest.mark.long
@pytest.mark.parametrize("recorded", KINDS, indirect=True)
def test_history(recorded: Recorded) -> None:
    fleet, server = recorded, recorded.server
    fleet.goes_on()
    fleet.recorder.loses_reply = True
    fleet.until(lambda: fleet.recorder.num_lost == 1)
    fleet.until(fleet.is_sent_again)  # before its sender is killed
    fleet.goes_on(2)
    os.kill(fleet.worker.pool()[0], signal.SIGKILL)
    fleet.goes_on()
    fleet.trims()
    fleet.recorder.loses_reply = True
    fleet.until(lambda: fleet.recorder.num_lost == 2)
    server.kill()  # before the fragment is sent again
    fleet.learner.kill()
    time.sleep(4.0)  # longer than a client tries one command
    server.start()
    fleet.learner = fleet.start_learner()  # one that begins without a server ends
    fleet.goes_on()
    fleet.settle()
    findings, raw = fleet.judge()
    assert not findings, "\n".join(findings)
    assert raw.weights and raw.cursor and raw.evaluations
