"""Entries that no collector wrote: each is a real one with one thing forged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import blosc2
import numpy as np

from ddrl import codec
from ddrl.types import Fragment

MIB = 1024**2
Fields = dict[bytes, bytes]
UNKNOWN_PRODUCER = {b"p": b"987654321", b"i": b"1", b"q": b"0"}  # of forged entries


def with_header(**changes: Any) -> Callable[[Fields], Fields]:
    def forge(fields: Fields) -> Fields:
        return {**fields, b"h": json.dumps({**json.loads(fields[b"h"]), **changes}).encode()}

    return forge


def encoded(change: Callable[[Fragment], Fragment]) -> Callable[[Fields], Fields]:
    def forge(fields: Fields) -> Fields:
        return {**fields, **codec.encode(change(codec.decode(fields)))}

    return forge


def enlarged(steps: int, *, bomb: bool) -> Callable[[Fields], Fields]:
    """All columns of `steps` steps: claimed only, or really there as chunks of nothing but zeros."""

    def forge(fields: Fields) -> Fields:
        header = json.loads(fields[b"h"])
        before, made = header["T"], dict(fields)
        for column in header["columns"]:
            shape = column["shape"]
            if shape[0] - header["C"] in (before, before + 1):
                column["shape"] = [shape[0] - before + steps, *shape[1:]]
                column["bytes"] = column["bytes"] // shape[0] * column["shape"][0]
                if bomb and column["bytes"] < 600 * MIB:
                    made[column["name"].encode()] = blosc2.compress2(np.zeros(column["bytes"], np.uint8))
        header["T"] = steps
        return {**made, b"h": json.dumps(header).encode()}

    return forge


def changed(name: bytes, change: Callable[[bytes], bytes]) -> Callable[[Fields], Fields]:
    return lambda fields: {**fields, name: change(fields[name])}


def of_wider_observations(fragment: Fragment) -> Fragment:
    wider, final = (
        np.repeat(column, 2, axis=-1) for column in (fragment.observation, fragment.final_observation)
    )
    return replace(fragment, observation=wider, final_observation=final)


POISON: dict[str, tuple[Callable[[Fields], Mapping[bytes, bytes]], str]] = {
    "no header": (lambda fields: {b"word": b"hello"}, "no header"),
    "header of junk": (changed(b"h", lambda header: b"{" + header), "no JSON"),
    "header of another kind": (lambda fields: {**fields, b"h": b"[1, 2]"}, "no JSON object"),
    "format of another version": (with_header(format=99), "format: 99"),
    "another run": (with_header(run="other-1121-103211-abcd"), "does not belong"),
    "claimed shapes": (enlarged(2**30, bomb=False), "columns"),
    "decompression bomb": (enlarged(2_000_000, bomb=True), "columns"),
    "truncated column": (changed(b"observation", lambda chunk: chunk[: len(chunk) // 2]), "observation"),
    "empty column": (changed(b"reward", lambda chunk: b""), "reward"),
    "checksum": (with_header(checksum=1), "checksum"),
    "NaN rewards": (encoded(lambda one: replace(one, reward=one.reward * np.nan)), "NaN"),
    "infinite rewards": (encoded(lambda one: replace(one, reward=one.reward + np.inf)), "infinity"),
    "another observation space": (encoded(of_wider_observations), "spaces"),
    "another dtype of actions": (
        encoded(lambda one: replace(one, action=one.action.astype(np.int64))),
        "action",
    ),
}
COUNTERS: list[Mapping[bytes, bytes]] = [
    {b"f": b"999999999999", b"n": b"999999999999999", b"b": b"999999999999999", b"s": b"1"},
    {b"f": b"-1", b"n": b"-5", b"b": b"0", b"s": b"999999999999999"},
    {b"f": b"x" * 40, b"n": b"9" * 40, b"b": b"1e9", b"s": b""},
]
