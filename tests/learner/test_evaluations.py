"""Evaluations of a run: their times, its best version, and its end when it is solved."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from support.runs import Acts, start, target_config

from ddrl.config import EnvConfig, RunConfig
from ddrl.envs import describe
from ddrl.learner import evaluations as of_learner
from ddrl.learner.evaluations import EvaluationScheduler
from ddrl.policy import LoadedPolicy
from ddrl.runs import submit
from ddrl.store import evaluations, keys, leases, runs, weights
from ddrl.store.evaluations import Evaluation
from ddrl.types import EvaluationResult


class Match:
    """The scheduler of a run's next learner, and the worker that plays its evaluations."""

    def __init__(self, client: Redis, run: str, **evaluation: Any) -> None:
        self.client, self.run = client, run
        config = target_config(evaluation=evaluation)
        token = leases.acquire(client, run, host="h", folder="f")
        self.token = token or int(client.hget(keys.state(run), "fence"))
        self.version = 1
        for version in range(6 if token else 0):
            weights.publish(client, run, self.token, version=version, blob=b"w", allowance=0, updates=0)
        self.sent: list[str] = []
        self.scheduler = EvaluationScheduler(client, run, self.token, config, send=self.sent.append)

    def tick(self, return_mean: float | None = 0.0) -> None:
        time.sleep(0.01)  # `near_every_s` passes
        self.scheduler.tick(self.version, return_mean, env_steps=100, updates=10)

    def play(self, results: list[tuple[int, float]]) -> None:
        """Evaluate versions, with these mean returns."""
        for self.version, value in results:
            self.tick(), self.answer(value), self.tick()

    def answer(self, value: float) -> Evaluation:
        wanted = evaluations.take(self.client, self.run, self.sent[-1], "player")
        assert wanted is not None
        count = wanted.num_episodes
        result = EvaluationResult((value,) * count, (1,) * count)
        assert evaluations.finish(self.client, self.run, self.sent[-1], wanted, result)
        return wanted


@pytest.fixture
def match(server: Any) -> Match:
    """One whose first evaluation is over."""
    run = start(server.client, target_config())
    match = Match(server.client, run, every_s=3600, near_every_s=0.01, near=0.05)
    match.play([(5, -99.0)])
    match.version = 1
    match.sent.clear()
    return match


