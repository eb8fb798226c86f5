"""The Celery application: its queues and its settings, each with the reason.

`celery -A ddrl worker` finds `app` here. A rollout message is a permission to play, not a piece of work: it is
acknowledged early, not prefetched, and has no result. What a worker does from its start to its end is in
`ddrl.worker.lifecycle`.
"""

from __future__ import annotations

import contextlib
import os
from typing import Annotated, Any

from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.transport import redis as transport
from kombu.transport import virtual
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from ddrl import envs
from ddrl.store import connection, evaluations, keys, machine

ROLLOUT, EVALUATE = "ddrl.rollout", "ddrl.evaluate"

MEMORY_VARIABLE = "DDRL_PROCESS_MEMORY"  # a process that holds more is replaced between two tasks
DEFAULT_MEMORY = "4GiB"
QUEUES_VARIABLE = "DDRL_WORKER_QUEUES"  # set by a worker for its processes: the queues that it serves
PID_VARIABLE = "DDRL_WORKER_PID"  # likewise: its own process, which sends the heartbeats
UP_TIMEOUT_S = 120.0  # for a process of the pool to import what it needs
LONGEST_REPLY = 10_000_000  # bytes that the broker gives at once; messages have 1,000
LIMIT_MARGIN_S = 120.0  # of a hard time limit: a server that is slow to answer is not the task's fault
EVALUATION_LIMIT_S = 3600.0  # after which its process is killed; a step that hangs is noticed long before

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # a process uses one core; more threads would take others'
# Flower's pages show what workers send as HTML; so they command no worker, whoever has them open.
os.environ.setdefault("FLOWER_READ_ONLY", "true")


def queues(kind: str = "all") -> list[str]:
    """Return the queues that this machine can serve; `kind` is rollout, evaluate or all."""
    kinds = {"rollout": [ROLLOUT], "evaluate": [EVALUATE], "all": [ROLLOUT, EVALUATE]}[kind]
    return [queue for base in kinds for queue in envs.queues(base)]


def process_memory_bytes() -> int:
    """Return the memory that a process may hold between two tasks.

    Raises:
        StoreError: DDRL_PROCESS_MEMORY is not a size.
    """
    text = os.environ.get(MEMORY_VARIABLE) or DEFAULT_MEMORY
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(ge=1024**2)]).validate_python(text))
    except ValidationError:
        reason = f"{MEMORY_VARIABLE}={text}: not a memory size; write it like 4GiB"
        raise connection.StoreError(reason) from None


_make_options = transport.Channel._connparams


def _make_bounded_options(*args: Any, **options: Any) -> dict[str, Any]:
    """Make Kombu's options of a connection; it is closed at a reply that is too long for a message."""
    made: dict[str, Any] = _make_options(*args, **options)
    made["connection_class"] = connection.bounded(made["connection_class"], LONGEST_REPLY, ConnectionError)
    return made


class _Json(virtual.Message):  # type: ignore[misc]
    """A message; it is JSON as it stands, whatever it says of itself: decompressed, a small one may fill the memory."""

    def __init__(self, payload: dict[str, Any], *args: Any, **options: Any) -> None:
        kind = {"content-type": "application/json", "content-encoding": "utf-8"}
        headers = {**payload["headers"], "compression": None}
        super().__init__({**payload, **kind, "headers": headers}, *args, **options)


