"""The Celery application: queues by capability, settings with their reasons, a worker's life.

`celery -A ddrl worker` finds `app` here. Rollout messages are permissions (fleet.py), so they are acknowledged
early and not prefetched; nothing needs a result backend.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import Celery, bootsteps
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.signals import (
    after_setup_logger,
    celeryd_init,
    task_failure,
    worker_process_init,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)
from celery.worker import consumer
from celery.worker import state as worker_state
from celery.worker.control import inspect_command
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.transport import redis as transport
from pydantic import ByteSize, TypeAdapter, ValidationError

from ddrl import envs
from ddrl.envs import versions
from ddrl.runs import monitoring, parent
from ddrl.store import connection, keys, requests, workers
from ddrl.store import server as embedded
from ddrl.worker import heartbeat as presence
from ddrl.worker import watchdog
from ddrl.worker.heartbeat import Presence, without_spaces

ROLLOUT, EVALUATE = "ddrl.rollout", "ddrl.evaluate"

MEMORY_VARIABLE = (
    "DDRL_PROCESS_MEMORY"  # such as 4GiB: a process that holds more is replaced between two tasks
)
DEFAULT_MEMORY = "4GiB"
UP_VARIABLE = (
    "DDRL_WORKER_UP"  # folder in which a worker's first processes leave a file each once they can play
)
UP_TIMEOUT_S = 120.0
LIMIT_MARGIN_S = (
    120.0  # of a hard time limit: for a server that is slow to answer, which is no fault of the task's
)

log = logging.getLogger(__name__)

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # a process plays on one core; more threads only take others'


def queues(kind: str = "all") -> list[str]:
    """Queues that this machine can serve: `kind` is rollout, evaluate or all."""
    kinds = {"rollout": [ROLLOUT], "evaluate": [EVALUATE], "all": [ROLLOUT, EVALUATE]}[kind]
    return [queue for base in kinds for queue in envs.queues(base)]


def process_memory_bytes() -> int:
    """What a process may hold between two tasks.

    Raises:
        StoreError: DDRL_PROCESS_MEMORY is no size.
    """
    text = os.environ.get(MEMORY_VARIABLE) or DEFAULT_MEMORY
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1024**2:
        raise connection.StoreError(f"{MEMORY_VARIABLE}={text}: is no size of memory; write it like 4GiB")
    return size


try:
    app = Celery("ddrl", broker=connection.broker_url(), include=["ddrl.worker.tasks"])
    _memory_bytes = process_memory_bytes()
except connection.StoreError as _error:  # `celery -A ddrl` would print a traceback
    raise SystemExit(f"ddrl: error: {_error}") from None
transport.Channel.do_restore = (
    False  # what a worker that ends has not begun is lost, and nothing is lost by that
)
app.conf.update(
    task_queues=[Queue(name, Exchange(name), routing_key=name) for name in queues()],
    task_default_queue=ROLLOUT,
    task_serializer="json",
    accept_content=["json"],
    task_ignore_result=True,
    task_acks_late=False,  # a late-acked task is started twice after a restart of the server
    worker_disable_prefetch=True,  # an idle process takes the next message at once
    worker_prefetch_multiplier=1,
    worker_pool_start_method="spawn",  # fork hangs with torch and with blosc2
    worker_proc_alive_timeout=UP_TIMEOUT_S,  # a child is up once its imports are done
    worker_max_memory_per_child=_memory_bytes // 1024,
    worker_send_task_events=True,  # Flower
    worker_hijack_root_logger=True,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_channel_error_retry=True,  # a disk or a memory that is full has room again some time
    worker_consumer="ddrl.celery:Consumer",
    worker_cancel_long_running_tasks_on_connection_loss=True,  # concerns late acknowledgement only; else it is said
    broker_use_ssl=connection.broker_ssl() or False,  # Flower reads it here; Kombu in the URL
    broker_transport_options={
        "global_keyprefix": keys.BROKER_PREFIX,
        "ack_emulation": False,  # its bookkeeping writes for every message, and loses it where the memory is full
        "priority_steps": sorted(keys.PRIORITIES.values()),
        "socket_timeout": 8,
        "socket_connect_timeout": 3,
        "socket_keepalive": True,
        "health_check_interval": 3,  # a connection that is half open is given up after twice that
    },
)


def send_rollout(run: str, queue: str, priority: str = "normal", time_limit_s: float | None = None) -> None:
    """Send one permission to play.

    Args:
        run: its id.
        queue: where those wait who can play it.
        priority: high, normal or low.
        time_limit_s: after which its process is ended, whatever it does.

    Raises:
        UnreachableError: the server does not answer.
        RedisError: it takes no message now.
    """
    _send(ROLLOUT, [run], queue, keys.PRIORITIES[priority], time_limit_s)


def send_evaluation(run: str, evaluation_id: str, queue: str, time_limit_s: float = 3600.0) -> None:
    """Send one evaluation; a run's own go before all, for its end depends on them.

    Args:
        run: its id.
        evaluation_id: of an open evaluation, or of a request.
        queue: where those wait who can play it.
        time_limit_s: after which its process is ended; a step that hangs is noticed long before.

    Raises:
        UnreachableError: the server does not answer.
        RedisError: it takes no message now.
    """
    priority = "normal" if requests.is_request(evaluation_id) else "high"
    _send(EVALUATE, [run, evaluation_id], queue, keys.PRIORITIES[priority], time_limit_s)


def _send(task: str, arguments: list[str], queue: str, priority: int, time_limit_s: float | None) -> None:
    limit = None if time_limit_s is None else time_limit_s + LIMIT_MARGIN_S
    try:
        app.send_task(task, args=arguments, queue=queue, priority=priority, time_limit=limit)
    except OperationalError as error:
        raise connection.UnreachableError(str(error)) from error


# --- a worker's life ---------------------------------------------------------------------------------

_presence: Presence | None = None  # of this process, where it is a worker's main one
_told: deque[str] = deque(maxlen=100)  # tasks whose processes ended


@celeryd_init.connect  # type: ignore[untyped-decorator]
def _name_node(instance: Any, **_: Any) -> None:
    """A unique node name, unless the operator gave one; the embedded server held, if that is the one."""
    host = socket.gethostname()
    if instance.hostname == f"celery@{host}":
        instance.hostname = f"ddrl-{os.getpid()}-{secrets.token_hex(2)}@{host}"
    if connection.is_embedded() and embedded.hold_if_running() is None:
        raise SystemExit(
            "ddrl: error: no server is running: start one with `ddrl up`, or name one with DDRL_REDIS_URL"
        )
    try:
        with connection.connect() as client:
            connection.check(client)
    except connection.NotThereError:
        pass  # Celery waits for it
    except connection.StoreError as error:  # which waiting does not mend
        raise SystemExit(f"ddrl: error: {error}") from None
    parent.follow(signal.SIGQUIT)


class PoolUp(bootsteps.StartStopStep):  # type: ignore[misc]
    """Has a worker say ready, and take messages, only when its processes can play."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **_: Any) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ddrl-up-"))
        os.environ[UP_VARIABLE] = str(self._folder)  # the pool is started after this, and spawns

    def start(self, worker: Any) -> None:
        """Wait until all are up, or one has ended, and until the server takes what a worker tells it."""
        processes = getattr(getattr(worker.pool, "_pool", None), "_pool", ())
        deadline = time.monotonic() + UP_TIMEOUT_S
        while (
            len(list(self._folder.iterdir())) < len(processes)
            and all(process.exitcode is None for process in processes)
            and not _is_leaving()
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        shutil.rmtree(self._folder, ignore_errors=True)
        _await_server(worker.hostname)


class Consumer(consumer.Consumer):  # type: ignore[misc]
    """Celery's, which begins again after a refusal of the server only when that takes commands again."""

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Called when the connection, or a command on it, has failed."""
        super().on_connection_error_after_connected(exc)
        _await_server(self.hostname)


def _await_server(node: str) -> None:
    """Wait until the server takes what a worker writes to it; Celery's beginning would end at some refusals."""
    client, said = connection.connect(), ""
    while True:
        worker_state.maybe_shutdown()
        try:
            client.set(keys.worker(f"{without_spaces(node)}~begins"), "", ex=1)
            return
        except connection.OUTAGES as error:
            text = connection.outage(error)
            if text is None:
                return
            if text != said:
                log.warning("%s; waiting", text)
                said = text
            time.sleep(0.5)


def _is_leaving() -> bool:
    """Whether a signal has asked this worker to end."""
    return worker_state.should_stop is not None or worker_state.should_terminate is not None


app.steps["worker"].add(PoolUp)


@worker_process_init.connect  # type: ignore[untyped-decorator]
def _warm_up(**_: Any) -> None:
    """Import what the first task needs, so that it starts at once; then say that this process is up."""
    from ddrl.worker.segment import prepare

    try:
        prepare(connection.connect())
    except Exception as error:  # the first task meets it again, and says so to its run
        log.info("not prepared for the active runs: %s", error)
    folder = Path(os.environ.get(UP_VARIABLE, ""), str(os.getpid()))
    if folder.parent.is_dir() and UP_VARIABLE in os.environ:
        folder.touch()


@worker_ready.connect  # type: ignore[untyped-decorator]
def _appear(sender: Any, **_: Any) -> None:
    """Tell of this worker from a thread of its own; from now on a second signal ends it at once."""
    global _presence

    def pids() -> tuple[int, ...]:
        processes = getattr(getattr(sender.pool, "_pool", None), "_pool", None)
        if processes is None:
            return (os.getpid(),)
        return tuple(
            process.pid for process in list(processes) if process.pid
        )  # one that is begun has none yet

    heartbeat = workers.Heartbeat(
        node=without_spaces(sender.hostname),
        host=socket.gethostname(),
        pid=os.getpid(),
        processes=int(sender.controller.concurrency),
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        versions=versions.of_machine(),
        pids=pids(),
        cores=presence.cores(),
        gpus=presence.gpus(),
        memory_bytes=presence.memory_bytes(),
        capabilities=tuple(envs.capabilities()),
        started_s=time.time(),
    )
    _presence = Presence(heartbeat, pids)
    _presence.start()
    signal.signal(signal.SIGQUIT, _end_at_once)  # Celery's own waits for running tasks
    monitoring.start_worker(
        sender.hostname,
        pids,
        busy=lambda: len(worker_state.active_requests),
        tasks=lambda: dict(worker_state.total_count),
    )


@inspect_command()  # type: ignore[untyped-decorator]
def stats(state: Any, **_: Any) -> Any:
    """Celery's own, without the password that a unix socket's address holds: Flower shows them to all."""
    found = state.consumer.controller.stats()
    broker = found.get("broker")
    if isinstance(broker, dict):
        broker["hostname"] = connection.mask(str(broker.get("hostname")))
    return found


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _drain(**_: Any) -> None:
    """On the first signal: segments end at their next append. Called in a signal handler."""
    if _presence is not None:
        _presence.drain()
        signal.signal(signal.SIGTERM, _end_at_once)
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(*_: Any) -> None:
    if _presence is not None:
        _presence.end_at_once()


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def _disappear(**_: Any) -> None:
    if _presence is not None:
        _presence.leave()


@task_failure.connect  # type: ignore[untyped-decorator]
def _note_lost_process(task_id: str, exception: BaseException, args: Any, **_: Any) -> None:
    """Tell a run of a process that ended while it played; its other errors were told by the task itself."""
    if _presence is None or not isinstance(exception, WorkerLostError | TimeLimitExceeded) or not args:
        return
    if task_id in _told:  # a time limit comes twice
        return
    _told.append(task_id)
    happened: str | None
    if isinstance(exception, TimeLimitExceeded):
        happened = f"a task took longer than {exception.args[0]:g} s and was ended; mend the environment"
    else:
        happened = watchdog.explain(str(exception))
    if happened is not None:
        _presence.note_crash(str(args[0]), f"host {socket.gethostname()}: {happened}")


_EXPECTED = (*connection.OUTAGES, OperationalError, OSError, WorkerLostError, TimeLimitExceeded)


class _Plain(logging.Filter):
    """Cuts what Celery says of a lost server or process down to its first line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Every record passes."""
        ours = record.name.startswith(("celery", "kombu"))  # not a user's own code
        if ours and record.exc_info and any(isinstance(one, _EXPECTED) for one in _chain(record.exc_info[1])):
            record.msg = " ".join(record.getMessage().split())
            record.args, record.exc_info, record.exc_text = (), None, None
        return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came of, and what that came of; a pool wraps them."""
    while error is not None:
        error = getattr(error, "exc", error)
        yield error
        error = error.__cause__ or error.__context__


@after_setup_logger.connect  # type: ignore[untyped-decorator]
def _speak_plainly(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        handler.addFilter(_Plain())