@pytest.mark.parametrize(
    ("status", "max_steps", "longest_s", "num_stored"),
    [
        *[("time", 3, 0, 2), ("time", 10**9, 0, 0), ("time", 10_000, 600, 2)],
        *[("stopped", 3, 0, 1), ("stopped", 10**9, 600, 0), ("failed", 3, 0, 0)],
    ],
)
def test_the_evaluation_at_the_end_takes_little_longer_than_any_before(
    match: Match,
    status: str,
    max_steps: int,
    longest_s: float,
    num_stored: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The latest version and the best one again; where someone waits who has stopped the run, only this."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    monkeypatch.setattr(of_learner, "LAST_S", 60.0 if max_steps == 3 else 0.3)
    monkeypatch.setattr(match.scheduler, "_longest_s", longest_s)
    env = EnvConfig(id="support.odd_envs:Endless")
    config = RunConfig(env=env, algorithm={"name": "none"}, evaluation={"max_steps": max_steps})
    still = Acts(lambda seen: np.zeros(len(seen), np.int64))
    loaded = LoadedPolicy(still, config, describe(env), match.run, 4)
    monkeypatch.setattr(of_learner.policy, "from_run", lambda *_: loaded)
    weights.publish(match.client, match.run, match.token, version=6, blob=b"w", allowance=0, updates=0)
    if status == "stopped":  # the best of several
        match.play([(4, -100.0)])
    match.scheduler.finish(status, env_steps=1, updates=1)
    lengths = [row["lengths"][0] for row in evaluations.results(match.client, match.run)[0]]
    assert lengths == [1] * (1 + (status == "stopped")) + [max_steps] * num_stored


def test_a_policy_that_cannot_be_loaded_keeps_no_run_from_its_end(match: Match) -> None:
    weights.publish(match.client, match.run, match.token, version=6, blob=b"w", allowance=0, updates=0)
    match.scheduler.finish("time", env_steps=1, updates=1)
    assert 6 not in [row["version"] for row in evaluations.results(match.client, match.run)[0]]


def test_the_best_of_many_is_scored_on_fresh_seeds_when_the_run_ends(
    match: Match, monkeypatch: pytest.MonkeyPatch
) -> None:
    match.play([(1, -3.0), (2, -1.0), (3, -2.0)])
    played: list[tuple[int, range]] = []

    def score(loaded: int, seeds: range, **_: Any) -> EvaluationResult:
        played.append((loaded, seeds))
        return EvaluationResult((-1.5,) * len(seeds), (1,) * len(seeds))

    monkeypatch.setattr(of_learner.policy, "from_run", lambda client, run, version: version)
    monkeypatch.setattr(of_learner, "score", score)
    for _ in range(2):  # the run is resumed in between, without a better version
        match.scheduler.finish("time", env_steps=900, updates=90)
        best = runs.state(match.client, match.run).evaluation
        assert best == {"version": 2, "return_mean": -1.5, "return_std": 0.0, "episodes": 20}
    match.scheduler.finish("stopped", env_steps=900, updates=90)  # likewise
    assert played == [(2, range(1_000_120, 1_000_140))]
    [final] = [one for one in evaluations.results(match.client, match.run)[0] if one["purpose"] == "final"]
    assert (final["env_steps"], final["updates"]) == (100, 10)  # those of the version


def test_the_first_version_that_was_learned_is_evaluated_at_once_over_few_episodes(server: Any) -> None:
    run = start(server.client, target_config())
    match = Match(server.client, run, every_s=3600, near_every_s=0.01)
    match.version = 0
    match.tick(None)
    assert match.sent == []
    match.version = 1
    match.tick(None)
    assert match.sent == ["1:1000000:5"]
    match.answer(-3.0), match.tick(None)
    assert weights.index(match.client, match.run).best == 1
    match.version = 2
    match.tick(None)
    assert len(match.sent) == 1  # now at its intervals
    match.play([(2, -4.0)])
    assert weights.index(match.client, match.run).best == 2  # few episodes may be luck


def test_it_evaluates_when_training_returns_are_near_the_target_only(match: Match) -> None:
    """The lowest return was -99, so a twentieth of the way to -0.5 is 4.9."""
    match.tick(return_mean=-5.6), match.tick(return_mean=None)
    assert match.sent == [] and match.scheduler.pinned == frozenset()
    match.tick(return_mean=-5.4)
    assert match.sent == ["1:1000000:20"] and match.scheduler.pinned == {1}
    match.version = 2
    match.tick()
    assert len(match.sent) == 1  # one at a time


def test_one_return_far_below_all_others_is_soon_forgotten(match: Match) -> None:
    """A worker may send any: else all others would be near the target for good."""
    match.tick(return_mean=-1e30)
    match.tick(return_mean=-5.6)
    assert match.sent == []


def test_a_learner_waits_for_what_an_earlier_one_has_opened(match: Match) -> None:
    match.tick()
    assert Match(match.client, match.run).scheduler.pinned == {1}
    match.answer(-3.0)
    assert Match(match.client, match.run).scheduler.pinned == frozenset()


def test_results_of_versions_that_are_to_come_are_left_out(match: Match) -> None:
    mine = replace(match.scheduler._evaluation(6, "watch", 0, 0), num_episodes=1)
    figures = {"returns": [50.0], "lengths": [1], "return_mean": 50.0, "return_std": 0.0}
    forged = {"result": json.dumps(asdict(mine) | figures)}
    match.client.xadd(keys.evaluations(match.run), forged)
    match.play([(1, -3.0)])
    assert weights.index(match.client, match.run).best == 1 and not match.scheduler.solved
    weights.publish(match.client, match.run, match.token, version=6, blob=b"w", allowance=0, updates=0)
    match.version = 6
    match.tick()
    assert match.sent[-1] == "6:1000000:20"


def test_a_confirmation_of_a_version_that_is_not_kept_solves_nothing(match: Match) -> None:
    weights.publish(
        match.client, match.run, match.token, version=6, blob=b"w", allowance=0, updates=0, drop=(2,)
    )
    forged = asdict(match.scheduler._evaluation(2, "confirm", 0, 0))
    figures = {"returns": [0.0] * 100, "lengths": [1] * 100, "return_mean": 0.0, "return_std": 0.0}
    match.client.xadd(keys.evaluations(match.run), {"result": json.dumps(forged | figures)})
    assert not Match(match.client, match.run).scheduler.solved
    assert weights.index(match.client, match.run).best == 5


def result_of(one: Evaluation, value: float) -> dict[str, str]:
    """An entry that anybody with the worker's password can write."""
    figures = {"returns": [value] * one.num_episodes, "lengths": [1] * one.num_episodes}
    return {"result": json.dumps(asdict(one) | figures | {"return_mean": value, "return_std": 0.0})}


def test_a_result_confirms_only_if_a_confirmation_was_asked_for(match: Match) -> None:
    match.tick()
    watched = evaluations.opened(match.client, match.run)[match.sent[-1]]
    forged = result_of(replace(watched, purpose="confirm"), 0.0)
    match.client.xadd(keys.evaluations(match.run), forged)
    match.tick()
    assert not match.scheduler.solved and match.sent[-1] == "1:1000020:100"
    match.answer(-3.0), match.tick()
    forged = result_of(match.scheduler._evaluation(3, "confirm", 0, 0), 0.0)
    match.client.xadd(keys.evaluations(match.run), forged)  # while no learner runs
    other = Match(match.client, match.run)
    assert not other.scheduler.solved and other.scheduler.pinned == {3}
    evaluations.take(match.client, match.run, "3:1000020:100", "player")
    other.sent.append("3:1000020:100")
    other.answer(-3.0), other.tick()
    match.client.xadd(keys.evaluations(match.run), forged)
    assert not Match(match.client, match.run, confirm_episodes=0).scheduler.solved


def test_a_version_is_evaluated_once(match: Match) -> None:
    match.play([(1, -3.0)])
    match.tick()
    assert len(match.sent) == 1
    match.version = 2
    match.tick()
    assert len(match.sent) == 2


def test_solved_needs_confirmation_of_the_same_version_on_other_seeds(match: Match) -> None:
    match.tick()
    watched = match.answer(-0.4)
    match.version = 5
    match.tick()
    confirmed = match.answer(-0.4)
    assert not match.scheduler.solved
    assert confirmed.version == watched.version == 1 and confirmed.num_episodes == 100
    assert (confirmed.env_steps, confirmed.updates, confirmed.num_envs) == (100, 10, 10)
    assert not set(watched.seeds) & set(confirmed.seeds)
    match.tick()
    assert match.scheduler.solved and match.scheduler.pinned == frozenset()
    assert runs.state(match.client, match.run).evaluation == {
        "version": 1, "return_mean": pytest.approx(-0.4), "return_std": pytest.approx(0.0), "episodes": 100,
    }  # fmt: skip


def test_without_a_confirmation_wanted_one_evaluation_solves(server: Any) -> None:
    run = start(server.client, target_config())
    match = Match(server.client, run, near_every_s=0.01, near=5, confirm_episodes=0)
    match.play([(1, -0.4)])
    assert match.scheduler.solved and match.sent == ["1:1000000:20"]


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ([(1, -3.0), (2, -1.0), (3, -2.0)], 2),
        ([(1, -0.4), (1, -0.6)], 1),  # the confirmation fails
        ([(1, -1.0), (2, -0.4), (2, -9.0)], 1),  # likewise: version 2 was lucky
    ],
)
def test_the_highest_mean_return_is_best(match: Match, results: list[tuple[int, float]], best: int) -> None:
    """None of these is confirmed, so none solves the run."""
    match.play(results)
    assert not match.scheduler.solved
    assert weights.index(match.client, match.run).best == best
    assert runs.state(match.client, match.run).evaluation["version"] == best
    match.version = 4
    match.tick()
    assert match.sent[-1] == "4:1000000:20"  # the next version is tried


