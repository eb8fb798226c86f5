"""Dispatcher and referee against a real server; sending is recorded, not mocked away: it is their argument."""

from __future__ import annotations

import time

import pytest
from redis import Redis
from runs_for_tests import start, target_config

from ddrl import keys
from ddrl.fleet import Dispatcher, Progress, Referee
from ddrl.store import evaluations, lease, messages, runs, weights, workers
from ddrl.types import EvaluationResult

QUEUE = "ddrl.rollout"


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return start(client, target_config())


def dispatcher(client: Redis, run: str, weight: float = 1.0) -> Dispatcher:
    return Dispatcher(
        client, run, weight=weight, queue=QUEUE, send=lambda: client.lpush(keys.queue(QUEUE), run)
    )


def test_the_dispatcher_keeps_messages_waiting_and_no_more(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    assert [one.tick() for _ in range(5)] == [1, 0, 0, 0, 0]
    client.rpop(keys.queue(QUEUE)), messages.taken(client, run)
    assert one.tick() == 1


def test_messages_wait_in_proportion_to_weight_and_fleet(client: Redis, run: str) -> None:
    workers.beat(client, workers.Heartbeat("a@h", "h", 1, 40, (QUEUE,), {}))
    workers.beat(client, workers.Heartbeat("b@h", "h", 1, 40, ("ddrl.evaluate",), {}))  # plays nothing
    other = start(client, target_config())
    assert dispatcher(client, run, weight=1.0).tick() == 10
    assert dispatcher(client, other, weight=3.0).tick() == 30


def test_lost_messages_are_replaced(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    one.tick()
    client.delete(keys.queue(QUEUE))
    assert one.tick() == 1


class Match:
    """A referee with its run, and the worker that answers it."""

    def __init__(self, client: Redis, run: str, **sections) -> None:
        self.client, self.run = client, run
        config = target_config(**sections)
        token = lease.acquire(client, run, host="h", folder="f")
        self.token = token or int(client.hget(keys.state(run), "fence"))
        self.sent: list[str] = []
        self.referee = Referee(client, run, self.token, config.evaluation, config.stop, send=self.sent.append)
        self.version = 1
        for version in range(6 if token else 0):
            weights.publish(client, run, self.token, version=version, blob=b"w", allowance=0, updates=0)

    def tick(self, return_mean: float | None = 0.0) -> None:
        self.referee.tick(Progress(self.version, return_mean, env_steps=100, updates=10))

    def answer(self, value: float) -> evaluations.OpenEvaluation:
        wanted = evaluations.get_open(self.client, self.run, self.sent[-1])
        assert wanted is not None
        count = wanted.num_episodes
        result = EvaluationResult(wanted.version, wanted.seeds, (value,) * count, (1,) * count)
        assert evaluations.finish(self.client, self.run, wanted, result)
        return wanted


@pytest.fixture
def match(client: Redis, run: str) -> Match:
    return Match(client, run, evaluation={"every_s": 3600, "near_every_s": 0.01, "near": 5, "timeout_s": 0.2})


def test_it_evaluates_when_training_returns_are_near_the_target_only(match: Match) -> None:
    time.sleep(0.02)
    match.tick(return_mean=-5.6), match.tick(return_mean=None)
    assert match.sent == []
    match.tick(return_mean=-5.4)
    assert match.sent == ["1:1000000:20"] and match.referee.pinned == {1}
    match.version = 2
    match.tick()
    assert len(match.sent) == 1  # one in flight


def test_solved_needs_confirmation_of_the_same_version_on_other_seeds(match: Match) -> None:
    time.sleep(0.02)
    match.tick()
    watched = match.answer(-0.4)
    match.version = 5
    match.tick()
    confirmed = match.answer(-0.4)
    assert not match.referee.solved
    assert confirmed.version == watched.version == 1 and confirmed.num_episodes == 100
    assert not set(watched.seeds) & set(confirmed.seeds)
    match.tick()
    assert match.referee.solved and match.referee.pinned == frozenset()
    assert runs.state(match.client, match.run).evaluation == {
        "version": 1, "return_mean": pytest.approx(-0.4), "return_std": pytest.approx(0.0), "episodes": 100,
    }  # fmt: skip


def test_a_failed_confirmation_does_not_solve_and_the_next_version_is_tried(match: Match) -> None:
    time.sleep(0.02)
    match.tick(), match.answer(-0.4), match.tick(), match.answer(-0.6), match.tick()
    assert not match.referee.solved
    match.version = 2
    time.sleep(0.02)
    match.tick()
    assert match.sent[-1] == "2:1000000:20"


def test_the_best_version_is_marked(match: Match) -> None:
    for version, value in ((1, -3.0), (2, -1.0), (3, -2.0)):
        match.version = version
        time.sleep(0.02)
        match.tick(), match.answer(value), match.tick()
    index = weights.index(match.client, match.run)
    assert (index.best, index.best_return) == (2, -1.0)
    assert runs.state(match.client, match.run).evaluation["version"] == 2


def test_an_overdue_evaluation_is_sent_again_and_counts_once(match: Match) -> None:
    time.sleep(0.02)
    match.tick()
    time.sleep(0.25)
    match.tick()
    assert match.sent == ["1:1000000:20"] * 2
    match.answer(-2.0)
    assert (
        evaluations.get_open(match.client, match.run, match.sent[0]) is None
    )  # the second one finds nothing to do


def test_a_lucky_evaluation_that_is_not_confirmed_is_not_the_best(match: Match) -> None:
    match.version = 1
    time.sleep(0.02)
    match.tick(), match.answer(-1.0), match.tick()
    match.version = 2
    time.sleep(0.02)
    match.tick(), match.answer(-0.4), match.tick(), match.answer(-9.0), match.tick()
    assert not match.referee.solved
    assert weights.index(match.client, match.run).best == 1


def test_an_evaluation_whose_weights_are_gone_is_dropped_and_the_next_is_opened(match: Match) -> None:
    time.sleep(0.02)
    match.tick()
    weights.publish(
        match.client, match.run, match.token, version=6, blob=b"w", allowance=0, updates=0, drop=(1,)
    )
    match.version = 6
    time.sleep(0.25)
    match.tick()
    assert evaluations.opened(match.client, match.run) == {} and match.referee.pinned == frozenset()
    time.sleep(0.02)
    match.tick()
    assert match.sent[-1] == "6:1000000:20"


def test_a_confirmation_that_came_while_no_learner_ran_still_solves(match: Match) -> None:
    time.sleep(0.02)
    match.tick(), match.answer(-0.4), match.tick(), match.answer(-0.4)
    successor = Match(match.client, match.run)
    assert successor.referee.solved


def test_sending_that_fails_is_tried_again_at_once(match: Match) -> None:
    time.sleep(0.02)
    sent, match.referee._send = match.sent, lambda _: (_ for _ in ()).throw(ConnectionError)
    with pytest.raises(ConnectionError):
        match.tick()
    match.referee._send = sent.append
    match.tick()
    assert sent == ["1:1000000:20"]


def test_a_new_learner_takes_over_the_open_evaluation(match: Match) -> None:
    time.sleep(0.02)
    match.tick()
    successor = Match(match.client, match.run)
    assert successor.referee.pinned == {1}
    match.answer(-0.1)
    successor.tick()
    assert successor.sent == ["1:1000020:100"]  # goes on with the confirmation
