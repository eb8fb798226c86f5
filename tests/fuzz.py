"""Bad inputs: mutated and generated settings, policy files, entries, messages, pointers, requests and words.

Each input must be taken, or refused by the error of its kind in one line, within MOST_S and MOST_BYTES.

    python tests/fuzz.py 100000 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np
import torch
import yaml
from kombu import Connection
from support.algorithms import CPU
from support.commands import run as run_command
from support.private_server import PrivateServer
from support.store import QUEUES, SPACES, make_run

from ddrl import celery, codec, config, envs, policy
from ddrl.algorithms import base
from ddrl.config import ConfigError, ModuleError
from ddrl.learner.core import Core
from ddrl.learner.loop import Learner, NotFiniteError
from ddrl.replay import reader
from ddrl.runs import monitoring
from ddrl.store import checkpoints, connection, evaluations, keys, local_checkpoints, runs, stream, weights
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import StoreError
from ddrl.types import Fragment
from ddrl.worker import messages
from ddrl.worker.collector import Collector

MOST_S, MOST_BYTES, HANGS_S = 2.0, 500 * 1024**2, 20
Random = random.Random
DEEP = 3000  # levels, where a text is nested

# --- changes of any input ------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        7,
        2**31,
        2**63,
        2**64,
        10**400,
        -(10**400),
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        -0.0,
    ),
    *(
        "",
        "x",
        "x" * 5000,
        "\x00",
        "a\nb",
        "\ud800",
        "é\u2028",
        "1e999",
        "null",
        "15m",
        "9" * 5000,
        "1:60:60",
        "NaN",
    ),
    *(
        "../../etc/passwd",
        "os:system",
        "ddrl.envs.toy:spot",
        "CartPole-v1",
        "ppo",
        "sac",
        "<script>",
        "%s",
        "{run}",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [1, "a", {}],
        {"": None},
        {"a": {"b": [1]}},
        {"a\nb": 1},
        [0] * 1000,
        [2**31 - 1] * 8,
    ),
)


def nested(levels: int) -> Any:
    tree: Any = 1
    for level in range(levels):
        tree = [tree] if level % 2 else {"a": tree}
    return tree


def changed_tree(draw: Random, tree: Any) -> Any:
    """Plain data with one to three parts replaced, removed, added, renamed or nested."""
    root = [json.loads(json.dumps(tree))]
    for _ in range(draw.randint(1, 3)):
        places: list[tuple[Any, Any]] = []

        def walk(node: Any, places: list[tuple[Any, Any]] = places) -> None:
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], dict | list):
                    walk(node[key])

        walk(root)
        node, key = draw.choice(places)
        kind = draw.randrange(7)
        if kind < 3:
            node[key] = deepcopy(draw.choice(ODD))
        elif kind == 3:
            node[key] = nested(draw.choice([3, 50, 400]))
        elif kind == 4 and node is not root:
            del node[key]
        elif kind == 5 and isinstance(node, dict):
            node[draw.choice(["", "x", "a\nb", str(key) + "s", str(key).upper()])] = node.pop(key)
        else:
            other, name = draw.choice(places)
            node[key] = (
                other[name] if not isinstance(other[name], dict | list) else deepcopy(draw.choice(ODD))
            )
    return root[0]


def changed_bytes(draw: Random, data: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """Bytes with one to eight places flipped, removed, repeated, overwritten or cut off."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(found) + 1)
        length = draw.choice([1, 2, 4, 8, 64])
        kind = draw.randrange(7)
        if kind == 0:
            found[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del found[at : at + length]
        elif kind == 2:
            found[at:at] = draw.randbytes(length)
        elif kind == 3:
            found[at:at] = found[at : at + length] * draw.choice([1, 2, 100])
        elif kind == 4:
            found[at : at + length] = draw.choice([b"\xff", b"\x00", b"\x7f", b"9"]) * length
        elif kind == 5 and words:
            found[at:at] = draw.choice(words)
        elif draw.random() < 0.2:
            del found[at:]
    return bytes(found)


def json_bytes(draw: Random, tree: Any, change: Callable[[Random, Any], Any] = changed_tree) -> bytes:
    """Changed JSON: its values, or its bytes."""
    if draw.random() < 0.05:
        return b"[" * DEEP + b"]" * DEEP
    try:
        text = json.dumps(change(draw, tree))
    except RecursionError:
        text = "[" * DEEP
    data = text.encode(errors="surrogatepass")
    return data if draw.random() < 0.8 else changed_bytes(draw, data, YAML_WORDS)


# --- settings ------------------------------------------------------------------------------------------

YAML_WORDS = tuple(
    word.encode()
    for word in (
        *(
            "&a ",
            "*a",
            "<<: *a",
            "&a [*a]",
            "[",
            "{",
            "- " * 500,
            "[" * DEEP,
            "{a: " * DEEP,
            "!!python/object:os.system ",
        ),
        *(
            "!!binary ",
            "!!set {a, b}",
            "!!timestamp 2001-99-99",
            "2001-01-01",
            "2001-99-99",
            "1_000",
            "0x",
            "0b2",
            "0o9",
        ),
        *(
            ".inf",
            ".nan",
            "1e999",
            "190:20:30",
            "9" * 5000,
            "? ",
            "| \n",
            "> \n",
            "--- \n",
            "... \n",
            "%YAML 9.9\n",
        ),
        *(
            "\t",
            "\x00",
            "\x85",
            "\u2028",
            "\ufeff",
            "#",
            "'",
            '"',
            '"\\x',
            '"\\ud800"',
            ": ",
            "\n",
            "= ",
            "!<",
            "@",
            "`",
        ),
    )
)
PRESETS = tuple(path.read_bytes() for path in config.presets().values())
TREES = tuple(yaml.safe_load(text) for text in PRESETS)


@dataclass
class Place:
    """A server and a folder for the inputs that need them."""

    server: PrivateServer
    folder: Path
    run: str = ""
    policies: list[bytes] = field(default_factory=list)
    entries: list[dict[bytes, bytes]] = field(default_factory=list)
    port: int = 0
    deliver: Callable[[Any], None] = print
    learned: list[Learned] = field(default_factory=list)


def fuzz_settings(draw: Random, place: Place) -> None:
    kind = draw.randrange(10)
    overrides = []
    if kind < 4:
        text = changed_bytes(draw, draw.choice(PRESETS), YAML_WORDS)
    elif kind < 9:
        try:
            text = yaml.safe_dump(changed_tree(draw, draw.choice(TREES))).encode(errors="surrogatepass")
        except RecursionError:
            text = b"- " * DEEP
        if kind == 8:
            text = changed_bytes(draw, text, YAML_WORDS)
    else:
        text = draw.randbytes(draw.randrange(200)) if draw.random() < 0.3 else draw.choice(PRESETS)
        names = [
            "algorithm.gamma",
            "stop",
            "stop.time",
            "",
            "..",
            "a.b.c",
            "env.id.x",
            "env",
            "name",
            "replay.max_bytes",
        ]
        value = draw.choice([str(draw.choice(ODD)), draw.choice(YAML_WORDS).decode()])
        overrides = [f"{draw.choice(names)}{draw.choice(['=', '', '==', ' = '])}{value}"]
    path = place.folder / "settings.yaml"
    path.write_bytes(text)
    base.resolve(config.load(path, overrides), SPACES)


# --- policy files --------------------------------------------------------------------------------------


def policy_file(preset: str) -> bytes:
    """A policy file as `ddrl export` writes it, with the first weights of a preset."""
    settings = config.load(config.find(preset), ["env.num_envs=1"])
    spaces = envs.describe(settings.env)
    learner = base.resolve(settings, spaces).learner(device=CPU, seed=1)
    arrays = {name: np.asarray(tensor) for name, tensor in learner.weights().items()}
    metadata = {"format": policy.FORMAT, "run": "run", "version": "3", "spaces": json.dumps(asdict(spaces))}
    metadata["config"] = settings.model_dump_json(by_alias=True)
    return weights.encode_weights(arrays, metadata)


def fuzz_policy(draw: Random, place: Place) -> None:
    data = draw.choice(place.policies)
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = draw.randrange(4)
    if kind == 0:
        data = changed_bytes(draw, data)
    elif kind == 1:
        text = json_bytes(draw, header)
        data = len(text).to_bytes(8, "little") + text + body
    elif kind == 2:
        name = draw.choice(["config", "spaces"])
        tree = json.loads(header["__metadata__"][name])
        header["__metadata__"][name] = json_bytes(draw, tree).decode(errors="replace")
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + body
    else:
        at = draw.randrange(len(body))
        data = data[: 8 + length] + body[:at] + draw.randbytes(8) + body[at + 8 :]
    path = place.folder / "policy.safetensors"
    path.write_bytes(data)
    policy.load(path)


# --- entries of the stream -----------------------------------------------------------------------------

LIMITS = reader.FragmentLimits(num_steps=64, num_envs=8, context=8, state_size=8)


def make_fragment(draw: Random) -> Fragment:
    rng, steps, num_envs = np.random.default_rng(draw.randrange(1000)), draw.randint(1, 9), draw.randint(1, 3)
    axes = (steps, num_envs)
    truncated = rng.random(axes) < 0.2
    index = np.argwhere(truncated).astype(np.int32)
    return Fragment(
        run="run-1", producer=7, incarnation=9, seq=3, policy_version=11, context=0,
        observation=rng.normal(size=(steps + 1, num_envs, 8)).astype("f4"),
        action=rng.normal(size=(*axes, 2)).astype("f4"), reward=np.ones(axes, "f4"),
        terminated=np.zeros(axes, bool), truncated=truncated, final_index=index,
        final_observation=rng.normal(size=(len(index), 8)).astype("f4"),
        episode_return=np.ones(1, "f4"), episode_length=np.ones(1, "i4"),
        extras={"behavior_log_prob": np.ones(axes, "f4")} if draw.random() < 0.5 else {},
    )  # fmt: skip


def fuzz_entry(draw: Random, place: Place) -> None:
    fields = dict(draw.choice(place.entries))
    for _ in range(draw.randint(1, 3)):
        kind, name = draw.randrange(6), draw.choice(sorted(fields))
        if kind == 0:
            fields[b"h"] = json_bytes(draw, json.loads(draw.choice(place.entries)[b"h"]))
        elif kind == 1 and fields[name]:
            fields[name] = changed_bytes(draw, fields[name])
        elif kind == 2 and name != b"h":
            del fields[name]
        elif kind == 3:
            chunk = bytearray(fields[name])
            for _ in range(draw.randint(1, 3)):  # of its header
                if chunk:
                    chunk[draw.randrange(min(len(chunk), 48))] = draw.randrange(256)
            fields[name] = bytes(chunk)
        elif kind == 4:
            fields[draw.choice([b"n", b"f", b"p", b"i", b"q", b"zz", b"reward"])] = str(
                draw.choice(ODD)
            ).encode(errors="replace")
        else:
            fields[name] = draw.choice(place.entries).get(name, b"")
    with contextlib.suppress(
        ValueError, KeyError, TypeError, AttributeError, RecursionError
    ):  # so that the check of sums lets it in
        header = json.loads(fields[b"h"])
        checksum = 0
        for column in header["columns"]:
            checksum = zlib.crc32(fields.get(column["name"].encode(), b""), checksum)
        if draw.random() < 0.9:
            fields[b"h"] = json.dumps({**header, "checksum": checksum}).encode()
    entry = stream.Entry(b"1-1", fields)
    decoded = reader.decode(entry, "run-1", SPACES, limits=LIMITS, pack=lambda fragment: fragment)
    assert decoded.fragment is not None or ("\n" not in decoded.reason and decoded.reason), decoded.reason
    if draw.random() < 0.1:
        codec.decode(fields)


# --- fragments that are learned from -------------------------------------------------------------------

_ON = ["algorithm.batch_size=60"]
_DQN = [
    "replay.warmup_steps=64",
    "replay.capacity=300",
    "algorithm.batch_size=16",
    "algorithm.hidden_sizes=[8]",
]
LEARNED = (
    ("lunar-ppo", [*_ON, "algorithm.minibatch_size=30"]),
    ("lunar-ppo", [*_ON, "algorithm.estimator=upgo", "algorithm.minibatch_size=60", "env.frame_stack=3"]),
    ("cartpole-impala", _ON),
    ("lunar", [*_DQN, "algorithm.n_step=3"]),
    ("cartpole-dqn", [*_DQN, "algorithm.prioritized=true", "algorithm.n_step=5"]),
    ("catch", [*_DQN, "algorithm.distribution=quantile", "algorithm.prioritized=true", "env.frame_stack=2"]),
    ("cartpole-dqn", [*_DQN, "algorithm.distribution=categorical", "algorithm.dueling=true"]),
    ("recall", [*_DQN, "algorithm.recurrent_size=8"]),
)  # fmt: skip
SIZES = (0.0, 1e-45, 1e19, -1e37, 3e37, 3e38, 3e38, -3e38, np.nan)


class Learned:
    """A learner without a stream, and fragments of its run."""

    def __init__(self, place: Place, preset: str, options: list[str]) -> None:
        sized = ["env.num_envs=3", "rollout.max_fragment_steps=16"]
        settings = config.load(config.find(preset), [*sized, *options])
        resolved = base.resolve(settings, envs.describe(settings.env))
        client = place.server.client
        run = runs.create(client, settings, resolved.spec, queues=QUEUES)
        self._make_core = partial(Core, client, run, settings)
        self._make = partial(Learner, client, 1)
        self.begin()
        weights = {name: np.asarray(tensor) for name, tensor in self.learner.algorithm.weights().items()}
        identity = {"run": run, "producer": 7, "incarnation": 9, "random_until_learned": False}
        collector = Collector(**identity, config=settings, resolved=resolved)
        collector.load(1, weights)
        self.fragments = [collector.collect(max_steps=steps) for steps in (1, 7, 16, 3, 12, 16, 5, 9, 16, 16)]

    def begin(self) -> None:
        """Learn anew."""
        self.learner, self._number = self._make(self._make_core()), 0
        self.learner.shared.version = 1

    def learn_from(self, fragment: Fragment) -> str:
        """Take a fragment and make the updates that are due; return why it was refused, or ""."""
        self._number += 1
        sender = {b"p": b"%d" % self._number, b"i": b"9", b"q": b"0"}
        fields = codec.encode(replace(fragment, producer=self._number)) | sender
        entry = self.learner.core.decode(stream.Entry(b"%d-1" % self._number, fields))
        self.learner._admit(SimpleNamespace(ready=True, take=lambda for_s: [entry]))
        for _ in range(3):
            if not self.learner._update():
                break
            self.learner.shared.weights = None  # published
        self.learner.checkpoint()
        return entry.reason


def changed_fragment(draw: Random, fragment: Fragment, other: Fragment) -> Fragment:
    """A fragment with other values, columns or ends."""
    columns = {name: value for name, value in vars(fragment).items() if isinstance(value, np.ndarray)}
    extras = dict(fragment.extras)
    name = draw.choice([*columns, *extras])
    held = extras if name in extras else columns
    values, kind = held[name].copy(), draw.randrange(10)
    if kind < 5 and values.size:
        some = draw.sample(range(values.size), min(draw.choice([1, 9, 10**6]), values.size))
        is_whole = values.dtype.kind in "iub"
        values.flat[some] = draw.choice([0, 1, 2, 100, 255] if is_whole else SIZES)
        held[name] = values
    elif kind == 5:
        ends = np.random.default_rng(draw.randrange(1000)).random(fragment.reward.shape) < draw.choice(
            [0.1, 1.0]
        )
        columns[draw.choice(["terminated", "truncated"])] = ends
        columns["truncated"] &= ~columns["terminated"]
        index = np.argwhere(columns["truncated"]).astype(fragment.final_index.dtype)
        columns["final_index"] = index
        columns["final_observation"] = np.zeros((len(index), *fragment.observation.shape[2:]), values.dtype)
        columns["final_observation"] = columns["final_observation"].astype(fragment.observation.dtype)
    elif kind == 6 and extras:
        extras.pop(draw.choice([*extras]))
    elif kind == 7:
        extras = dict(other.extras) if draw.random() < 0.5 else {draw.choice(["value", "x"]): fragment.reward}
    else:
        columns |= {"context": draw.choice([0, 1, 2, fragment.context + 1, fragment.num_steps])}
    return replace(fragment, **columns, extras=extras)


def fuzz_update(draw: Random, place: Place) -> None:
    """What a learner admits, it learns from, or finds that its weights are no longer finite."""
    subject = draw.choice(place.learned)
    fragment = draw.choice(subject.fragments)
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        fragment = changed_fragment(draw, fragment, draw.choice(subject.fragments))
    try:
        reason = subject.learn_from(fragment)
    except Exception:
        subject.begin()
        raise
    if reason:
        raise codec.CodecError(reason)


# --- messages ------------------------------------------------------------------------------------------


def make_message() -> Any:
    """A message as a dispatcher sends it."""
    headers = {
        "lang": "py", "task": "ddrl.rollout", "id": "a" * 36, "shadow": None, "eta": None, "expires": None,
        "group": None, "group_index": None, "retries": 0, "timelimit": [None, None],
        "root_id": "a" * 36, "parent_id": None,
        "argsrepr": "()", "kwargsrepr": "{}", "origin": "gen1@h", "ignore_result": True, "replaced_task_nesting": 0,
        "stamped_headers": None, "stamps": {},
    }  # fmt: skip
    info = {"exchange": "", "routing_key": "ddrl.rollout"}
    properties = {"correlation_id": "a" * 36, "reply_to": "b", "delivery_mode": 2, "delivery_info": info}
    properties |= {"priority": 3, "body_encoding": "base64", "delivery_tag": "c"}
    body = "W1tdLCB7fSwgeyJjYWxsYmFja3MiOiBudWxsLCAiZXJyYmFja3MiOiBudWxsLCAiY2hhaW4iOiBudWxsLCAiY2hvcmQiOiBudWxsfV0="
    parts = {"body": body, "content-encoding": "utf-8", "content-type": "application/json"}
    return {**parts, "headers": headers, "properties": properties}


@contextlib.contextmanager
def delivering(place: Place) -> Iterator[Callable[[Any], None]]:
    """A function that gives an item to a consumer's transport as a worker does."""
    messages.install()
    with Connection(connection.broker_url(place.server.url)) as broker:
        channel = broker.default_channel
        transport = channel.connection

        def consume(raw: Any) -> None:
            message = channel.message_to_python(raw)
            message.decode()
            args, _, _ = message.payload
            assert message.headers["task"] in ("ddrl.rollout", "ddrl.evaluate") and all(
                type(a) is str for a in args
            )

        transport._callbacks[celery.ROLLOUT] = consume
        celery.app.amqp.queues.select([celery.ROLLOUT])
        yield lambda text: messages.deliver(transport, text, celery.ROLLOUT)


def fuzz_message(draw: Random, place: Place) -> None:
    text = json_bytes(draw, make_message()).decode(errors="replace")  # as Kombu does
    if draw.random() < 0.1:
        text = json.dumps(draw.choice(ODD))
    place.deliver(text)


# --- pointers, snapshots, records ----------------------------------------------------------------------

COUNTERS = asdict(Counters(updates=7, env_steps=9, cursor="5-0", ledger={"3": [1, 0, 0, 5, 0]}, version=2))
POINTER = {"token": 1, "number": 0, "parts": 1, "bytes": 3, "crc32": zlib.crc32(b"abc"), "meta": COUNTERS}
RECORD = {"spec": "{}", "state": {"status": "active", "version": "2"}, "producers": {"3": "{}"}}
SNAPSHOT = {
    "format": 1, "run": "run", "token": 5, "tensors": "5-7-00000000.safetensors", "bytes": 0, "crc32": 0,
    "meta": COUNTERS, "known": RECORD,
}  # fmt: skip


def fuzz_pointer(draw: Random, place: Place) -> None:
    client = place.server.client
    client.hset(keys.state(place.run), "checkpoint", json_bytes(draw, POINTER))
    runs.elapsed_s(client, place.run)
    checkpoints.load(client, place.run)


def fuzz_snapshot(draw: Random, place: Place) -> None:
    folder = place.folder / "run" / local_checkpoints.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "5-7-00000000.safetensors").touch()
    (folder / local_checkpoints.POINTER).write_bytes(json_bytes(draw, SNAPSHOT))
    local_checkpoints.token(folder.parent, "run")
    local_checkpoints.find(place.server.client, "run", place.folder)
    snapshot = local_checkpoints.read(folder.parent)
    if snapshot is not None and draw.random() < 0.5:
        place.server.client.delete(keys.state("run"))
        local_checkpoints.restore(place.server.client, snapshot, even_deleted=True)
        runs.state(place.server.client, snapshot.run)


