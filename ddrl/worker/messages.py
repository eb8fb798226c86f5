"""Messages from the broker: an item that is not one of ddrl's is put aside, and the worker goes on.

Kombu takes any JSON value in a queue for a message, and Celery most messages for a task: one bad item would end a
worker, or occupy a process for good.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from typing import Annotated, Any, Literal, Self

from celery.app.task import Context
from kombu import Producer
from kombu.transport import redis as transport
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ddrl.celery import EVALUATE, EVALUATION_LIMIT_S, LIMIT_MARGIN_S, app
from ddrl.store import connection, keys

log = logging.getLogger(__name__)

KEPT, KEPT_S = 1_000, 60.0  # items put aside, about; of a flood that many in so many seconds
KEPT_CHARACTERS = 1_000  # of each
LONGEST = 100_000  # characters of an item; ddrl's have 1,000

_flood = {"until": 0.0, "num": 0.0}  # time by `time.monotonic`, and bad items in the KEPT_S before it
_loads, _deliver, _publish = transport.loads, transport.Transport._deliver, Producer.publish
# Arguments of a task, by place and by name (none), and what to do afterwards (nothing).
_Afterwards = dict[Literal["callbacks", "errbacks", "chain", "chord"], None]
_BODY = TypeAdapter(tuple[list[str], Annotated[dict[str, None], Field(max_length=0)], _Afterwards])


_RUN = re.compile(r"[\w.-]{1,200}")  # its id


class _Part(BaseModel):
    """A part of a message. Fields that are not listed differ between versions of Celery; they hold plain values."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, str | bool | int | float | None]


class _Headers(_Part):
    task: Literal["ddrl.rollout", "ddrl.evaluate"]
    id: Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
    eta: None = None
    expires: None = None
    compression: None = None
    shadow: None = None
    callbacks: None = None  # of Celery's context, which takes them from the body, too
    errbacks: None = None
    chain: None = None
    chord: None = None
    # Seconds until Celery kills the task's process; one that is shorter than a server may take to answer is forged.
    timelimit: tuple[Annotated[float, Field(ge=LIMIT_MARGIN_S, le=1e9)] | None, None]
    stamps: dict[str, None] = {}
    stamped_headers: list[str] | None = None

    @model_validator(mode="after")
    def _refuse_methods(self) -> Self:
        """Celery makes each header an attribute of the task's context, where methods are, too."""
        for name in self.model_extra or {}:
            if callable(getattr(Context, name, None)):
                raise ValueError(f"header {name}: is a method of Celery's context")
        return self


class _Delivery(_Part):
    exchange: str
    routing_key: str


class _Properties(_Part):
    body_encoding: Literal["base64"]
    delivery_tag: str
    delivery_info: _Delivery


class _Message(_Part):
    body: Base64Bytes
    content_type: Literal["application/json"] = Field(alias="content-type")
    content_encoding: Literal["utf-8"] = Field(alias="content-encoding")
    headers: _Headers
    properties: _Properties


def read(item: str) -> Any:
    """Return an item of a queue as it is, and parsed what Kombu keeps of one that is not acknowledged, a list."""
    with contextlib.suppress(Exception):  # a worker may have written any
        if item.startswith("[{") and len(item) <= LONGEST:
            return _loads(item)
    return item


def deliver(self: transport.Transport, item: Any, queue: str) -> None:
    """Give an item to its consumer, as Kombu's own method does, which takes it parsed."""
    try:
        if not isinstance(item, str):
            raise ValueError("a list")
        if len(item) > LONGEST:
            raise ValueError(f"{len(item)} characters")
        if queue in app.amqp.queues.consume_from:  # else a command of `celery control`
            message = _Message.model_validate_json(item)
            arguments, task = _BODY.validate_json(message.body)[0], message.headers.task
            if not f"{queue}.".startswith(f"{task}."):
                raise ValueError(f"task {task} is of another queue")
            if task == EVALUATE and (len(arguments) != 2 or not _RUN.fullmatch(arguments[0])):
                raise ValueError(f"{arguments}: not a run and one of its evaluations")
            limit_s = message.headers.timelimit[0]
            if task == EVALUATE and limit_s is not None and limit_s < EVALUATION_LIMIT_S:
                raise ValueError(f"a time limit of {limit_s:g} s is none of an evaluation")
        _deliver(self, _loads(item), queue)
    except (*self.connection_errors, *self.channel_errors):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = ": ".join([".".join(map(str, first["loc"])) or "message", first["msg"]])
        if not _is_kept():
            return
        log.warning("an item of queue %s is no message (%.200r): put aside, see `ddrl doctor`", queue, reason)
        texts = {"queue": queue, "reason": reason, "item": str(item)}
        fields: dict[Any, Any] = {name: text[:KEPT_CHARACTERS] for name, text in texts.items()}
        with contextlib.suppress(*connection.OUTAGES), connection.connect() as client:
            client.xadd(keys.BROKEN, fields, maxlen=KEPT)


def _is_kept() -> bool:
    """Count a bad item; return whether it is put aside, not one of a flood that is dropped."""
    if (now := time.monotonic()) >= _flood["until"]:
        _flood.update(until=now + KEPT_S, num=0)
    _flood["num"] += 1
    if _flood["num"] == KEPT + 1:
        log.warning("more than %d items in %g s are no messages: others are dropped", KEPT, KEPT_S)
    return _flood["num"] <= KEPT


def publish(self: Producer, *args: Any, **options: Any) -> Any:
    """Send a worker's event or answer once: Kombu repeats it for as long as the server is away, deaf to signals."""
    return _publish(self, *args, **options | {"retry": False})


def install() -> None:
    """Let Kombu leave the parsing of items to `deliver`, and repeat nothing that it sends."""
    transport.loads = read
    transport.Transport._deliver = deliver
    Producer.publish = publish
