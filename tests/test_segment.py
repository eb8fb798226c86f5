"""A segment of play against a real server: when it ends, what it keeps, what it never writes twice."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from redis import Redis
from runs_for_tests import play_steps, start, stream_steps, target_config, target_tree

from ddrl import codec, keys
from ddrl.algorithms import actor_critic_policy, sac
from ddrl.config import validate
from ddrl.segment import Players, play
from ddrl.store import lease, runs, stream
from ddrl.store.stream import Answer


@pytest.fixture
def client(server) -> Redis:
    return server.client


def begin(client: Redis, **sections) -> tuple[str, int]:
    run = start(client, target_config(**sections))
    token = lease.acquire(client, run, host="here", folder="/tmp")
    assert token is not None
    return run, token


def test_segments_continue_episodes_of_one_producer_without_a_gap(client: Redis) -> None:
    run, token = begin(client)
    players = play_steps(client, run, token, 300)
    stream.allow(client, run, token, 10**6, updates=0)
    play(client, client, players, run)
    fragments = [codec.decode(entry.fields) for entry in stream.read(client, run, b"0-0", count=1000)]
    assert [fragment.seq for fragment in fragments] == list(range(len(fragments)))
    assert len({(fragment.producer, fragment.incarnation) for fragment in fragments}) == 1
    for one, two in zip(fragments, fragments[1:], strict=False):
        assert (one.observation[-1] == two.observation[0]).all()  # episodes go on across segments
    assert sum(len(fragment.episode_length) for fragment in fragments) > 10
    assert all((fragment.episode_length == 10).all() for fragment in fragments)


def test_a_segment_waits_at_the_allowance_with_at_most_one_fragment_too_much(client: Redis) -> None:
    run, token = begin(client, rollout={"segment_s": 0.3, "max_fragment_steps": 8})
    play_steps(client, run, token, 10)
    before = stream_steps(client, run)
    stream.allow(client, run, token, before + 50, updates=0)
    started = time.monotonic()
    play(client, client, Players(), run)
    assert time.monotonic() - started >= 0.3  # it blocked until the segment's end
    assert before + 50 <= stream_steps(client, run) <= before + 50 + 8 * 4


@pytest.mark.parametrize(("most", "steps"), [(20, 12), (5, 5)])
def test_a_fragment_is_worth_a_few_sums_of_rewards_however_little_may_be_played(
    client: Redis, most: int, steps: int
) -> None:
    """With n_step 3 that is 12 steps, bounded by the run's largest fragment; overshot by no more than that."""
    algorithm = target_tree()["algorithm"] | {"n_step": 3}
    run, token = begin(
        client, algorithm=algorithm, rollout={"segment_s": 0.3, "max_fragment_steps": most, "fragment_s": 0.3}
    )
    players = play_steps(client, run, token, 100)
    before = stream_steps(client, run)
    stream.allow(client, run, token, before + 1, updates=0)
    play(client, client, players, run)
    assert stream_steps(client, run) == before + 4 * steps  # of four environments
    last = codec.decode(client.xrevrange(keys.experience(run), count=1)[0][1])
    assert last.num_steps == steps


def test_on_policy_fragments_are_as_short_as_what_is_left(client: Redis) -> None:
    tree = target_tree(rollout={"segment_s": 0.3, "fragment_s": 0.3}) | {
        "algorithm": {"name": "ppo"},
        "replay": {},
    }
    del tree["learner"]
    run = start(client, validate(tree))
    token = lease.acquire(client, run, host="here", folder="/tmp")
    assert token is not None
    players = play_steps(client, run, token, 20)
    before = stream_steps(client, run)
    stream.allow(client, run, token, before + 1, updates=0)
    play(client, client, players, run)
    assert stream_steps(client, run) == before + 4


def test_a_paused_run_accepts_what_is_in_flight_and_a_stopped_one_drops_the_player(client: Redis) -> None:
    run, token = begin(client)
    players = play_steps(client, run, token, 50)
    stream.allow(client, run, token, 10**6, updates=0)
    runs.set_status(client, run, "paused", "test")
    assert play(client, client, players, run) == 0
    player = players.get(client, run)
    player.play(max_steps=4)
    assert player.send(client).answer is Answer.YIELD
    runs.set_status(client, run, "active", "test"), runs.set_status(client, run, "stopped", "test")
    assert play(client, client, players, run) == 0
    assert players.get(client, run) is not player


def test_a_fragment_that_finds_the_stream_full_is_kept_and_appended_once_later(client: Redis) -> None:
    run, token = begin(client, replay={"max_bytes": 65536})
    players = play_steps(client, run, token, 20)
    client.hset(keys.state(run), "appended_bytes", 10**7)  # as if the budget were used up
    stream.allow(client, run, token, 10**6, updates=0)
    before = runs.state(client, run).appended_fragments
    assert play(client, client, players, run) == 0  # waits, writes nothing, drops nothing
    assert runs.state(client, run).appended_fragments == before
    assert players.get(client, run).unsent is not None
    client.hset(keys.state(run), "appended_bytes", 0)
    assert play(client, client, players, run) > 0
    seqs = [codec.decode(entry.fields).seq for entry in stream.read(client, run, b"0-0", count=10_000)]
    assert seqs == list(range(len(seqs)))


def test_waiting_for_the_learner_ends_the_segment_when_another_run_wants_the_process(client: Redis) -> None:
    run, token = begin(client, rollout={"segment_s": 3})
    players = play_steps(client, run, token, 10)
    begin(client)  # another active run
    started = time.monotonic()
    play(client, client, players, run)
    assert time.monotonic() - started < 2.5


def test_nothing_is_played_before_the_first_version(client: Redis) -> None:
    run, token = begin(client, rollout={"segment_s": 0.2})
    stream.allow(client, run, token, 10**6, updates=0)
    assert play(client, client, Players(), run) == 0


@pytest.mark.parametrize(
    ("name", "setting", "at_random"),
    [("sac", None, True), ("sac", True, True), ("sac", False, False), ("ppo", None, False)],
)
def test_version_0_plays_at_random_where_configured_or_off_policy(
    client: Redis, monkeypatch: pytest.MonkeyPatch, name: str, setting: bool | None, at_random: bool
) -> None:
    def explore(self: Any, observation: np.ndarray, generator: np.random.Generator, memory: Any) -> Any:
        return np.full((len(observation), 1), 0.125, np.float32), {}

    monkeypatch.setattr(sac.Policy, "explore", explore)
    monkeypatch.setattr(actor_critic_policy.Policy, "explore", explore)
    tree = target_tree(rollout={"random_until_learned": setting})
    if name == "ppo":
        tree |= {"algorithm": {"name": "ppo"}, "replay": {}}
        del tree["learner"]
    run = start(client, validate(tree))
    token = lease.acquire(client, run, host="here", folder="/tmp")
    assert token is not None
    play_steps(client, run, token, 20)
    (entry, *_) = stream.read(client, run, b"0-0", count=1)
    fragment = codec.decode(entry.fields)
    assert fragment.policy_version == 0
    assert (fragment.action != 0.125).all() == at_random
    assert (fragment.action == 0.125).all() != at_random


def test_players_are_evicted_by_bytes_and_their_episodes_counted(client: Redis) -> None:
    first, token = begin(client)
    players = Players(max_bytes=1)
    play_steps(client, first, token, 21, players=players)
    kept = players.get(client, first)
    second, _ = begin(client)
    players.get(client, second)
    assert players.get(client, first) is not kept
    assert players.num_abandoned in range(5)
    assert players.get(client, first).producer != kept.producer