def fuzz_evaluation(draw: Random, place: Place) -> None:
    one = asdict(evaluations.Evaluation(version=3, first_seed=1, num_episodes=2, purpose="watch"))
    client, result = (
        place.server.client,
        {"returns": [1.0, 2.0], "lengths": [1, 2], "return_mean": 1.5, "return_std": 0.5},
    )
    client.hset(keys.evaluating(place.run), "3:1:2", json_bytes(draw, one))
    client.hdel(keys.players(place.run), "3:1:2:player")
    client.xadd(keys.evaluations(place.run), {"result": json_bytes(draw, one | result)}, maxlen=3)
    evaluations.opened(client, place.run)
    evaluations.results(client, place.run)
    with contextlib.suppress(ValueError):  # of a stored evaluation, which names it
        evaluations.take(client, place.run, draw.choice(["3:1:2", "a/3:1:2", str(draw.choice(ODD))]), "p")


# --- words and requests --------------------------------------------------------------------------------

COMMANDS = (
    "status",
    "runs",
    "logs",
    "journal",
    "compare",
    "versions",
    "audit",
    "schema",
    "presets",
    "set",
    "fleet",
    "export",
)
OPTIONS = (
    "--json",
    "-n",
    "--limit",
    "--lines",
    "-o",
    "--out",
    "--since",
    "--help",
    "-s",
    "--",
    "-",
    "--all",
    "-x",
    "--version",
)