def test_an_evaluation_whose_weights_are_gone_is_given_up(match: Match, caplog) -> None:
    client, run = match.client, match.run
    match.scheduler.apply(target_config(evaluation={"timeout_s": 0.1, "near_every_s": 0.01, "near": 0.05}))
    match.tick()
    weights.publish(client, run, match.token, version=6, blob=b"w", allowance=0, updates=0, drop=(1,))
    match.version = 6
    time.sleep(0.1)
    match.tick()
    assert caplog.messages == ["evaluation 1:1000000:20 is given up: its weights are gone"]
    assert evaluations.opened(client, run) == {} and match.scheduler.pinned == frozenset()
    match.tick()
    assert match.sent[-1] == "6:1000000:20"


def test_changed_settings_are_applied_to_the_next_evaluation(match: Match) -> None:
    config = target_config(evaluation={"num_episodes": 7, "near_every_s": 0.01})
    match.scheduler.apply(config)
    match.tick()
    assert match.sent == ["1:1000000:7"]


@pytest.mark.parametrize("num_before", [5, 20])
def test_more_episodes_than_before_do_not_make_a_version_better(match: Match, num_before: int) -> None:
    match.scheduler.apply(
        target_config(evaluation={"num_episodes": num_before, "near_every_s": 0.01, "near": 0.05})
    )
    match.play([(1, -99.0), (2, -3.0)])
    match.scheduler.apply(target_config(evaluation={"num_episodes": 40, "near_every_s": 0.01, "near": 0.05}))
    match.play([(3, -50.0)])
    assert weights.index(match.client, match.run).best == 2


