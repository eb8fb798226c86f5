"""Bad items in the broker's queues, taken by a real worker: each is put aside, and the worker goes on."""

from __future__ import annotations

import base64
import bz2
import json
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Producer
from kombu.exceptions import DecodeError
from kombu.transport import redis as transport
from redis import Redis
from support.commands import call_json
from support.private_server import PrivateServer
from support.processes import Processes
from support.runs import stream_steps
from support.worker_runs import playable, send, send_task

from ddrl import celery
from ddrl.store import connection, keys
from ddrl.worker import heartbeat, messages

QUEUE = keys.queue(celery.ROLLOUT)
BAD: tuple[Any, ...] = (None, [], {}, "", 5, [1, 2], "\x00", {"__type__": "datetime", "__value__": "x"})


def test_longer_lists_than_ddrl_sends_are_deleted(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MAX_MESSAGES", 5)
    monkeypatch.setattr(heartbeat, "MAX_REQUESTS", 2)
    names, other = (
        [*keys.lists("ddrl.rollout.box2d"), *keys.lists("ddrl.evaluate")],
        keys.queue("ddrl.rollout.atari"),
    )
    for name, num in zip((*names, other), (6, 5, 5, 3, 6), strict=True):
        client.rpush(name, *range(num))
    heartbeat.delete_floods(client, ["ddrl.rollout.box2d", "ddrl.evaluate"])
    assert [client.llen(name) for name in (*names, other)] == [0, 5, 5, 0, 6]


def changed(message: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return a message with another value, or without one (`...`), at a path."""
    name, *rest = path
    copy = dict(message)
    if rest:
        copy[name] = changed(copy[name], tuple(rest), value)
    elif value is ...:
        del copy[name]
    else:
        copy[name] = value
    return copy


def bad_items(message: Any) -> Iterator[bytes]:
    """Yield items that are no message, some by one value only."""
    whole = json.dumps([message, "", "ddrl.rollout"]).encode()  # as Kombu keeps it until it is acknowledged
    yield from (whole, whole[:-1], b"[{}]", b"[{" * 50_000, b'[{"__type__": "datetime", "__value__": "x"}]')
    yield from (b"[" + b"[]," * 50_000 + b"0]", b'{"x": "' + b"y" * 200_000 + b'"}')
    yield from (
        b'[{"__type__": [], "__value__": 1}]',
        b'[{"__type__": "uuid", "__value__": 5}]',
    )  # of Kombu's types
    yield from (b"", b"[]", b"null", b"17", b'""', b"{", b"[" * 5000, bytes(range(256)))
    for path in ("body", "headers", "properties", "content-type", "content-encoding"):
        yield from (json.dumps(changed(message, (path,), value)).encode() for value in (*BAD, ...))
    for path in ("body_encoding", "delivery_tag", "delivery_info"):
        values = [value for value in (*BAD, ...) if path == "body_encoding" or not isinstance(value, str)]
        yield from (json.dumps(changed(message, ("properties", path), value)).encode() for value in values)
    for name in message["headers"]:
        values = [{"a": {}}] if name == "stamped_headers" else [{"a": {}}, ["a", "b"]]
        values += ["x"] if name == "shadow" else []
        if name in ("task", "id", "timelimit"):
            values += [None, 5, ...]
        values += {"timelimit": [[10**400, None], [None, 10], [0.01, None]], "id": ["a\nb"]}.get(name, [])
        yield from (json.dumps(changed(message, ("headers", name), value)).encode() for value in values)
    # Methods of Celery's context of a task, and what it would do afterwards.
    for name in ("get", "update", "callbacks", "errbacks", "chain", "chord"):
        yield json.dumps(changed(message, ("headers", name), "x")).encode()
    for parts in (
        [[], {"x": None}, {}],
        [[], {"__type__": None, "__value__": None}, {}],
        [[], {}, {"x": None}],
    ):
        yield json.dumps(
            changed(message, ("body",), base64.b64encode(json.dumps(parts).encode()).decode())
        ).encode()
    for arguments in (
        [],
        ["run"],
        ["run", "1:2:3", "x"],
        ["run", "1:2:3"],
    ):  # the last one is for another queue
        body = base64.b64encode(json.dumps([arguments, {}, {}]).encode()).decode()
        yield json.dumps(
            changed(changed(message, ("headers", "task"), celery.EVALUATE), ("body",), body)
        ).encode()


@pytest.fixture
def message(client: Redis, server: PrivateServer) -> Any:
    """A message that a learner has sent."""
    send_task(server, celery.ROLLOUT, celery.ROLLOUT, priority=keys.LATER)
    return json.loads(client.lpop(QUEUE))  # type: ignore[arg-type]


def test_a_bad_item_is_put_aside_with_its_reason_and_the_worker_goes_on(
    client: Redis, server: PrivateServer, processes: Processes, message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = list(bad_items(message))
    client.rpush(QUEUE, *items)
    worker = processes.celery(server.url)
    processes.until(lambda: client.xlen(keys.BROKEN) == len(items))
    client.publish(f"{keys.BROKER_PREFIX}/0.celery.pidbox", b"[]")
    run = playable(client)
    send(server, run, 1)
    processes.until(lambda: stream_steps(client, run) > 0)
    assert client.xlen(keys.BROKEN) == len(items) + 1 and "Traceback" not in worker.text()
    rows = [fields for _, fields in client.xrange(keys.BROKEN)]
    assert {row[b"item"] for row in rows} >= {b"[]", b"null"} and all(row[b"reason"] for row in rows)
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    for odd in ({"x": "y"}, {"age": "1"}):
        client.xadd(keys.BROKEN, odd)
    (finding,) = [row for row in call_json("doctor") if row["name"] == "messages"]
    assert f"{len(items) + 1} items put aside" in finding["detail"] and "celery.pidbox" in finding["detail"]


@pytest.mark.parametrize(
    "kind",
    [
        {"headers": {"compression": "bzip2"}},
        {"headers": {"compression": "zlib"}},
        {"content-type": "application/data", "content-encoding": "bz2_codec"},
    ],
)
def test_an_event_is_not_decompressed(kind: dict[str, Any]) -> None:
    packed = (zlib if "zlib" in str(kind) else bz2).compress(bytes(10_000_000))
    event = {
        "body": base64.b64encode(packed).decode(),
        "properties": {"body_encoding": "base64", "delivery_tag": "x"},
        **{"headers": {}, "content-type": "application/json", "content-encoding": "utf-8"},
    }
    with Connection("memory://") as broker:
        message = transport.Channel.Message(event | kind, channel=broker.default_channel)
        assert message.body == packed
        with pytest.raises(DecodeError):
            message.decode()


def test_an_evaluation_names_a_run_that_can_be_one(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with more braces may be of another type, as a worker may write it: an error, and a pause, for each."""
    monkeypatch.setattr(messages, "_is_kept", lambda: refused.append(1))
    monkeypatch.setattr(messages, "_deliver", lambda _, item, queue: taken.append(item))
    transport = SimpleNamespace(connection_errors=(), channel_errors=())
    for run, queue, limit_s, refusals in (
        ("run", celery.EVALUATE, 3720, 0), ("run", celery.queues("evaluate")[-1], None, 0),
        ("x}:evaluations:y", celery.EVALUATE, 3720, 1), ("run", celery.EVALUATE, 120, 1),  # its process would be killed
    ):  # fmt: skip
        refused: list[int] = []
        taken: list[Any] = []
        body = base64.b64encode(json.dumps([[run, "1:2:3"], {}, {}]).encode()).decode()
        item = changed(changed(message, ("headers", "task"), celery.EVALUATE), ("body",), body)
        item = changed(item, ("headers", "timelimit"), [limit_s, None])
        messages.deliver(transport, json.dumps(item), queue)
        assert (len(refused), len(taken)) == (refusals, 1 - refusals)


def test_of_a_flood_of_bad_items_some_are_put_aside_and_the_others_dropped(
    client: Redis, server: PrivateServer, processes: Processes
) -> None:
    client.rpush(QUEUE, *[b"x"] * 4_000, b"x" * 20_000_000, b"x" * 200_000)
    worker = processes.celery(server.url)
    processes.until(lambda: client.llen(QUEUE) == 0, 120.0)
    run = playable(client)
    send(server, run, 1)
    processes.until(lambda: stream_steps(client, run) > 0)
    assert "others are dropped" in worker.text()
    assert worker.text().count("put aside") < 4_000 and "Traceback" not in worker.text()
    assert worker.text().count("Connection to broker lost") == 1  # at the longest


@pytest.mark.timeout(60)
def test_an_event_or_answer_does_not_wait_for_a_server_that_is_away(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kombu would try again until it is back, and its worker neither connect anew nor end at a signal."""
    for place, name in ((transport, "loads"), (transport.Transport, "_deliver"), (Producer, "publish")):
        monkeypatch.setattr(place, name, getattr(place, name))  # so that the test's end restores it
    messages.install()
    app = Celery(broker=connection.broker_url(server.url))
    with app.connection_for_write() as wire:
        events = app.events.Dispatcher(wire, hostname="one")
        events.send("worker-online")
        node = app.control.mailbox.Node("one", channel=wire.default_channel)
        node.reply({"one": {}}, exchange="replies", routing_key="x", ticket="t")
        server.kill()
        events.send("worker-heartbeat", retry=True)  # kept for the next connection
        with pytest.raises(wire.connection_errors):
            node.reply({"one": {}}, exchange="replies", routing_key="x", ticket="t")