def word(draw: Random, place: Place) -> str:
    words = (
        place.run,
        place.run[:5],
        "last",
        "",
        "@",
        f"{place.run}@3",
        f"{place.run}@{2**70}",
        "a.b=c",
        "stop.time=9",
        "1h",
    )
    return draw.choice(
        [draw.choice(words), str(draw.choice(ODD)), draw.choice(OPTIONS), f"{draw.getrandbits(40):x}"]
    )


def fuzz_words(draw: Random, place: Place) -> None:
    words = [draw.choice(COMMANDS), *(word(draw, place) for _ in range(draw.randint(0, 4)))]
    code, _, err = run_command(*words)
    assert code in (0, 1, 2, 3) and "Traceback" not in err, (code, words, err)
    assert code == 0 or err.count("\n") == 1, err


def fuzz_names(draw: Random, place: Place) -> None:
    name = word(draw, place)
    kind = draw.randrange(4)
    if kind == 0:
        runs.resolve(place.server.client, name)
    elif kind == 1:
        config.find(name)
    elif kind == 2:
        config.duration(name, "--time")
    else:
        text = draw.choice(["127.0.0.1:", "[::1]:", ":", "[", "a:b:", ""]) + draw.choice(
            [name, "80", "99999", "0", "٣"]
        )
        with contextlib.suppress(ValueError):  # which `serve` logs
            monitoring.address(text)


