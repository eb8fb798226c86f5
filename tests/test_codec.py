"""Fragments survive encoding exactly; anything else is refused in one line, before memory is allocated."""

from __future__ import annotations

import dataclasses
import json
import re
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import blosc2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.poison import enlarged
from support.replays import changed

from ddrl import codec
from ddrl.codec import CodecError
from ddrl.types import Fragment


def make_fragment(
    seed: int = 0, *, steps: int = 7, num_envs: int = 3, context: int = 0, shape: tuple[int, ...] = (4,),
    dtype: str = "float32", action: tuple[str, tuple[int, ...]] = ("f4", (2,)), end_rate: float = 0.3,
    extras: bool = False,
) -> Fragment:  # fmt: skip
    """Return a fragment of random numbers, some of whose steps end episodes."""
    rng, axes = np.random.default_rng(seed), (context + steps, num_envs)

    def column(dtype: str, *shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 50).astype(dtype)

    ended = rng.random(axes) < end_rate
    truncated = ended & (rng.random(axes) < 0.5)
    index = np.argwhere(truncated).astype(np.int32)
    counts = {"producer": 7, "incarnation": 2**60 + 1, "seq": 3, "policy_version": 11, "context": context}
    log_prob = {"behavior_log_prob": column("f4", *axes), "raw_action": column(action[0], *axes, *action[1])}
    return Fragment(
        run="run-1",
        **counts,
        observation=column(dtype, context + steps + 1, num_envs, *shape),
        action=column(action[0], *axes, *action[1]),
        reward=column("f4", *axes),
        terminated=ended & ~truncated,
        truncated=truncated,
        final_index=index,
        final_observation=column(dtype, len(index), *shape),
        episode_return=column("f4", ended.sum()),
        episode_length=rng.integers(1, 99, ended.sum()).astype("i4"),
        extras=log_prob if extras else {},
    )


def assert_same(actual: Fragment, expected: Fragment) -> None:
    found, wanted = ({**vars(fragment), **fragment.extras, "extras": None} for fragment in (actual, expected))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, name, strict=True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 20),
    num_envs=st.integers(1, 5),
    context=st.integers(0, 3),
    shape=st.sampled_from([(), (1,), (8,), (5, 6), (3, 4, 2)]),
    dtype=st.sampled_from(["float32", "float64", "float16", "uint8", "int64", "bool"]),
    action=st.sampled_from([("f4", (2,)), ("i8", ()), ("i8", (2,))]),
    end_rate=st.sampled_from([0.0, 0.3, 1.0]),
    extras=st.booleans(),
)
def test_round_trip(**kwargs: Any) -> None:
    fragment = make_fragment(**kwargs)
    counters = {b"n": b"12", b"b": b"x", b"f": b"9"}
    assert_same(codec.decode(codec.encode(fragment) | counters), fragment)


def test_empty_columns_have_no_field() -> None:
    fields = codec.encode(make_fragment(end_rate=0.0))
    assert {b"final_index", b"final_observation", b"episode_return"}.isdisjoint(fields)
    assert codec.decode(fields | {b"episode_return": b""}).episode_return.shape == (0,)


def test_frames_of_a_lane_lie_together() -> None:
    rng = np.random.default_rng(0)
    lanes = rng.integers(0, 256, (1, 8, 40, 40), dtype=np.uint8)  # each lane shows one still picture
    fragment = make_fragment(steps=16, num_envs=8, shape=(40, 40), dtype="uint8", end_rate=0.0)
    still = dataclasses.replace(fragment, observation=np.repeat(lanes, 17, axis=0))
    fields = codec.encode(still)
    raw = np.frombuffer(blosc2.decompress2(fields[b"observation"]), np.uint8).reshape(8, 17, 40, 40)
    np.testing.assert_array_equal(raw, np.repeat(lanes.swapaxes(0, 1), 17, axis=1))
    assert_same(codec.decode(fields), still)


def test_a_lane_of_images_is_a_block() -> None:
    """Up to a megabyte; longer lanes are divided evenly. Other block sizes are read too."""
    frame, large = (84, 84), (1024, 1025)
    sizes = [(19, 3, frame, 20 * 84**2), (149, 1, frame, 75 * 84**2), (3, 2, large, 1024 * 1025)]
    for steps, num_envs, shape, block in sizes:
        fragment = make_fragment(steps=steps, num_envs=num_envs, shape=shape, dtype="uint8", end_rate=0.0)
        fields = codec.encode(fragment)
        assert blosc2.get_cbuffer_sizes(fields[b"observation"])[2] == block
    options = {"typesize": 1, "codec": blosc2.Codec.ZSTD, "clevel": 5, "filters": [blosc2.Filter.NOFILTER]}
    old = compressed(fragment.observation.swapaxes(0, 1), **options)
    assert_same(codec.decode(with_chunk("observation", old, fragment)), fragment)