def test_the_best_version_is_known_though_its_result_has_left_the_stream(match: Match) -> None:
    match.play([(1, -3.0), (2, -50.0)])
    match.client.xtrim(keys.evaluations(match.run), maxlen=1, approximate=False)
    other = Match(match.client, match.run, near_every_s=0.01, near=0.05)
    other.play([(3, -60.0)])
    assert weights.index(match.client, match.run).best == 1


def test_the_evaluation_at_the_end_does_not_round(match: Match, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its score is that of any other machine."""
    seen: list[str] = []

    def score(*_: Any, **__: Any) -> EvaluationResult:
        seen.append(torch.get_float32_matmul_precision())
        return EvaluationResult((1.0,), (1,))

    monkeypatch.setattr(of_learner, "score", score)
    monkeypatch.setattr(of_learner.policy, "from_run", lambda *_: None)
    weights.publish(match.client, match.run, match.token, version=6, blob=b"w", allowance=0, updates=0)
    torch.set_float32_matmul_precision("medium")
    try:
        match.scheduler.finish("time", env_steps=1, updates=1)
        assert seen and set(seen) == {"highest"} and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("value", [-0.4, -3.0])
def test_the_policy_that_a_run_begins_with_is_evaluated_first_and_once(server: Any, value: float) -> None:
    config = target_config()
    run = submit.create(server.client, config, submit.prepare(config), initial=("other@3", b"w"))
    match = Match(server.client, run, every_s=3600, near_every_s=3600)
    match.version = 0
    match.tick(None)
    assert match.sent == ["0:1000000:20"] and match.scheduler.holds_play
    match.version = 3  # play waits for some seconds only
    match.answer(value), match.tick(None)
    if value > -0.5:
        assert match.scheduler.holds_play and match.answer(value).version == 0
        match.tick(None)
    assert match.scheduler.solved == match.scheduler.holds_play == (value > -0.5)
    other = Match(server.client, run, every_s=3600, near_every_s=3600)
    other.tick(None)
    assert other.sent == (["0:1000020:100"] if value > -0.5 else [])  # the last learner may not have noted it


# --- a new learner ---------------------------------------------------------------------------------------


def test_a_confirmation_that_came_while_no_learner_ran_still_solves(match: Match) -> None:
    match.tick(), match.answer(-0.4), match.tick(), match.answer(-0.4)
    assert Match(match.client, match.run).scheduler.solved


def test_a_new_learner_knows_the_results_of_before(match: Match) -> None:
    match.tick(), match.answer(-2.0), match.tick()
    other = Match(match.client, match.run)
    other.version = 2
    time.sleep(0.2)  # its `near_every_s`
    other.tick(), other.answer(-3.0), other.tick()
    assert weights.index(match.client, match.run).best == 1
