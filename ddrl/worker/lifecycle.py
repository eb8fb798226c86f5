"""The life of a Celery worker beside its tasks, from start to end. Celery imports it with them.

In order: take a node name and check the server; wait until the pool's processes can play; send heartbeats; report
processes that are lost; on a first signal drain (segments end at their next append), on a second one end at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

from billiard import pool as billiard_pool
from celery import bootsteps, signals
from celery.exceptions import SecurityWarning, TimeLimitExceeded, WorkerLostError
from celery.worker import consumer
from celery.worker import state as worker_state
from celery.worker.control import inspect_command
from kombu.exceptions import OperationalError

from ddrl import envs
from ddrl.algorithms import base
from ddrl.celery import EVALUATE, PID_VARIABLE, QUEUES_VARIABLE, UP_TIMEOUT_S, app
from ddrl.envs import requirements
from ddrl.runs import monitoring, processes
from ddrl.store import connection, keys, machine, runs, server, workers
from ddrl.worker import messages, watchdog
from ddrl.worker.heartbeat import HeartbeatSender

# Names a folder in which each process of the pool leaves a file once it can play.
READY_VARIABLE = "DDRL_WORKER_READY"
PREPARED_RUNS = 3  # the newest active runs, for which a process of the pool is prepared

log = logging.getLogger(__name__)

# State of this process, if it is a worker's main process.
_hold: server.Hold | None = None
_sender: HeartbeatSender | None = None
_reported: deque[str] = deque(maxlen=100)  # tasks whose lost processes have been reported


# --- start -------------------------------------------------------------------------------------------


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _begin(instance: Any, **_: Any) -> None:
    """Give the worker a unique node name, unless the operator gave one, and refuse a server that will not do."""
    global _hold
    messages.install()
    warnings.simplefilter("ignore", SecurityWarning)  # of a root user's worker: none here unpickles
    host = socket.gethostname()
    if instance.hostname == f"celery@{host}":
        instance.hostname = f"ddrl-{os.getpid()}-{secrets.token_hex(2)}@{host}"
    _hold = server.hold_if_running()
    if _hold is None and connection.is_embedded():
        raise SystemExit(
            "ddrl: error: no server is running: start one with `ddrl up`, or name one with DDRL_REDIS_URL"
        )
    try:
        # Celery waits for a server that is not there.
        with contextlib.suppress(connection.NotThereError), connection.connect() as client:
            connection.check(client)
    except connection.StoreError as error:  # waiting would not help
        raise SystemExit(f"ddrl: error: {error}") from None
    processes.follow_parent(signal.SIGQUIT)


class PoolReady(bootsteps.StartStopStep):  # type: ignore[misc]
    """Delays "ready", and the first message, until the pool's processes can play."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **_: Any) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ddrl-ready-"))
        os.environ[READY_VARIABLE] = str(self._folder)  # the pool is spawned after this
        os.environ[PID_VARIABLE] = str(os.getpid())
        os.environ[QUEUES_VARIABLE] = ",".join(sorted(app.amqp.queues.consume_from))

    def start(self, worker: Any) -> None:
        """Wait until all processes are ready or one has ended, and until the server takes writes."""
        pool = getattr(getattr(worker.pool, "_pool", None), "_pool", ())
        deadline = time.monotonic() + UP_TIMEOUT_S
        while (
            len(list(self._folder.iterdir())) < len(pool)
            and all(process.exitcode is None for process in pool)
            and worker_state.should_stop is None
            and worker_state.should_terminate is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        shutil.rmtree(self._folder, ignore_errors=True)
        _wait_until_server_takes_writes(worker.hostname)


app.steps["worker"].add(PoolReady)


class Consumer(consumer.Consumer):  # type: ignore[misc]
    """Celery's consumer, which connects again only when the server takes writes; else Celery's start would fail.

    It exchanges nothing with other workers: that is of no use here, and takes a second at each connection.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, without_gossip=True, without_mingle=True)
        self._timers: list[Any] = []  # of the present connection
        self._callbacks: set[Any] = set()

    def connect(self) -> Any:
        """Connect as Celery does, and end what the event loop repeats for the last connection; Kombu leaves it there.

        Else a worker grows by 10 kB and five timers with each lost connection.
        """
        if self.hub is None:  # a pool of threads
            return super().connect()
        for timer in self._timers:
            timer.cancel()
        self.hub.on_tick -= self._callbacks
        before = set(self.hub.on_tick)
        connected = super().connect()
        self._callbacks = self.hub.on_tick - before
        attributes = vars(connected.transport.cycle).items()
        self._timers = [value for name, value in attributes if name.endswith("_tref")]
        return connected

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Called when the connection, or a command on it, has failed."""
        super().on_connection_error_after_connected(exc)
        _wait_until_server_takes_writes(self.hostname)


def _wait_until_server_takes_writes(node: str) -> None:
    client = connection.connect()

    def write() -> None:
        worker_state.maybe_shutdown()
        client.set(keys.worker(f"{node}~begins"), "", ex=1)

    with contextlib.suppress(*connection.OUTAGES):  # an error that waiting does not help: Celery reports it
        connection.retry(write, client=client)


@signals.worker_process_init.connect  # type: ignore[untyped-decorator]
def _prepare_process(**_: Any) -> None:
    """In a process of the pool: import what the first task needs, then report that the process is ready.

    The modules of users are left to the first segment, which the watchdog watches.
    """
    # At its end a process waits for the worker to count its last result, which a worker that stops may never do.
    billiard_pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT = 5  # times 0.1 s, instead of 30 s
    try:
        with watchdog.ends_without_memory():
            envs.prepare()
            client = connection.connect()
            for run in runs.active_names(client)[-PREPARED_RUNS:]:
                config = runs.config(client, run)
                if ":" not in config.env.id and not requirements.custom_code(config):
                    envs.prepare(config.env.id)
                    base.resolve(config, runs.spaces(client, run)).policy()
    except Exception as error:  # the first task meets it again, and reports it to its run
        log.info("not prepared for the active runs: %s", error)
    with contextlib.suppress(KeyError, FileNotFoundError):  # a process that starts later: nobody waits for it
        Path(os.environ[READY_VARIABLE], str(os.getpid())).touch()


@signals.worker_ready.connect  # type: ignore[untyped-decorator]
def _start_heartbeat(sender: Any, **_: Any) -> None:
    global _sender

    def pids() -> tuple[int, ...]:
        pool = getattr(getattr(sender.pool, "_pool", None), "_pool", None)
        if pool is None:  # a pool of threads
            return (os.getpid(),)
        return tuple(process.pid for process in list(pool) if process.pid)  # one that starts has none yet

    worker = workers.Heartbeat(
        node=sender.hostname,
        host=socket.gethostname(),
        pid=os.getpid(),
        processes=sender.pool.num_processes,
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        versions=requirements.machine_versions(),
        pids=pids(),
        cores=machine.cores(),
        gpus=machine.gpus(),
        memory_bytes=machine.memory_bytes(),
        capabilities=tuple(envs.capabilities()),
        started_s=time.time(),
    )
    _sender = HeartbeatSender(worker, pids)
    _sender.start()
    # Celery's own "ready" names neither server nor queues.
    logging.getLogger("celery.apps.worker").setLevel(logging.WARNING)
    log.setLevel(logging.INFO)  # also where the log level is Celery's default, WARNING
    roles = ", ".join(sorted({queue.partition(".")[2].partition(".")[0] for queue in worker.queues}))
    able = ", ".join(["Gymnasium's own", *worker.capabilities])
    place = connection.mask(connection.url())
    text = "%s ready: server %s; processes: %d; roles: %s; environments: %s"
    log.info(text, worker.node, place, worker.processes, roles, able)
    signal.signal(signal.SIGQUIT, _end_at_once)  # Celery's own handler waits for running tasks
    busy, tasks = lambda: len(worker_state.active_requests), lambda: dict(worker_state.total_count)
    monitoring.serve(monitoring.WorkerMetrics(sender.hostname, pids, busy, tasks))


# --- while it runs -----------------------------------------------------------------------------------


@signals.task_failure.connect  # type: ignore[untyped-decorator]
def _report_lost_process(sender: Any, task_id: str, exception: BaseException, args: Any, **_: Any) -> None:
    """Report to a run a process that ended while it played; the task itself reports all other errors."""
    is_repeated = task_id in _reported  # Celery signals a time limit twice
    if _sender is None or is_repeated or not isinstance(exception, WorkerLostError | TimeLimitExceeded):
        return
    _reported.append(task_id)
    reason = watchdog.explain(str(exception))
    if isinstance(exception, TimeLimitExceeded):
        reason = f"a task took longer than {exception.args[0]:g} s and was killed; fix the environment"
    if reason is not None:
        run = str(args[0]) if sender.name == EVALUATE and args else ""  # the server knows a rollout's
        _sender.report_crash(task_id, run, f"host {socket.gethostname()}: {reason}")


@inspect_command()  # type: ignore[untyped-decorator]
def stats(state: Any, **_: Any) -> Any:
    """Return Celery's statistics without passwords of the server or of sentinels, as Flower shows them to all."""
    found = state.consumer.controller.stats()
    if isinstance(broker := found.get("broker"), dict):
        broker["hostname"] = connection.mask(str(broker.get("hostname")))
        broker.pop("transport_options", None)
        broker.pop("alternates", None)
    return found


# --- end ---------------------------------------------------------------------------------------------


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _drain(**_: Any) -> None:
    """On the first signal, in its handler: end all segments at their next append."""
    if _sender is not None:
        _sender.drain()
        signal.signal(signal.SIGTERM, _end_at_once)
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(*_: Any) -> None:
    """End this worker and its processes now, its heartbeat first; from a thread, as a signal handler must not wait."""

    def end(sender: HeartbeatSender) -> None:
        log.warning("worker %s: ends at once", sender.node)
        sender.stop()
        for pid in sender.pids():
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        if _hold is not None:
            _hold.release()
        logging.shutdown()
        os._exit(1)

    if _sender is not None:
        threading.Thread(target=end, args=(_sender,), name="end-at-once", daemon=True).start()


@signals.worker_shutdown.connect  # type: ignore[untyped-decorator]
def _stop_heartbeat(**_: Any) -> None:
    if _sender is not None:
        _sender.stop()


# --- log ---------------------------------------------------------------------------------------------

_EXPECTED = (*connection.OUTAGES, OperationalError, OSError, WorkerLostError, TimeLimitExceeded)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Reduce what Celery logs about a lost server or process to one line; keep every record."""
    is_celery = record.name.startswith(("celery", "kombu"))  # not a user's own code
    errors = connection.causes(record.exc_info[1]) if is_celery and record.exc_info else ()
    if any(isinstance(error, _EXPECTED) for error in errors):
        record.msg = " ".join(record.getMessage().split())
        record.args, record.exc_info, record.exc_text = (), None, None
    return True


@signals.after_setup_logger.connect  # type: ignore[untyped-decorator]
def _shorten_log(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        handler.addFilter(_without_traceback)