def with_memory(num_states: int = 5, **columns: np.ndarray) -> Fragment:
    """7 + 2 steps of 3 environments, and recurrent states of some, of 4 numbers."""
    rng = np.random.default_rng(1)
    index = np.stack([rng.integers(0, 9, num_states), rng.integers(0, 3, num_states)], 1).astype("i4")
    memory = {"memory_index": index, "memory": rng.normal(size=(num_states, 4)).astype("f2")}
    return changed(make_fragment(context=2), **memory | columns)


@pytest.mark.parametrize("num_states", [0, 5, 27])
def test_recurrent_states_have_rows_of_their_own(num_states: int) -> None:
    fragment = with_memory(num_states)
    assert_same(codec.decode(codec.encode(fragment)), fragment)


WITH_MEMORY = with_memory().extras
INDEX, MEMORY = WITH_MEMORY["memory_index"], WITH_MEMORY["memory"]
FRAGMENT = make_fragment()


@pytest.mark.parametrize(
    ("fragment", "message"),
    [
        (with_memory(memory_index=INDEX.astype("i8")), "memory_index: dtype 'int64', expected int32"),
        (with_memory(memory=MEMORY.astype("f4")), "memory: dtype 'float32', expected float16"),
        (with_memory(memory=MEMORY[:, 0]), "memory: shape [5], expected [5, 0]"),
        (with_memory(memory_index=INDEX[:, :1]), "memory_index: shape [5, 1], expected [5, 2]"),
        (with_memory(memory_index=INDEX[:, 0]), "memory_index: shape [5], expected [5, 2]"),
        (with_memory(memory=MEMORY[:4]), "memory: shape [4, 4], expected [5, 4]"),
        (with_memory(memory_index=INDEX[:4]), "memory: shape [5, 4], expected [4, 4]"),
        (with_memory(28), "memory_index: 28 rows, more than 9 x 3 steps"),
        *((changed(with_memory(), **{name: None}), "together or not at all") for name in WITH_MEMORY),
        (changed(FRAGMENT, reward=FRAGMENT.reward.astype("f8")), "reward: dtype 'float64'"),
        (changed(FRAGMENT, action=FRAGMENT.action[1:]), "action: shape"),
        (changed(FRAGMENT, extras={"reward": FRAGMENT.reward}), "extras: a name repeats"),
        (changed(FRAGMENT, n=FRAGMENT.reward), "no column name"),
        (changed(FRAGMENT, who=FRAGMENT.reward.astype(object)), "dtype 'object'"),
    ],
)
def test_encode_refuses_what_decode_would(fragment: Fragment, message: str) -> None:
    with pytest.raises(CodecError, match=re.escape(message)):
        codec.encode(fragment)


def forge(change: Callable[[dict[str, Any]], None], fragment: Fragment | None = None) -> dict[bytes, bytes]:
    fields = codec.encode(fragment or make_fragment())
    header = json.loads(fields[b"h"])
    change(header)
    return fields | {b"h": json.dumps(header).encode()}


def column(header: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in header["columns"] if c["name"] == name)