def fuzz_request(draw: Random, place: Place) -> None:
    """A request to the metrics of a worker: it is answered or closed, and the next one is answered."""
    good = b"GET /metrics?name[]=ddrl_worker_processes HTTP/1.1\r\nHost: a\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    words = (
        b"\r\n",
        b"%00",
        b"?",
        b"name[]=",
        b"HTTP/9.9",
        b"POST ",
        b"Content-Length: 99999999\r\n",
        b"x" * 70000,
    )
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", place.port)) as peer,
    ):
        peer.settimeout(10)
        peer.sendall(changed_bytes(draw, good, words))
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65536):
            pass


# --- the run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What is tried, as a share of all inputs, and the errors that may refuse it."""

    share: int
    try_one: Callable[[Random, Place], None]
    errors: tuple[type[Exception], ...]


KINDS = {
    "settings": Kind(26, fuzz_settings, (ConfigError, ModuleError)),
    "policy": Kind(14, fuzz_policy, (policy.PolicyFileError, ConfigError, ModuleError)),
    "entry": Kind(20, fuzz_entry, (codec.CodecError,)),
    "update": Kind(6, fuzz_update, (codec.CodecError, NotFiniteError)),
    "message": Kind(12, fuzz_message, ()),
    "pointer": Kind(6, fuzz_pointer, (StoreError,)),
    "snapshot": Kind(6, fuzz_snapshot, (StoreError,)),
    "evaluation": Kind(3, fuzz_evaluation, ()),
    "name": Kind(4, fuzz_names, (StoreError, ConfigError)),
    "words": Kind(2, fuzz_words, ()),
    "request": Kind(1, fuzz_request, ()),
}


