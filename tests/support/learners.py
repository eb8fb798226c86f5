"""Learners in a test's process: `Learner` with its two threads, and `learn` in a thread. Configs that they learn."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from support.runs import target_config
from support.store import take as take

from ddrl import celery
from ddrl.algorithms import base
from ddrl.config import RunConfig, validate
from ddrl.learner import run as run_module
from ddrl.learner.loop import Learner
from ddrl.store import connection, keys, runs
from ddrl.store.connection import connect_blocking
from ddrl.worker.segment import Players, play


def make_learner(client: Redis, run: str, token: int, url: str, **options: Any) -> Learner:
    """A learner that is not restored yet."""
    config = runs.config(client, run)
    resolved = base.resolve(config, runs.spaces(client, run))
    blocking = connect_blocking(url)
    return Learner(client, blocking, run, token, config, resolved, device=torch.device("cpu"), **options)


def restored(client: Redis, run: str, url: str, **options: Any) -> Learner:
    """The run's next learner, restored."""
    learner = make_learner(client, run, take(client, run), url, **options)
    learner.restore()
    return learner


@contextmanager
def training(learner: Learner, *, serves: bool = True) -> Iterator[list[str]]:
    """The learner's two threads, for as long as the context lasts; the outages that the publisher met.

    Args:
        serves: the publisher makes rounds.
    """
    failed: list[BaseException] = []
    outages: list[str] = []
    stop = threading.Event()

    def train() -> None:
        try:
            learner.train()
        except BaseException as error:
            failed.append(error)

    def serve() -> None:
        while not stop.wait(0.02):
            try:
                learner.publisher.round()
            except connection.OUTAGES as error:
                outages.append(connection.outage(error) or "")
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=train), threading.Thread(target=serve)][: 2 if serves else 1]
    for thread in threads:
        thread.start()
    try:
        yield outages
    finally:
        learner.stopping.set()
        threads[0].join()
        stop.set()
        threads[-1].join()
    assert not failed, failed


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def catch_up(client: Redis, run: str, learner: Learner) -> None:
    """Wait until all that was appended is admitted."""
    steps = runs.state(client, run).appended_steps
    until(lambda: learner.shared.env_steps >= steps)


def contents(learner: Learner) -> dict[str, np.ndarray]:
    """All items of a replay in order, which is valid, with their priorities if it has any."""
    replay = learner.replay
    replay.check_valid()
    items = vars(replay.plan(np.arange(replay.num_items))())
    return {name: value for name, value in items.items() if value is not None} | dict(replay.state())


def assert_equal_arrays(one: dict[str, Any], two: dict[str, Any]) -> None:
    """The same arrays bit by bit."""
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


class Crash(BaseException):
    """Ends a training thread as abruptly as a signal, between two operations."""


@contextmanager
def crashing(learner: Learner, crash_at: int | None) -> Iterator[threading.Event]:
    """Both threads of a learner; at update `crash_at` both stop where they are, and nothing is saved.

    Checkpoints follow one another without a pause, so that each falls elsewhere. The event: it has crashed.
    """
    crashed, update = threading.Event(), learner.algorithm.update
    failed: list[BaseException] = []

    def mortal(batch: Any) -> Any:
        if learner.shared.updates == crash_at:
            crashed.set()
            raise Crash
        return update(batch)

    def train() -> None:
        try:
            learner.train()
        except BaseException as error:
            crashed.set()
            if not isinstance(error, Crash):
                failed.append(error)

    def serve() -> None:
        while not crashed.wait(0.003) and not learner.stopping.is_set():
            learner.shared.wants_checkpoint.set()
            learner.publisher.round()

    learner.algorithm.update = mortal  # type: ignore[method-assign]
    threads = [threading.Thread(target=train), threading.Thread(target=serve)]
    for thread in threads:
        thread.start()
    try:
        yield crashed
    finally:
        learner.stopping.set()
        for thread in threads:
            thread.join()
        if crashed.is_set():
            learner.leave()
    assert not failed, failed


