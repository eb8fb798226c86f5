"""Runs with players and learners in a test's process: `Learner` with its two threads, and `learn` in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from support.private_server import PrivateServer, until
from support.processes import bound
from support.runs import play_steps, start, target_config
from support.store import events, take

from ddrl import celery
from ddrl.algorithms import base
from ddrl.config import RunConfig
from ddrl.learner import run as run_module
from ddrl.learner.core import Core
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, connection, keys, ledger, metrics, quarantine, runs, stream, weights
from ddrl.store.connection import connect_blocking
from ddrl.worker.segment import Players, play


def restored(
    client: Redis, run: str, url: str, *, token: int | None = None, restores: bool = True, **options: Any
) -> Learner:
    """Return a run's next learner, or the one of a token; restored unless that is not wanted."""
    config, token = runs.config(client, run), token or take(client, run)
    learner = Learner(client, token, Core(connect_blocking(url), run, config), **options)
    if restores:
        learner.restore()
    return learner


def resolve(client: Redis, run: str) -> base.Resolved:
    """Return the algorithm and the spaces of a run."""
    return base.resolve(runs.config(client, run), runs.spaces(client, run))


def fields_of(entry: stream.Entry) -> dict[bytes, bytes]:
    """Return the fields that a player appended, without those that the append added."""
    return {name: value for name, value in entry.fields.items() if len(name) > 1 or name == b"h"}


class Run:
    """A run on a private server, which a test plays and learns: a new one, or the one of the id `run`."""

    def __init__(self, server: PrivateServer, config: RunConfig | None = None, *, run: str = "") -> None:
        self.server, self.client, self.url = server, server.client, server.url
        self.id = run or start(server.client, config or target_config())
        self.players = Players()

    def play(self, steps: int, *, anew: bool = False) -> None:
        """Append at least so many more transitions, whatever the pace allows, by the former producer or a new one."""
        self.players = Players() if anew else self.players
        play_steps(self.client, self.id, 0, steps, players=self.players)

    def begin_together(self, num: int) -> None:
        """Append a first fragment of 256 transitions, the same, by each of so many producers."""
        self.play(256)
        fields = fields_of(self.entries[0])
        for _ in range(num - 1):
            producer = stream.new_producer(self.client, self.id)
            self.append(fields, producer=producer, seq=0, num_transitions=256)

    def append(self, fields: dict[bytes, bytes], **options: Any) -> None:
        """Append a fragment of 8 transitions by another producer."""
        stream.append(self.client, self.id, fields, **{"incarnation": 1, "num_transitions": 8} | options)

    def take(self, **options: Any) -> int:
        """Return the next fencing token, whoever holds the run."""
        return take(self.client, self.id, **options)

    def learner(self, **options: Any) -> Learner:
        """Return the run's next learner, restored."""
        return restored(self.client, self.id, self.url, **options)

    def catch_up(self, learner: Learner) -> None:
        """Wait until all that was appended is admitted or refused."""
        [(newest, _)] = self.client.xrevrange(keys.experience(self.id), count=1)

        def is_read() -> bool:
            return stream.order(learner.shared.counted[0]) >= stream.order(newest)

        until(is_read)

    @property
    def state(self) -> runs.RunState:
        return runs.state(self.client, self.id)

    @property
    def token(self) -> int:
        """The newest fencing token."""
        return int(self.client.hget(keys.state(self.id), "fence") or 0)

    @property
    def index(self) -> weights.WeightsIndex:
        return weights.index(self.client, self.id)

    @property
    def rows(self) -> list[dict[str, float]]:
        """The learner's metrics."""
        return metrics.read(self.client, self.id)[0]

    @property
    def entries(self) -> list[stream.Entry]:
        return stream.read(self.client, self.id, b"0-0", count=100_000)

    @property
    def dead(self) -> list[bytes]:
        """The reasons for which entries were refused."""
        return [fields[b"reason"] for _, fields in self.client.xrange(keys.dead(self.id))]

    @property
    def journal(self) -> list[str]:
        return events(self.client, self.id)

    @property
    def meta(self) -> dict[str, Any]:
        """The counters of the newest checkpoint; empty if there is none."""
        return (checkpoints.newest_pointer(self.client, self.id) or {"meta": {}})["meta"]

    def keys(self) -> dict[bytes, bytes]:
        """All keys of the run but the lease and the log lines, which need no lease."""
        others = {keys.lease(self.id).encode(), keys.logs(self.id).encode()}
        found = set(self.client.scan_iter(match=keys.run_pattern(self.id))) - others
        return {key: self.client.dump(key) for key in found}

    def audit(self) -> ledger.Audit:
        """The audit, which is balanced."""
        audit = ledger.audit(self.client, self.id)
        assert audit.is_balanced
        return audit