def set_column(name: str, /, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: column(header, name).update(values)


def set_header(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(values)


BAD_VALUES: list[tuple[str, Any]] = [
    *(("format", 2), ("format", True), ("format", None), ("run", ""), ("run", 5), ("producer", "7")),
    *(("seq", -1), ("seq", True), ("policy_version", 1.0), ("incarnation", 2**63)),
]
BAD_SHAPES = ["7,3", [7, -3], [7, 3.0], [7, True]]
FORGED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    *((set_header(**{name: value}), f"{name}: {value!r}") for name, value in BAD_VALUES),
    (set_header(T=0), "T, N: 0 steps"),
    (set_header(N=0), "T, N: 7 steps of 0"),
    *((set_header(**size), "shape") for size in ({"T": 8}, {"N": 4}, {"C": 1})),
    (set_header(checksum=1), "checksum: "),
    (set_header(columns={}), "columns: no list"),
    (set_header(columns=[]), "observation: the column is missing"),
    (lambda h: h.update(columns=h["columns"] * 9), "columns: no list of at most 64"),
    (lambda h: h["columns"].append(h["columns"][0]), "columns: a name occurs twice"),
    (lambda h: h["columns"].append("reward"), "columns: 'reward' is not"),
    (lambda h: h["columns"].remove(column(h, "reward")), "reward: the column is missing"),
    (set_column("reward", name="h"), "columns: 'h' is no column name"),
    (set_column("reward", name=["x"]), "no column name"),
    (set_column("reward", extra=1), "is not {name"),
    (set_column("reward", dtype="object"), "reward: dtype 'object'"),
    (set_column("reward", dtype=["f4"]), "reward: dtype"),
    (set_column("reward", dtype="int32"), "reward: dtype 'int32', expected float32"),
    (set_column("terminated", dtype="uint8"), "terminated: dtype 'uint8', expected bool"),
    (set_column("final_observation", dtype="int32"), "final_observation: dtype differs"),
    *((set_column("reward", shape=shape), "'reward': shape") for shape in BAD_SHAPES),
    (set_column("reward", shape=[3, 7]), "reward: shape [3, 7], expected [7, 3]"),
    (set_column("reward", shape=[21]), "reward: shape [21], expected [7, 3]"),
    (set_column("reward", shape=[1] * 9), "reward: shape"),
    (set_column("reward", bytes=83), "reward: claims 83 bytes"),
    (set_column("observation", shape=[96]), "observation: shape"),
    (set_column("final_index", shape=[0], bytes=0), "final_index: shape [0], expected [0, 2]"),
    (set_column("episode_return", shape=[22], bytes=88), "episode_return: 22 rows, more than 7 x 3"),
    (set_column("episode_return", shape=[2], bytes=8), "episode_length: shape"),
]


@pytest.mark.parametrize(("change", "message"), FORGED)
def test_forged_header_is_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(CodecError, match=re.escape(message)) as caught:
        codec.decode(forge(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 60_000, b"1" * 5000, b" " * 70_000]
)
def test_a_field_that_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(CodecError, match=r"^h: "):
        codec.decode(codec.encode(make_fragment()) | {b"h": data})


def wider(**shapes: list[int]) -> Callable[[dict[str, Any]], None]:
    """Columns of other shapes, and their bytes."""

    def change(header: dict[str, Any]) -> None:
        for name, shape in shapes.items():
            itemsize = np.dtype(column(header, name)["dtype"]).itemsize
            column(header, name).update(shape=shape, bytes=int(np.prod(shape)) * itemsize)

    return change


VECTORS = make_fragment(end_rate=0.0)
IMAGES = make_fragment(end_rate=0.0, shape=(6, 5), dtype="uint8")
WIDE = [2**20, 2**20 // 24]


@pytest.mark.parametrize("max_bytes", [codec.MAX_BYTES, 2**60])
@pytest.mark.parametrize(
    "fields",
    [
        enlarged(2**31 - 2, bomb=False)(codec.encode(VECTORS)),
        forge(wider(observation=[8, 3, *WIDE], final_observation=[0, *WIDE]), VECTORS),
        forge(wider(observation=[8, 3, *WIDE], final_observation=[0, *WIDE]), IMAGES),
        forge(wider(memory=[5, 2**31 - 1]), with_memory()),
        forge(wider(memory_index=[2**30, 2], memory=[2**30, 512]), with_memory()),
    ],
    ids=["steps", "vectors", "images", "states", "numbers of states"],
)
def test_a_claim_of_much_memory_costs_none(fields: dict[bytes, bytes], max_bytes: int) -> None:
    """Refused by the cap, and without a cap by the size in the chunk itself."""
    tracemalloc.start()  # sees NumPy's buffers and bytes objects
    try:
        with pytest.raises(CodecError):
            codec.decode(fields, max_bytes=max_bytes)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_cap_is_on_the_sum() -> None:
    fragment = make_fragment()
    fields = codec.encode(fragment)
    total = sum(entry["bytes"] for entry in json.loads(fields[b"h"])["columns"])
    codec.decode(fields, max_bytes=total)
    with pytest.raises(CodecError, match=f"columns: {total} bytes uncompressed, at most {total - 1}"):
        codec.decode(fields, max_bytes=total - 1)


def test_cap_is_on_each_step_of_the_fragment_too() -> None:
    """A short fragment may not bring columns as large as the run's longest."""
    fragment = make_fragment()
    wide = np.zeros((*fragment.reward.shape, 10_000), np.uint8)
    fields = codec.encode(dataclasses.replace(fragment, extras={"padding": wide}))
    codec.decode(fields, step_bytes=11_000)
    with pytest.raises(CodecError, match="bytes uncompressed, at most"):
        codec.decode(fields, step_bytes=5_000)


def test_drawn_actions_of_another_shape_are_refused_before_they_are_decompressed() -> None:
    fragment = make_fragment()
    huge = np.zeros((*fragment.action.shape, 20_000), np.int64)
    fields = codec.encode(dataclasses.replace(fragment, extras={"padding": huge}))
    fields |= {b"h": fields[b"h"].replace(b"padding", b"raw_action"), b"raw_action": fields[b"padding"]}
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="raw_action: shape"):
            codec.decode(fields)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def with_chunk(name: str, chunk: bytes, fragment: Fragment | None = None) -> dict[bytes, bytes]:
    """The entry with another chunk for a column, and a matching checksum."""
    fields = codec.encode(fragment or make_fragment()) | {name.encode(): chunk}
    header = json.loads(fields[b"h"])
    header["checksum"] = 0
    for entry in header["columns"]:
        header["checksum"] = zlib.crc32(fields.get(entry["name"].encode(), b""), header["checksum"])
    return fields | {b"h": json.dumps(header).encode()}


def compressed(array: np.ndarray, **options: Any) -> bytes:
    return blosc2.compress2(np.ascontiguousarray(array).reshape(-1).view(np.uint8), nthreads=1, **options)


def patched(chunk: bytes, offset: int, value: int) -> bytes:
    return chunk[:offset] + bytes([value]) + chunk[offset + 1 :]


GOOD = compressed(FRAGMENT.reward)
# Bytes that ask for uninitialized memory, a lazy chunk, blocks of many sizes, plugins as filter and as codec.
UNSAFE = ((31, 4 << 4), (31, 8), (30, 1), (16, 160), (2, GOOD[2] & 31 | 6 << 5))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (b"", "reward: 0 bytes are no"),
        (b"x" * 40, "reward: "),
        (GOOD[:-1], "reward: chunk of 84 bytes"),
        (GOOD + b"x", "reward: chunk of 84 bytes"),
        (compressed(np.zeros(22, "f4")), "reward: chunk of 88 bytes"),
        (compressed(np.zeros(2**22, "f4")), "reward: chunk of 16777216 bytes"),
        (GOOD[:4] + b"\xff\xff\xff\x7f" + GOOD[8:], "reward: .*chunk"),  # claims 2 GiB
        *((patched(GOOD, *byte), "reward: chunk asks for a codec, filter or kind") for byte in UNSAFE),
    ],
)
def test_forged_chunks_are_refused(chunk: bytes, message: str) -> None:
    codec.decode(with_chunk("reward", GOOD))
    with pytest.raises(CodecError, match=message):
        codec.decode(with_chunk("reward", chunk))