@contextmanager
def playing(url: str, run: str, *, num: int = 1, segments: int | None = None) -> Iterator[None]:
    """Processes, as threads, that play segment after segment; after so many another process takes its place."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def go() -> None:
        blocking, players, played = connect_blocking(url), Players(), 0
        try:
            while not stop.is_set():
                play(blocking, blocking, players, run)
                played += 1
                if played == segments:
                    players, played = Players(), 0
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=go) for _ in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed, failed


class Learning:
    """`learn` in a thread of this process, which sends workers nothing.

    Args:
        client: connection of the test.
        url: of the server.
        run: its id.
        folder: of the runs' folders.
        patch: ends with the test.
        take_over: ask the learner that holds the run for it.

    Attributes:
        status, error: how `learn` ended.
    """

    def __init__(
        self,
        client: Redis,
        url: str,
        run: str,
        folder: Path,
        patch: pytest.MonkeyPatch,
        *,
        take_over: bool = False,
    ) -> None:
        patch.setenv(connection.URL_VARIABLE, url)
        patch.setattr(celery, "send_rollout", lambda *_: None)
        self.client, self.run = client, run
        self.interrupt = run_module.Interrupt()
        self.error: Exception | None = None
        self.status: str | None = None

        def learn() -> None:
            try:
                self.status = run_module.learn(
                    connection.connect(url), run, folder, self.interrupt, take_over=take_over
                )
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=learn, daemon=True)
        self.thread.start()

    @property
    def state(self) -> runs.RunState | None:
        """The run's; None while the server does not know it."""
        with contextlib.suppress(runs.UnknownRunError):
            return runs.state(self.client, self.run)
        return None

    def holds_after(self, token: int) -> bool:
        """Whether the run is held with a later token."""
        return self.state is not None and self.state.leased and self.token > token

    @property
    def token(self) -> int:
        """The run's newest fencing token."""
        return int(self.client.hget(keys.state(self.run), "fence") or 0)

    def end(self) -> None:
        """Interrupt it, as a signal does."""
        self.interrupt.event.set()
        self.thread.join(30.0)
        assert not self.thread.is_alive()


# --- configs ---------------------------------------------------------------------------------------------


def pick_config(**sections: Any) -> RunConfig:
    """PPO on a toy with discrete actions; iterations of 64 transitions."""
    algorithm = {"name": "ppo", "batch_size": 64, "minibatch_size": 32, "num_epochs": 2, "hidden_sizes": [16]}
    config = target_config(
        env={"id": "ddrl/Pick-v0", "num_envs": 4},
        stop={"return": None},
        **{"algorithm": algorithm, **sections},
    )
    tree = config.model_dump(mode="json", by_alias=True)
    tree["algorithm"] = {**algorithm, **sections.get("algorithm", {})}
    tree["replay"] = {}
    tree["learner"]["publish_every_s"] = 1.0
    return RunConfig.model_validate(tree)


def value_config(env: dict[str, Any], algorithm: dict[str, Any], replay: dict[str, Any]) -> RunConfig:
    return validate(
        {
            "name": "value",
            "env": {"num_envs": 4, **env},
            "algorithm": algorithm,
            "rollout": {"segment_s": 0.5, "fragment_s": 0.05, "max_fragment_steps": 16},
            "replay": {"warmup_steps": 200, "slack_steps": 400, "samples_per_insert": 8, **replay},
            "learner": {
                "publish_every_s": 0.05,
                "checkpoint_every_s": 1,
                "metrics_every_s": 0.2,
                "device": "cpu",
            },
        }
    )


def catch_config() -> RunConfig:
    """DQN from stacked, compressed, prioritized images, gathered by threads; few enough to be evicted."""
    return value_config(
        {"id": "ddrl/Catch-v0", "kwargs": {"size": 5, "pixels": 10}, "frame_stack": 2},
        {
            "name": "dqn",
            "network": "conv",
            "hidden_sizes": [32],
            "learning_rate": 2e-3,
            "gamma": 0.9,
            "n_step": 2,
            "batch_size": 32,
            "prioritized": True,
            "importance_anneal_updates": 500,
            "target_period": 20,
            "epsilon_anneal_updates": 200,
        },
        {"capacity": 1500, "observations": "compressed", "threads": 2},
    )


def recall_config() -> RunConfig:
    """R2D2 on vectors: overlapping sequences with burn-in."""
    return value_config(
        {"id": "ddrl/Recall-v0", "kwargs": {"delay": 6}, "frame_stack": 2},
        {
            "name": "r2d2",
            "hidden_sizes": [16],
            "recurrent_size": 8,
            "sequence_length": 4,
            "overlap": 2,
            "burn_in": 2,
            "n_step": 2,
            "batch_size": 16,
            "target_period": 50,
        },
        {"capacity": 1500},
    )
