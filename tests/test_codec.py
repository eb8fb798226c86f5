"""Fragments survive encoding exactly; anything else is refused in one line, before memory is allocated."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import blosc2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl import codec
from ddrl.codec import CodecError
from ddrl.types import Fragment

ARRAYS = [field.name for field in dataclasses.fields(Fragment)][6:-1]


def make_fragment(
    seed: int = 0,
    *,
    steps: int = 7,
    num_envs: int = 3,
    context: int = 0,
    shape: tuple[int, ...] = (4,),
    dtype: str = "float32",
    action_kind: str = "continuous",
    end_rate: float = 0.3,
    extras: bool = False,
) -> Fragment:
    rng = np.random.default_rng(seed)
    rows = context + steps

    def observations(*axes: int) -> np.ndarray:
        return (rng.normal(size=(*axes, *shape)) * 50).astype(dtype)

    ended = rng.random((rows, num_envs)) < end_rate
    truncated = ended & (rng.random((rows, num_envs)) < 0.5)
    index = np.argwhere(truncated).astype(np.int32)
    episodes = int(ended.sum())
    action = (
        rng.normal(size=(rows, num_envs, 2)).astype("f4")
        if action_kind == "continuous"
        else rng.integers(0, 5, (rows, num_envs) if action_kind == "discrete" else (rows, num_envs, 2))
    )
    columns = {"behavior_log_prob": (), "raw_action": (2,)} if extras else {}
    return Fragment(
        run="run-1",
        producer=7,
        incarnation=2**60 + 1,
        seq=3,
        policy_version=11,
        context=context,
        observation=observations(rows + 1, num_envs),
        action=action,
        reward=rng.normal(size=(rows, num_envs)).astype("f4"),
        terminated=ended & ~truncated,
        truncated=truncated,
        final_index=index,
        final_observation=observations(len(index)),
        episode_return=rng.normal(size=episodes).astype("f4"),
        episode_length=rng.integers(1, 99, episodes).astype("i4"),
        extras={
            name: rng.normal(size=(rows, num_envs, *axes)).astype("f4") for name, axes in columns.items()
        },
    )


def assert_same(actual: Fragment, expected: Fragment) -> None:
    for field in dataclasses.fields(Fragment)[:6]:
        assert getattr(actual, field.name) == getattr(expected, field.name)
    pairs = [(getattr(actual, name), getattr(expected, name)) for name in ARRAYS]
    assert set(actual.extras) == set(expected.extras)
    pairs += [(actual.extras[name], expected.extras[name]) for name in expected.extras]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 20),
    num_envs=st.integers(1, 5),
    context=st.integers(0, 3),
    shape=st.sampled_from([(), (1,), (8,), (5, 6), (3, 4, 2)]),
    dtype=st.sampled_from(["float32", "float64", "float16", "uint8", "int64", "bool"]),
    action_kind=st.sampled_from(["continuous", "discrete", "multi_discrete"]),
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
    for steps, num_envs, shape, block in [
        (19, 3, (84, 84), 20 * 7056),
        (149, 1, (84, 84), 75 * 7056),
        (3, 2, (1024, 1025), 1024 * 1025),
    ]:
        fragment = make_fragment(steps=steps, num_envs=num_envs, shape=shape, dtype="uint8", end_rate=0.0)
        fields = codec.encode(fragment)
        assert blosc2.get_cbuffer_sizes(fields[b"observation"])[2] == block
    lanes = np.ascontiguousarray(fragment.observation.swapaxes(0, 1))
    old = blosc2.compress2(
        lanes.reshape(-1), typesize=1, codec=blosc2.Codec.ZSTD, clevel=5, filters=[blosc2.Filter.NOFILTER]
    )
    assert_same(codec.decode(with_chunk("observation", old, fragment)), fragment)


def with_memory(num_states: int = 5, size: int = 4, **changed: np.ndarray) -> Fragment:
    """7 + 2 steps of 3 environments, and recurrent states of some."""
    rng = np.random.default_rng(1)
    index = np.stack([rng.integers(0, 9, num_states), rng.integers(0, 3, num_states)], 1).astype("i4")
    memory = {"memory_index": index, "memory": rng.normal(size=(num_states, size)).astype("f2")}
    return dataclasses.replace(make_fragment(context=2), extras={**memory, **changed})


@pytest.mark.parametrize("num_states", [0, 5, 27])
def test_recurrent_states_have_rows_of_their_own(num_states: int) -> None:
    fragment = with_memory(num_states)
    assert_same(codec.decode(codec.encode(fragment)), fragment)


def test_recurrent_states_of_another_form_are_refused() -> None:
    good = with_memory().extras
    index, memory = good["memory_index"], good["memory"]
    for changed, message in [
        ({"memory_index": index.astype("i8")}, "memory_index: dtype 'int64', expected int32"),
        ({"memory": memory.astype("f4")}, "memory: dtype 'float32', expected float16"),
        ({"memory": memory[:, 0]}, "memory: shape [5], expected [5, 0]"),
        ({"memory_index": index[:, :1]}, "memory_index: shape [5, 1], expected [5, 2]"),
        ({"memory_index": index[:, 0]}, "memory_index: shape [5], expected [5, 2]"),
        ({"memory": memory[:4]}, "memory: shape [4, 4], expected [5, 4]"),
        ({"memory_index": index[:4]}, "memory: shape [5, 4], expected [4, 4]"),
    ]:
        with pytest.raises(CodecError) as caught:
            codec.encode(with_memory(**changed))
        assert message in str(caught.value)
    for name in good:
        with pytest.raises(CodecError, match="together or not at all"):
            codec.encode(dataclasses.replace(with_memory(), extras={name: good[name]}))
    with pytest.raises(CodecError, match="^memory_index: 28 rows, more than 9 x 3 steps"):
        codec.encode(with_memory(28))
    for row in ([9, 0], [0, 3], [-1, 0], [0, -1]):
        bad = np.array([row, *index[1:]], np.int32)
        with pytest.raises(CodecError, match=r"^memory_index: a \(step, environment\) outside 9 x 3"):
            codec.decode(codec.encode(with_memory(memory_index=bad)))
    with pytest.raises(CodecError, match="^memory: holds NaN"):
        codec.decode(codec.encode(with_memory(memory=np.full((5, 4), np.nan, np.float16))))


def test_encode_refuses_what_decode_would() -> None:
    fragment = make_fragment()
    with pytest.raises(CodecError, match="^reward: dtype 'float64'"):
        codec.encode(dataclasses.replace(fragment, reward=fragment.reward.astype("f8")))
    with pytest.raises(CodecError, match="^action: shape"):
        codec.encode(dataclasses.replace(fragment, action=fragment.action[1:]))
    with pytest.raises(CodecError, match="^extras: a name repeats"):
        codec.encode(dataclasses.replace(fragment, extras={"reward": fragment.reward}))
    with pytest.raises(CodecError, match="no column name"):
        codec.encode(dataclasses.replace(fragment, extras={"n": fragment.reward}))
    with pytest.raises(CodecError, match="dtype 'object'"):
        codec.encode(dataclasses.replace(fragment, extras={"who": fragment.reward.astype(object)}))


def forge(change: Callable[[dict[str, Any]], None], fragment: Fragment | None = None) -> dict[bytes, bytes]:
    fields = codec.encode(fragment or make_fragment())
    header = json.loads(fields[b"h"])
    change(header)
    return fields | {b"h": json.dumps(header).encode()}


def column(header: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in header["columns"] if c["name"] == name)


def set_column(name: str, /, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: column(header, name).update(values)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["columns"].remove(column(header, name))


FORGED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda h: h.update(format=2), "format: 2"),
    (lambda h: h.update(format=True), "format: True"),
    (lambda h: h.pop("format"), "format: None"),
    (lambda h: h.update(run=""), "run: ''"),
    (lambda h: h.update(run=5), "run: 5"),
    (lambda h: h.update(producer="7"), "producer: '7'"),
    (lambda h: h.update(seq=-1), "seq: -1"),
    (lambda h: h.update(seq=True), "seq: True"),
    (lambda h: h.update(policy_version=1.0), "policy_version: 1.0"),
    (lambda h: h.update(incarnation=2**63), "incarnation: 9223372036854775808"),
    (lambda h: h.update(T=0), "T, N: 0 steps"),
    (lambda h: h.update(N=0), "T, N: 7 steps of 0"),
    (lambda h: h.update(T=8), "shape"),
    (lambda h: h.update(N=4), "shape"),
    (lambda h: h.update(C=1), "shape"),
    (lambda h: h.update(checksum=1), "checksum: "),
    (lambda h: h.update(columns={}), "columns: no list"),
    (lambda h: h.update(columns=[]), "observation: the column is missing"),
    (lambda h: h.update(columns=h["columns"] * 9), "columns: no list of at most 64"),
    (lambda h: h["columns"].append(h["columns"][0]), "columns: a name occurs twice"),
    (lambda h: h["columns"].append("reward"), "columns: 'reward' is not"),
    (drop("reward"), "reward: the column is missing"),
    (set_column("reward", name="h"), "columns: 'h' is no column name"),
    (set_column("reward", name=["x"]), "no column name"),
    (set_column("reward", extra=1), "is not {name"),
    (set_column("reward", dtype="object"), "reward: dtype 'object'"),
    (set_column("reward", dtype=["f4"]), "reward: dtype"),
    (set_column("reward", dtype="int32"), "reward: dtype 'int32', expected float32"),
    (set_column("terminated", dtype="uint8"), "terminated: dtype 'uint8', expected bool"),
    (set_column("final_observation", dtype="int32"), "final_observation: dtype differs"),
    (set_column("reward", shape="7,3"), "'reward': shape"),
    (set_column("reward", shape=[1] * 9), "reward: shape"),
    (set_column("reward", shape=[7, -3]), "'reward': shape"),
    (set_column("reward", shape=[7, 3.0]), "'reward': shape"),
    (set_column("reward", shape=[7, True]), "'reward': shape"),
    (set_column("reward", shape=[3, 7]), "reward: shape [3, 7], expected [7, 3]"),
    (set_column("reward", shape=[21]), "reward: shape [21], expected [7, 3]"),
    (set_column("reward", bytes=83), "reward: claims 83 bytes"),
    (set_column("observation", shape=[96]), "observation: shape"),
    (set_column("final_index", shape=[0], bytes=0), "final_index: shape [0], expected [0, 2]"),
    (set_column("episode_return", shape=[22], bytes=88), "episode_return: 22 rows, more than 7 x 3"),
    (set_column("episode_return", shape=[2], bytes=8), "episode_length: shape"),
]


@pytest.mark.parametrize(("change", "message"), FORGED)
def test_forged_header_is_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(CodecError) as caught:
        codec.decode(forge(change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 60_000, b"1" * 5000, b" " * 70_000]
)
def test_a_field_that_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(CodecError, match=r"^h: "):
        codec.decode(codec.encode(make_fragment()) | {b"h": data})


@pytest.mark.parametrize("max_bytes", [codec.MAX_BYTES, 2**60])
def test_claim_of_a_terabyte_costs_no_memory(max_bytes: int) -> None:
    """Refused by the cap, and without a cap by the size in the chunk itself."""
    steps = 2**40 // (3 * 4 * 4)

    def claim(header: dict[str, Any]) -> None:
        header["T"] = steps
        for entry in header["columns"]:
            if entry["shape"][:2] in ([7, 3], [8, 3]):
                entry["shape"][0] += steps - 7
                entry["bytes"] = int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize

    def wide(header: dict[str, Any]) -> None:
        width = 2**40 // (8 * 3 * 4 * 2**20)
        for name, rows in (("observation", [8, 3]), ("final_observation", [0])):
            shape = [*rows, 2**20, width]
            column(header, name).update(shape=shape, bytes=int(np.prod(shape)) * 4)

    def long(header: dict[str, Any]) -> None:
        column(header, "memory").update(shape=[5, 2**31 - 1], bytes=5 * (2**31 - 1) * 2)

    def many(header: dict[str, Any]) -> None:
        column(header, "memory_index").update(shape=[2**30, 2], bytes=2**33)
        column(header, "memory").update(shape=[2**30, 512], bytes=2**40)

    def images(header: dict[str, Any]) -> None:
        for name, rows in (("observation", [8, 3]), ("final_observation", [0])):
            shape = [*rows, 2**20, 2**20 // 24]
            column(header, name).update(shape=shape, bytes=int(np.prod(shape)))

    picture = make_fragment(end_rate=0.0, shape=(6, 5), dtype="uint8")
    plain = make_fragment(end_rate=0.0)
    for change, fragment in (
        (claim, plain),
        (wide, plain),
        (images, picture),
        (long, with_memory()),
        (many, with_memory()),
    ):
        fields = forge(change, fragment)
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


def with_chunk(name: str, chunk: bytes, fragment: Fragment | None = None) -> dict[bytes, bytes]:
    """The entry with another chunk for a column, and a matching checksum."""
    fields = codec.encode(fragment or make_fragment()) | {name.encode(): chunk}
    header = json.loads(fields[b"h"])
    header["checksum"] = 0
    for entry in header["columns"]:
        header["checksum"] = zlib.crc32(fields.get(entry["name"].encode(), b""), header["checksum"])
    return fields | {b"h": json.dumps(header).encode()}


def compressed(array: np.ndarray) -> bytes:
    chunk: bytes = blosc2.compress2(np.ascontiguousarray(array).reshape(-1).view(np.uint8), nthreads=1)
    return chunk


def patched(chunk: bytes, offset: int, value: int) -> bytes:
    return chunk[:offset] + bytes([value]) + chunk[offset + 1 :]


def test_forged_chunks_are_refused() -> None:
    fragment = make_fragment()
    good = compressed(fragment.reward)
    codec.decode(with_chunk("reward", good))
    for chunk, message in [
        (b"", "reward: 0 bytes are no"),
        (b"x" * 40, "reward: "),
        (good[:-1], "reward: chunk of 84 bytes"),
        (good + b"x", "reward: chunk of 84 bytes"),
        (compressed(np.zeros(22, "f4")), "reward: chunk of 88 bytes"),
        (compressed(np.zeros(2**22, "f4")), "reward: chunk of 16777216 bytes"),
        (patched(good, 31, 4 << 4), "reward: chunk asks for a filter or kind"),  # uninitialized memory
        (patched(good, 31, 8), "reward: chunk asks for a filter or kind"),  # lazy
        (patched(good, 16, 160), "reward: chunk asks for a filter or kind"),  # a plugin
    ]:
        with pytest.raises(CodecError) as caught:
            codec.decode(with_chunk("reward", chunk))
        assert message in str(caught.value)


def test_values_that_break_an_invariant_are_refused() -> None:
    fragment = make_fragment(3)
    rows = fragment.final_index
    assert len(rows) >= 2
    nan = fragment.reward.copy()
    nan[2, 1] = np.nan
    infinite = fragment.observation.copy()
    infinite[-1, 0, 0] = np.inf
    for name, array, message in [
        ("reward", nan, "reward: holds NaN"),
        ("observation", infinite, "observation: holds NaN"),
        ("terminated", fragment.terminated | fragment.truncated, "both terminated and truncated"),
        ("terminated", np.full((7, 3), 2, np.uint8), "terminated: a byte that is neither"),
        ("final_index", rows[::-1], "final_index: not the"),
        ("final_index", np.where(rows == rows[0], 99, rows), "final_index: not the"),
        ("final_index", np.repeat(rows[:1], len(rows), axis=0), "final_index: not the"),
        ("episode_length", fragment.episode_length * 0, "episode_length: an episode"),
    ]:
        with pytest.raises(CodecError) as caught:
            codec.decode(with_chunk(name, compressed(array), fragment))
        assert message in str(caught.value)


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


@settings(max_examples=150, deadline=None)
@given(
    position=st.integers(0, 80), value=st.integers(0, 255), name=st.sampled_from(["observation", "truncated"])
)
def test_damaged_chunk_with_a_right_checksum_never_crashes(position: int, value: int, name: str) -> None:
    chunk = codec.encode(make_fragment())[name.encode()]
    try:
        codec.decode(with_chunk(name, patched(chunk, position % len(chunk), value)))
    except CodecError as error:
        assert "\n" not in str(error)