def _bind(self: Any, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
    """Note the broadcasts that this channel gets; nothing is kept on the server, where Kombu's notes never end."""
    if self.typeof(exchange).type == "fanout":
        self._fanout_queues[queue] = exchange, routing_key.replace("#", "*")


def _find_queues(self: Any, exchange: str, routing_key: str, default: Any = None) -> list[str]:
    """Return where a message goes: a queue has the name of its exchange; one of replies has its key before that."""
    return [routing_key if exchange in ("", routing_key) else f"{routing_key}.{exchange}"]


try:
    app = Celery(
        "ddrl", broker=connection.broker_url(), include=["ddrl.worker.tasks", "ddrl.worker.lifecycle"]
    )
    _memory_bytes = process_memory_bytes()
except connection.StoreError as _error:  # else `celery -A ddrl` prints a traceback
    raise SystemExit(f"ddrl: error: {_error}") from None
transport.Channel.connection_class = connection.Connection
transport.Channel.connection_class_ssl = connection.SecureConnection
transport.Channel._connparams, transport.Channel.Message = _make_bounded_options, _Json
transport.Channel.do_restore = False  # a message that a worker took and did not begin may be lost
transport.Channel._queue_bind, transport.Channel._lookup = _bind, _find_queues
transport.Channel._delete = virtual.Channel._delete  # knows no bindings
transport.Channel.maybe_refresh_binding_expiry = lambda self: None
app.conf.update(
    task_queues=[Queue(name, Exchange(name), routing_key=name) for name in queues()],
    task_default_queue=ROLLOUT,
    task_serializer="json",  # nothing is unpickled
    accept_content=["json"],
    task_ignore_result=True,  # no result backend: all results are in the store
    task_acks_late=False,  # a task acknowledged late is started twice after a restart of the server
    worker_disable_prefetch=True,  # an idle process takes the next message at once
    worker_prefetch_multiplier=1,
    worker_pool_start_method="spawn",  # fork hangs with torch and with blosc2
    worker_proc_alive_timeout=UP_TIMEOUT_S,  # Celery's 4 s are too short to import torch
    worker_max_memory_per_child=_memory_bytes // 1024,
    worker_concurrency=machine.processes(),  # Celery counts cores that a container may not use
    worker_send_task_events=True,  # for Flower
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,  # wait for the server for as long as it takes
    task_publish_retry=False,  # the sender tries again; Kombu would go on with a channel that its own retry closed
    broker_channel_error_retry=True,  # a full disk or memory has room again some time
    worker_consumer="ddrl.worker.lifecycle:Consumer",  # waits while the server takes no writes
    worker_cancel_long_running_tasks_on_connection_loss=True,  # without effect here; unset, Celery warns
    broker_use_ssl=connection.broker_ssl() or False,  # read by Flower; Kombu reads the URL
    broker_transport_options={
        "global_keyprefix": keys.BROKER_PREFIX,
        "ack_emulation": False,  # it writes for every message, and loses the message where memory is full
        "priority_steps": [keys.FIRST, keys.LATER],
        "socket_timeout": 2,  # of each connection, one after another: a half-open one delays all that a worker does
        "socket_connect_timeout": 3,
        "socket_keepalive": True,
        "health_check_interval": 2,  # a half-open connection is dropped after twice this
        **connection.broker_options(),
    },
)


def send_rollout(queue: str, time_limit_s: float | None = None) -> None:
    """Send one permission to play; the server chooses the run when a process takes it.

    Args:
        queue: the queue of the workers that can play the sender's run.
        time_limit_s: after which the process is killed, whatever it does; see `segments.choose`.

    Raises:
        UnreachableError: the server does not answer.
        RedisError: it takes no message for now.
    """
    _send(ROLLOUT, [], queue, keys.LATER, time_limit_s)


def send_evaluation(run: str, evaluation: str, queue: str) -> None:
    """Send one evaluation; a run's own come first, since its end depends on them.

    Args:
        run: its id.
        evaluation: names an open one, of the run or of a command (`store.evaluations.take`).
        queue: the queue of the workers that can play it.

    Raises:
        UnreachableError: the server does not answer.
        RedisError: it takes no message for now.
    """
    priority = keys.FIRST if evaluations.is_of_run(evaluation) else keys.LATER
    _send(EVALUATE, [run, evaluation], queue, priority, EVALUATION_LIMIT_S)


def show(name: str, event: str, **fields: Any) -> None:
    """Let Flower and other readers of events see an event; do nothing where the server does not answer.

    Call it in a thread of its own, as a connection that is lost without notice delays it by its timeout.

    Args:
        name: of the worker, or of a learner as one, `<what>@<host>`.
        event: of Celery's.
        fields: of the event.
    """
    outages = OSError, OperationalError, *connection.OUTAGES
    with contextlib.suppress(*outages), app.events.default_dispatcher(hostname=name) as events:
        events.send(event, **fields)


def _send(task: str, arguments: list[str], queue: str, priority: int, time_limit_s: float | None) -> None:
    limit = None if time_limit_s is None else time_limit_s + LIMIT_MARGIN_S
    try:
        app.send_task(task, args=arguments, queue=queue, priority=priority, time_limit=limit)
    except OperationalError as error:
        cause = error.__cause__
        if isinstance(cause, connection.OUTAGES) and not isinstance(cause, connection.UNREACHABLE):
            raise cause from None  # the server answers, and refuses
        raise connection.UnreachableError(str(error)) from error