def go_back(run: Run, version: int) -> dict[str, np.ndarray]:
    """Have a run go back to a version; return its weights."""
    blob = weights.get(run.client, run.id, version)
    assert blob is not None
    entry = {
        "event": "rollback",
        "option": "version",
        "from": run.index.latest,
        "to": version,
        "env_steps": 1,
    }
    quarantine.change(run.client, run.id, quarantine.read(run.client, run.id)[1], (), entry, blob)
    return weights.decode_weights(blob)


@contextmanager
def in_threads(*actions: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    """Run each action in a thread; at the end call `stop`, join the threads, and fail with what they raised."""
    failed: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop()
        for thread in threads:
            thread.join()
        assert not failed, failed  # the cause, if the block has failed too


@contextmanager
def training(learner: Learner, *, serves: bool = True) -> Iterator[list[str]]:
    """Run the learner's two threads; yield the outages that the publisher meets.

    Args:
        serves: the publisher makes rounds.
    """
    outages: list[str] = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.wait(0.02):
            try:
                learner.publisher.round()
            except connection.OUTAGES as error:
                if (reason := connection.outage(error)) is None:
                    raise
                outages.append(reason)

    service = in_threads(*[serve] * serves, stop=stop.set)
    with service, in_threads(learner.train, stop=learner.stopping.set):
        yield outages


@contextmanager
def finished(run: Run) -> Iterator[Learner]:
    """Let the run's next learner learn while the context lasts, and then finish."""
    learner = run.learner()
    with training(learner):
        yield learner
    learner.finish()


def contents(learner: Learner) -> dict[str, np.ndarray]:
    """Return all items of a replay in order, which is valid, with their priorities if it has any.

    Ids of entries, which the server's clock gives, are left out.
    """
    replay = learner.replay
    replay.check_valid()
    items = vars(replay.plan(np.arange(replay.num_items))())
    state = {name: value for name, value in replay.state().items() if name != "entry"}
    return {name: value for name, value in items.items() if value is not None} | state


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Print how long the block takes, and fail if that is longer than `bound(seconds)`."""
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    print(f"{what}: {took_s:.1f} s")
    assert took_s < bound(seconds)


class Crash(BaseException):
    """Ends a training thread as abruptly as a signal, between two operations."""


@contextmanager
def crashing(learner: Learner, crash_at: int | None) -> Iterator[threading.Event]:
    """Run both threads of a learner; at update `crash_at` both stop where they are, and nothing is saved.

    Checkpoints follow one another without a pause, so that each falls elsewhere. The event: it has crashed.
    """
    crashed, update = threading.Event(), learner.algorithm.update

    def update_or_crash(batch: Any) -> Any:
        if learner.shared.updates == crash_at:
            raise Crash
        return update(batch)

    def train() -> None:
        try:
            learner.train()
        except BaseException as error:
            crashed.set()
            if not isinstance(error, Crash):
                raise

    def serve() -> None:
        while not crashed.wait(0.003) and not learner.stopping.is_set():
            learner.shared.wants_checkpoint.set()
            learner.publisher.round()

    learner.algorithm.update = update_or_crash  # type: ignore[method-assign]
    try:
        with in_threads(train, serve, stop=learner.stopping.set):
            yield crashed
    finally:
        if crashed.is_set():
            learner.close()


@contextmanager
def playing(url: str, run: str, *, num: int = 1, segments: int | None = None) -> Iterator[None]:
    """Play in threads, segment after segment; after `segments` another process takes a thread's place."""
    stop = threading.Event()

    def go() -> None:
        blocking, players, played = connect_blocking(url), Players(), 0
        while not stop.is_set():
            play(blocking, blocking, players, run)
            played += 1
            if played == segments:
                players, played = Players(), 0

    with in_threads(*[go] * num, stop=stop.set):
        yield


class Learning:
    """`learn` in a thread of this process, which sends workers nothing.

    Args:
        run: to learn.
        folder: of the runs' folders.
        patch: ends with the test.
        serves: learn every run that waits, with `serve`.
        options: of `learn`.

    Attributes:
        status, error: how `learn` ended.
    """

    def __init__(
        self, run: Run, folder: Path, patch: pytest.MonkeyPatch, *, serves: bool = False, **options: bool
    ) -> None:
        patch.setenv(connection.URL_VARIABLE, run.url)
        patch.setattr(celery, "send_rollout", lambda *_: None)
        self.run, self.interrupt = run, threading.Event()
        self.error: Exception | None = None
        self.status: str | None = None

        def learn() -> None:
            client = connection.connect(run.url)
            try:
                if serves:
                    run_module.serve(client, folder, self.interrupt)
                else:
                    self.status = run_module.learn(client, run.id, folder, self.interrupt, **options)
            except Exception as error:
                self.error = error
                traceback.print_exc()  # shown if the test fails

        self.thread = threading.Thread(target=learn, daemon=True)
        self.thread.start()

    def holds_after(self, token: int) -> bool:
        """Return whether the run is held with a later token; fail if the learner has failed."""
        assert self.error is None, self.error
        with contextlib.suppress(runs.UnknownRunError):
            return self.run.state.leased and self.run.token > token
        return False

    def end(self) -> None:
        """Interrupt it, as a signal does."""
        self.interrupt.set()
        self.thread.join(30.0)
        assert not self.thread.is_alive()


# --- configs ---------------------------------------------------------------------------------------------


def endless_config(**sections: Any) -> RunConfig:
    """A run of the toy that nothing ends, that is not evaluated, and that leaves players most of the time."""
    endless = {"stop": {"return": None, "time": 3600}, "evaluation": {"every_s": 3600, "near": 0}}
    return target_config(**endless | {"replay": {"samples_per_insert": 4}} | sections)


def pick_config(**sections: Any) -> RunConfig:
    """PPO on a toy with discrete actions; iterations of 64 transitions."""
    ppo = {"name": "ppo", "batch_size": 64, "minibatch_size": 32, "num_epochs": 2, "hidden_sizes": [16]}
    changed = {"env": {"id": "ddrl/Pick-v0"}, "algorithm": ppo, "stop": {"return": None}}
    merged = {name: {**changed.get(name, {}), **section} for name, section in sections.items()}
    return target_config(**changed | merged)


def value_config(env: dict[str, Any], algorithm: dict[str, Any], **replay: Any) -> RunConfig:
    """A run without end, whose replay is small enough for items to be evicted."""
    return target_config(
        env=env,
        algorithm=algorithm,
        rollout={"fragment_s": 0.05, "max_fragment_steps": 16},
        replay={"capacity": 1500, "slack_steps": 400, "samples_per_insert": 8} | replay,
        learner={"publish_every_s": 0.05},
        evaluation={"every_s": 3600, "near_every_s": 3600},
        stop={"return": None, "time": None},
    )


def catch_config() -> RunConfig:
    """DQN from stacked, compressed, prioritized images, gathered by threads."""
    env = {"id": "ddrl/Catch-v0", "kwargs": {"size": 5, "pixels": 10}, "frame_stack": 2}
    network = {"name": "dqn", "network": "conv", "hidden_sizes": [32], "learning_rate": 2e-3, "gamma": 0.9}
    replay = {"n_step": 2, "prioritized": True, "importance_anneal_updates": 500, "target_period": 20}
    algorithm = network | replay | {"epsilon_anneal_updates": 200}
    return value_config(env, algorithm, observations="compressed", threads=2)


def recall_config() -> RunConfig:
    """R2D2 on vectors: overlapping sequences with burn-in."""
    env = {"id": "ddrl/Recall-v0", "kwargs": {"delay": 6}, "frame_stack": 2}
    network = {"name": "r2d2", "hidden_sizes": [16], "recurrent_size": 8, "batch_size": 16}
    sequences = {"sequence_length": 4, "overlap": 2, "burn_in": 2, "n_step": 2, "target_period": 50}
    return value_config(env, network | sequences)


def sac_config() -> RunConfig:
    """SAC on vectors, drawn uniformly."""
    return target_config(stop={"return": None}, replay={"capacity": 1500, "samples_per_insert": 8})


OFF_POLICY = {"sac": sac_config, "dqn": catch_config, "r2d2": recall_config}
