"""Requests of `ddrl evaluate`: taken by one, answered once, gone with whoever asked."""

from __future__ import annotations

import math
import time

import pytest
from redis import Redis

from ddrl.store import keys, requests
from ddrl.store.requests import Answer, Request

RUN = "toy-1"
WANTED = {n: Request(7, 100 + 5 * n, 5, 5, 0.05, 30 if n else None) for n in range(3)}


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def name(client: Redis) -> str:
    made = requests.new_name()
    requests.put(client, RUN, made, WANTED)
    return made


def test_a_request_comes_back_as_it_was_and_is_answered_once(client: Redis, name: str) -> None:
    text = requests.request_id(name, 1)
    assert requests.is_request(text) and not requests.is_request("31:1000000:20")
    assert requests.take(client, RUN, text, "a") == WANTED[1]
    assert list(WANTED[1].seeds) == [105, 106, 107, 108, 109]
    given = Answer(1, (1.0, -2.5, 0.0, 1e300, 3.0), (1, 2, 3, 4, 5))
    assert requests.answer(client, RUN, text, given)
    assert not requests.answer(client, RUN, text, Answer(1, (9.0,) * 5, (9,) * 5))
    assert requests.answers(client, RUN, name) == [given]
    assert requests.answers(client, RUN, name, 1) == []
    assert requests.take(client, RUN, text, "b") is None
    assert requests.answer(client, RUN, requests.request_id(name, 0), Answer(0, (), (), "no"))
    assert requests.answers(client, RUN, name, 1) == [Answer(0, (), (), "no")]


def test_one_plays_at_a_time_and_the_silent_one_loses_it(client: Redis, name: str) -> None:
    text = requests.request_id(name, 0)
    assert requests.take(client, RUN, text, "a") and requests.take(client, RUN, text, "a")
    assert requests.take(client, RUN, text, "b") is None
    first = requests.look(client, RUN, name)
    assert list(first) == [0]
    time.sleep(0.02)
    assert requests.take(client, RUN, text, "a")
    assert requests.look(client, RUN, name)[0] != first[0]  # a sign of life
    time.sleep(0.02)
    assert requests.take(client, RUN, text, "b", silent_ms=10)
    assert requests.take(client, RUN, text, "a") is None  # it learns that it has lost it


def test_opened_again_anybody_may_take_it(client: Redis, name: str) -> None:
    text = requests.request_id(name, 2)
    assert requests.take(client, RUN, text, "dead")
    requests.put(client, RUN, name, {2: WANTED[2]})
    assert requests.look(client, RUN, name) == {}
    assert requests.take(client, RUN, text, "b") == WANTED[2]


def test_both_keys_expire_unless_somebody_looks(client: Redis, name: str) -> None:
    requests.answer(client, RUN, requests.request_id(name, 1), Answer(1, (), (), "no"))
    both = [keys.requests(RUN, name), keys.answers(RUN, name)]
    assert sorted(client.scan_iter("*")) == sorted(key.encode() for key in both)
    for key in both:
        assert 0 < client.ttl(key) <= requests.TTL_S
        client.expire(key, 5)
    requests.look(client, RUN, name)
    assert all(client.ttl(key) > 5 for key in both)


def test_withdrawn_nothing_is_left_and_nothing_comes_back(client: Redis, name: str) -> None:
    text = requests.request_id(name, 1)
    assert requests.take(client, RUN, text, "a")
    requests.withdraw(client, RUN, name)
    assert requests.take(client, RUN, text, "a") is None
    assert not requests.answer(client, RUN, text, Answer(1, (), ()))
    assert requests.look(client, RUN, name) == {} and client.dbsize() == 0


@pytest.mark.parametrize(
    "text", ["request", "request:", "request:x", "request:x:", "request:x:y:z", "request:é:1"]
)
def test_a_message_that_means_nothing_does_nothing(client: Redis, name: str, text: str) -> None:
    assert requests.number_of(text) is None
    assert requests.take(client, RUN, text, "a") is None
    assert not requests.answer(client, RUN, text, Answer(0, (), ()))
    assert client.dbsize() == 1


def test_the_number_of_a_request() -> None:
    assert [requests.number_of(requests.request_id("x", number)) for number in (0, 7, 10_000)] == [
        0,
        7,
        10_000,
    ]


BAD_REQUESTS = (b"{", b"[]", b"\xff", b"{}", b'{"version": 1}', b'{"version": "x"}', b"null")


@pytest.mark.parametrize("row", BAD_REQUESTS)
def test_a_request_that_cannot_be_read_is_named(client: Redis, name: str, row: bytes) -> None:
    client.hset(keys.requests(RUN, name), "1", row)
    with pytest.raises(ValueError, match=r"^request 1: cannot be read \([^\n]+\); send it again$"):
        requests.take(client, RUN, requests.request_id(name, 1), "a")


@pytest.mark.parametrize(
    ("row", "number"),
    [
        (b"{", -1),
        (b"[]", -1),
        (b"\xff", -1),
        (b"7", -1),
        (b"[" * 100_000, -1),
        (b'{"returns": [], "lengths": []}', -1),
        (b'{"number": "x", "returns": [], "lengths": []}', -1),
        (b'{"number": 2}', 2),
        (b'{"number": 2, "returns": [1], "lengths": ["x"]}', 2),
        (b'{"number": 2, "returns": 5, "lengths": [1]}', 2),
        (b'{"number": 2, "returns": [1], "lengths": [1], "error": 5}', 2),
    ],
)
def test_an_answer_that_cannot_be_read_counts_as_failed(
    client: Redis, name: str, row: bytes, number: int
) -> None:
    client.rpush(keys.answers(RUN, name), row)
    good = Answer(1, (math.inf, -2.0), (3, 4))
    assert requests.answer(client, RUN, requests.request_id(name, 1), good)
    bad, other = requests.answers(client, RUN, name)
    assert (bad.number, bad.returns, bad.lengths) == (number, (), ())
    assert bad.error.startswith("its answer cannot be read (") and "\n" not in bad.error
    assert other == good and requests.answers(client, RUN, name, 1) == [good]


def test_fields_that_mean_nothing_are_no_signs(client: Redis, name: str) -> None:
    requests.take(client, RUN, requests.request_id(name, 0), "a")
    for field in (b"x:player", b"\xff:player", b"0:other", b":"):
        client.hset(keys.requests(RUN, name), field, b"\xff")
    assert list(requests.look(client, RUN, name)) == [0]