@contextlib.contextmanager
def prepared() -> Iterator[Place]:
    """A server, a folder, and valid inputs to change."""
    server = PrivateServer()
    with tempfile.TemporaryDirectory(prefix="ddrl-f") as folder, contextlib.ExitStack() as stack:
        stack.callback(server.close)
        before = os.environ.get(connection.URL_VARIABLE)
        os.environ[connection.URL_VARIABLE] = server.url
        stack.callback(lambda: os.environ.pop(connection.URL_VARIABLE) if before is None else None)
        place = Place(server, Path(folder), run=make_run(server.client))
        place.policies = [policy_file(preset) for preset in ("lunar", "cartpole", "recall", "catch")]
        place.entries = [codec.encode(make_fragment(Random(n))) for n in range(20)]
        place.learned = [Learned(place, preset, options) for preset, options in LEARNED]
        place.deliver = stack.enter_context(delivering(place))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place.port = probe.getsockname()[1]
        os.environ[monitoring.VARIABLE] = str(place.port)
        monitoring.serve(monitoring.WorkerMetrics("n", lambda: [os.getpid()], lambda: 0, dict))
        del os.environ[monitoring.VARIABLE]
        yield place


def fuzz(count: int, seed: int, only: str = "") -> tuple[Counter[str], list[str]]:
    """Try `count` inputs; return how many of each kind were taken or refused, and the findings."""
    tried, findings = Counter[str](), list[str]()
    logging.disable(logging.WARNING)
    kinds = [name for name, kind in KINDS.items() for _ in range(kind.share) if only in ("", name)]
    errors = io.StringIO()

    def hangs(*_: object) -> None:
        raise TimeoutError(f"more than {HANGS_S} s of a processor")

    signal.signal(signal.SIGPROF, hangs)
    torch.set_num_threads(1)
    with prepared() as place, contextlib.redirect_stderr(errors):
        for number in range(count):
            name = kinds[number % len(kinds)]
            draw, kind = Random(f"{seed}/{name}/{number}"), KINDS[name]
            peak, began, problem, outcome = (
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                time.process_time(),
                "",
                "taken",
            )
            signal.setitimer(signal.ITIMER_PROF, HANGS_S)
            try:
                kind.try_one(draw, place)
            except kind.errors as error:
                outcome = "refused"
                text = str(error)
                if len(text.splitlines()) != 1 or len(text) > 20_000:
                    problem = f"{type(error).__name__} of {len(text)} characters: {text[:300]!r}"
            except Exception as error:
                last = "".join(traceback.format_exc().splitlines(True)[-9:])
                problem = f"{type(error).__name__}: {str(error)[:300]}\n{last}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            spent_s = time.process_time() - began
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
            if "Traceback" in errors.getvalue():
                problem = problem or errors.getvalue()[-500:]
                errors.seek(0), errors.truncate()
            if not problem and spent_s > MOST_S:
                problem = f"took {spent_s:.1f} s"
            if not problem and grown > MOST_BYTES:
                problem = f"took {grown / 1024**2:.0f} MiB"
            tried[f"{name}, {outcome}"] += 1
            if problem:
                findings.append(f"{name} number {number} of seed {seed}: {problem}")
    logging.disable(logging.NOTSET)
    return tried, findings


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", choices=["", *KINDS])
    given = parser.parse_args()
    started = time.monotonic()
    found_of, found = fuzz(given.count, given.seed, given.only)
    for outcome, num in sorted(found_of.items()):
        print(f"{num:8,}  {outcome}")
    print(f"{given.count:8,}  in {time.monotonic() - started:.0f} s, {len(found)} findings")
    print(*found[:40], sep="\n")
    sys.exit(bool(found))