ENDED = make_fragment(3)
ROWS = ENDED.final_index


def with_value(array: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("reward", with_value(ENDED.reward, (2, 1), np.nan), "reward: holds NaN"),
        ("observation", with_value(ENDED.observation, (-1, 0, 0), np.inf), "observation: holds NaN"),
        ("terminated", ENDED.terminated | ENDED.truncated, "both terminated and truncated"),
        ("terminated", np.full((7, 3), 2, np.uint8), "terminated: a byte that is neither"),
        ("final_index", ROWS[::-1], "final_index: not the"),
        ("final_index", np.where(ROWS[0] == ROWS, 99, ROWS), "final_index: not the"),
        ("final_index", np.repeat(ROWS[:1], len(ROWS), axis=0), "final_index: not the"),
        ("episode_length", ENDED.episode_length * 0, "episode_length: an episode"),
        *(("memory_index", with_value(INDEX, (0,), row), "environment) outside 9 x 3")
          for row in ([9, 0], [0, 3], [-1, 0], [0, -1])),
        ("memory", np.full((5, 4), np.nan, np.float16), "memory: holds NaN"),
    ],
)  # fmt: skip
def test_values_that_break_an_invariant_are_refused(name: str, array: np.ndarray, message: str) -> None:
    fragment = with_memory() if name.startswith("memory") else ENDED
    with pytest.raises(CodecError, match=re.escape(message)):
        codec.decode(with_chunk(name, compressed(array), fragment))


def test_any_flipped_bit_is_noticed_or_harmless() -> None:
    fragment = make_fragment(5, steps=4, num_envs=2)
    fields = codec.encode(fragment)
    for name, data in fields.items():
        for position in range(len(data)):
            flipped = patched(data, position, data[position] ^ (1 << position % 8))
            try:
                decoded = codec.decode(fields | {name: flipped})
            except CodecError as error:
                assert "\n" not in str(error)
            else:  # only in the header's own numbers, such as seq, or the name of an extra
                assert name == b"h"
                np.testing.assert_array_equal(decoded.observation, fragment.observation)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 80), st.integers(0, 255), st.sampled_from(["observation", "truncated"]))
def test_damaged_chunk_with_a_right_checksum_never_crashes(position: int, value: int, name: str) -> None:
    chunk = codec.encode(make_fragment())[name.encode()]
    try:
        codec.decode(with_chunk(name, patched(chunk, position % len(chunk), value)))
    except CodecError as error:
        assert "\n" not in str(error)
