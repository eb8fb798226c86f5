"""Open evaluations of runs and commands: played by one, stored once, sent again when lost."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import pytest
from redis import Redis

from ddrl.store import connection, evaluations, keys, leases, weights
from ddrl.store.evaluations import Evaluation, OpenEvaluations
from ddrl.types import EvaluationResult

WANTED = [
    Evaluation(
        version=7,
        first_seed=first,
        num_episodes=2,
        purpose="request",
        epsilon=0.05,
        noop_max=30,
        opponent="a:b",
    )
    for first in (100, 102, 104)
]


class Waiting(OpenEvaluations):
    """Open evaluations whose messages are kept in `sent`; none can be sent while `is_cut_off`."""

    def __init__(self, client: Redis, run: str, *, token: int = 0, timeout_s: float = 60.0) -> None:
        self.client, self.run, self.is_cut_off = client, run, False
        self.sent: list[str] = []
        super().__init__(client, run, send=self.send, timeout_s=timeout_s, token=token)

    def send(self, message: str) -> None:
        if self.is_cut_off:
            raise ConnectionError
        self.sent.append(message)

    def take(self, number: int, player: str) -> Evaluation | None:
        """Take the evaluation of the message of that number."""
        return evaluations.take(self.client, self.run, self.sent[number], player)

    def finish(self, number: int, evaluation: Evaluation) -> bool:
        return evaluations.finish(self.client, self.run, self.sent[number], evaluation, RESULT)

    def fail(self, number: int) -> None:
        evaluations.fail(self.client, self.run, self.sent[number], "no library")

    @property
    def own_keys(self) -> tuple[str, str]:
        """The key of these evaluations and that of their results."""
        requester = self.sent[0].rpartition("/")[0]
        return keys.evaluating(self.run, requester), keys.evaluations(self.run, requester)

    @property
    def players(self) -> str:
        """The key of their players."""
        return keys.players(self.run, self.sent[0].rpartition("/")[0])


RESULT = EvaluationResult((1.5, -2.5), (3, 4))


@pytest.fixture
def token(client: Redis, run: str, token: int) -> int:
    """The token of a learner that has published version 7."""
    weights.publish(client, run, token, version=7, blob=b"w", allowance=0, updates=0)
    return token


@pytest.fixture
def command(client: Redis, run: str, token: int) -> Waiting:
    """Three evaluations of a command."""
    waiting = Waiting(client, run)
    waiting.open(WANTED)
    return waiting


def test_an_evaluation_arrives_as_it_was_opened_and_is_stored_once(command: Waiting) -> None:
    assert len(command.sent) == 3 and command.pending == WANTED and command.poll() == []
    taken = command.take(1, "a")
    assert taken == WANTED[1] and list(taken.seeds) == [102, 103]
    assert [command.finish(1, taken) for _ in range(2)] == [True, False]
    (row,) = command.poll()
    assert row["first_seed"] == 102 and row["returns"] == [1.5, -2.5] and row["lengths"] == [3, 4]
    assert (row["return_mean"], row["return_std"], row["purpose"]) == (-0.5, 2.0, "request")
    assert command.poll() == [] and command.pending == [WANTED[0], WANTED[2]]
    assert command.take(1, "b") is None
    assert [command.take(0, player) for player in ("a", "a", "b")] == [WANTED[0], WANTED[0], None]
    command.fail(0)
    assert command.take(0, "b") and command.take(0, "a") is None


def test_results_that_nobody_asked_for_are_left_out(client: Redis, run: str, token: int) -> None:
    learner = Waiting(client, run, token=token)
    learner.open(WANTED[:1])
    assert learner.poll() == []
    forged = asdict(WANTED[1]) | {
        "returns": [1.0, 2.0],
        "lengths": [1, 1],
        "return_mean": 1.5,
        "return_std": 0.5,
    }
    client.xadd(keys.evaluations(run), {"result": json.dumps(forged)})
    assert learner.finish(0, WANTED[0])
    assert [row["first_seed"] for row in learner.poll()] == [100] and learner.pending == []


def test_results_of_commands_and_of_the_run_do_not_mix(command: Waiting, token: int) -> None:
    client, run = command.client, command.run
    learner, other = Waiting(client, run, token=token), Waiting(client, run)
    own = Evaluation(version=7, first_seed=100, num_episodes=2, purpose="watch", env_steps=500, updates=50)
    learner.open([own]), other.open(WANTED[:1])
    messages = [waiting.sent[0] for waiting in (command, learner, other)]
    assert len(set(messages)) == 3
    assert [evaluations.is_of_run(message) for message in messages] == [False, True, False]
    assert command.finish(0, WANTED[0])
    assert learner.poll() == other.poll() == evaluations.results(client, run)[0] == []
    assert learner.finish(0, own)
    assert [row["purpose"] for row in learner.poll()] == ["watch"] and other.poll() == []
    assert evaluations.results(client, run)[0][0]["env_steps"] == 500
    assert len(command.poll()) == 1 and len(other.pending) == 1


@pytest.mark.parametrize("taken", [False, True])
def test_a_lost_evaluation_is_sent_again_for_anyone(client: Redis, run: str, token: int, taken: bool) -> None:
    waiting = Waiting(client, run, token=token, timeout_s=0.05)
    waiting.open(WANTED[:1])
    if taken:
        assert waiting.take(0, "dead")
        waiting.poll()
    time.sleep(0.06)
    waiting.poll()
    assert waiting.sent == [WANTED[0].id] * 2
    assert waiting.take(1, "b") and waiting.take(0, "dead") is None


def test_an_evaluation_that_is_played_on_is_not_sent_again(command: Waiting) -> None:
    command.timeout_s = 0.1
    for each in WANTED:  # a worker may have written a count that grows no more
        command.client.hset(command.players, f"{each.id}:beats", 2**53)
    deadline = time.monotonic() + 0.4
    while time.monotonic() < deadline:
        assert all(command.take(number, "a") for number in range(3))
        command.poll()
        time.sleep(0.01)
    assert len(command.sent) == 3


def test_a_run_waits_for_its_evaluation_however_often_it_is_lost(client: Redis, run: str, token: int) -> None:
    waiting = Waiting(client, run, token=token, timeout_s=0.0)
    waiting.open(WANTED[:1])
    for _ in range(10):
        waiting.fail(-1)
        waiting.poll()
    assert len(waiting.sent) > 5 and waiting.pending == WANTED[:1] and waiting.given_up == {}


def test_a_command_gives_up_what_fails_once_or_is_lost_three_times(command: Waiting) -> None:
    command.fail(1)
    command.poll()
    assert command.given_up == {WANTED[1].id: "no library"} and len(command.sent) == 3
    command.timeout_s = 0.0
    for _ in range(4):
        command.poll()
    assert command.given_up[WANTED[0].id] == "it was lost 3 times" and command.pending == []
    assert command.take(0, "a") is None


def test_a_new_learner_takes_over_open_evaluations(client: Redis, run: str, token: int) -> None:
    first = Waiting(client, run, token=token)
    first.is_cut_off = True
    with pytest.raises(ConnectionError):
        first.open(WANTED[:2])
    first.is_cut_off = False
    first.poll()
    assert first.sent == [WANTED[0].id, WANTED[1].id]
    successor = Waiting(client, run, token=token)
    assert successor.pending == []
    successor.take_over()
    assert successor.pending == WANTED[:2] and successor.sent == []
    successor.poll()
    assert successor.sent == [WANTED[0].id, WANTED[1].id]
    assert successor.finish(0, WANTED[0]) and [row["first_seed"] for row in successor.poll()] == [100]
    assert [*evaluations.opened(client, run)] == [WANTED[1].id], "one with a result is closed"


def test_only_the_newest_learner_opens_evaluations(client: Redis, run: str, token: int) -> None:
    waiting = Waiting(client, run, token=token)
    assert leases.acquire(client, run, host="other", folder="", force=True)
    for attempt in (lambda: waiting.open(WANTED), lambda: waiting.store(WANTED[0], RESULT)):
        with pytest.raises(connection.LeaseLostError):
            attempt()
    assert evaluations.opened(client, run) == {} and waiting.sent == []


def test_keys_of_a_command_expire_unless_it_polls_and_go_when_it_withdraws(command: Waiting) -> None:
    client = command.client
    assert command.take(0, "a") and command.finish(1, WANTED[1])
    own = *command.own_keys, command.players
    assert client.exists(*own) == 3
    for key in own:
        assert 0 < client.ttl(key) <= evaluations.TTL_S
        client.expire(key, 5)
    command.poll()
    assert all(client.ttl(key) > 5 for key in own)
    command.withdraw()
    assert client.exists(*own) == 0 and command.take(0, "a") is None and not command.finish(0, WANTED[0])
    command.fail(0)
    assert client.exists(*own) == 0


@pytest.mark.parametrize(
    "message", ["", "request", "/7:1:2", "7:1", "7:1:2:3", "x/7:1:2", "é:1:2", "7:1:2:player", "request:ab:1"]
)
def test_a_message_that_names_no_evaluation_does_nothing(command: Waiting, message: str) -> None:
    before = sorted(command.client.scan_iter())
    assert evaluations.take(command.client, command.run, message, "a") is None
    assert sorted(command.client.scan_iter()) == before


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"{}", b'{"version": "x"}', b"null"])
def test_an_evaluation_that_cannot_be_read_is_named(command: Waiting, text: bytes) -> None:
    command.client.hset(command.own_keys[0], WANTED[0].id, text)
    with pytest.raises(ValueError, match=r"^evaluation 7:100:2 cannot be read \([^\n]+\); open it again$"):
        command.take(0, "a")


FIGURES = {"returns": [1.0, 2.0], "lengths": [3, 4], "return_mean": 1.5, "return_std": 0.5}
INCOMPLETE: list[Any] = [
    *(b"{", b"[]", b"\xff", b"7", b"[" * 100_000, b"{}"),
    *({"returns": [], "num_episodes": 0}, {"returns": [1.0, float("nan")]}, {"returns": [1.0]}),
    *({"returns": 5}, {"lengths": ["x", 1]}, {"lengths": [1]}),
    *({"return_mean": float("inf")}, {"version": "latest"}),
]


@pytest.mark.parametrize("text", INCOMPLETE)
def test_an_incomplete_result_is_left_out(client: Redis, run: str, token: int, text: Any) -> None:
    """The evaluation of a command is given up then, one of a run is sent again."""
    command, learner = Waiting(client, run), Waiting(client, run, token=token, timeout_s=0.0)
    for waiting in (command, learner):
        waiting.open(WANTED[:2])
        _, results = waiting.own_keys
        client.hset(waiting.players, f"{WANTED[0].id}:done", 1)
        row = text if isinstance(text, bytes) else json.dumps({**FIGURES, **vars(WANTED[0]), **text})
        for fields in ({"result": row}, {"other": b""}):
            client.xadd(results, fields)
        waiting.finish(1, WANTED[1])
        assert [row["first_seed"] for row in waiting.poll()] == [102]
    assert command.given_up == {WANTED[0].id: "its result is missing or cannot be read"}
    assert command.pending == [] and learner.pending == WANTED[:1] and learner.sent[2:] == [WANTED[0].id]
