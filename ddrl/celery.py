"""The Celery application: queues by capability, settings with their reasons, a worker's life.

`celery -A ddrl worker` finds `app` here. Rollout messages are permissions (fleet.py), so they are acknowledged
early and not prefetched; nothing needs a result backend.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import signal
import socket
import threading
from typing import Any

from celery import Celery
from celery.signals import celeryd_init, worker_process_init, worker_ready, worker_shutting_down
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from ddrl import embedded, envs, keys, parent
from ddrl.store import connection, workers

ROLLOUT, EVALUATE = "ddrl.rollout", "ddrl.evaluate"

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # a process plays on one core; more threads only take others'


def queues(kind: str = "all") -> list[str]:
    """Queues that this machine can serve: `kind` is rollout, evaluate or all."""
    kinds = {"rollout": [ROLLOUT], "evaluate": [EVALUATE], "all": [ROLLOUT, EVALUATE]}[kind]
    return [queue for base in kinds for queue in (base, *(f"{base}.{name}" for name in envs.capabilities()))]


try:
    app = Celery("ddrl", broker=connection.broker_url(), include=["ddrl.tasks"])
except connection.StoreError as _error:  # `celery -A ddrl` would print a traceback
    raise SystemExit(f"ddrl: error: {_error}") from None
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
    worker_proc_alive_timeout=120,  # a child is up once its imports are done
    worker_send_task_events=True,  # Flower
    worker_hijack_root_logger=True,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={
        "global_keyprefix": keys.BROKER_PREFIX,
        "socket_timeout": 30,
        "socket_connect_timeout": 3,
        "socket_keepalive": True,
        "health_check_interval": 25,
    },
)


def send_rollout(run: str, queue: str) -> None:
    """Send one permission to play.

    Raises:
        UnreachableError: the server does not answer.
    """
    _send(ROLLOUT, [run], queue)


def send_evaluation(run: str, evaluation_id: str, queue: str) -> None:
    """Send one evaluation.

    Raises:
        UnreachableError: the server does not answer.
    """
    _send(EVALUATE, [run, evaluation_id], queue)


def _send(task: str, arguments: list[str], queue: str) -> None:
    try:
        app.send_task(task, args=arguments, queue=queue)
    except OperationalError as error:
        raise connection.UnreachableError(str(error)) from error


# --- a worker's life ---------------------------------------------------------------------------------


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
    parent.follow(signal.SIGQUIT)


@worker_process_init.connect  # type: ignore[untyped-decorator]
def _warm_up(**_: Any) -> None:
    """Import what the first task needs, so that it starts at once."""
    import ddrl.segment  # noqa: F401


@worker_ready.connect  # type: ignore[untyped-decorator]
def _start_heartbeat(sender: Any, **_: Any) -> None:
    """Tell of this worker every few seconds, from a thread of its own."""
    heartbeat = workers.Heartbeat(
        node=sender.hostname,
        host=socket.gethostname(),
        pid=os.getpid(),
        processes=int(sender.controller.concurrency),
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        versions={
            name: importlib.metadata.version(name)
            for name in ("ddrl", "gymnasium", "numpy", "torch", "celery", "box2d", "ale-py", "mujoco")
            if _installed(name)
        },
    )
    leaving = threading.Event()

    def beat() -> None:
        client = connection.connect()
        while True:
            try:
                workers.beat(client, heartbeat)
                if leaving.wait(workers.BEAT_S):
                    workers.leave(client, heartbeat.node)
                    return
            except Exception:  # unreachable, out of memory, ...: the worker plays on, and so must this
                leaving.wait(1.0)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    worker_shutting_down.connect(lambda **_: leaving.set(), weak=False)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
