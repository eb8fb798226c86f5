"""A segment of play against a real server: when it ends, what it keeps, what it never writes twice."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError
from support.private_server import until
from support.runs import play_steps, start, stream_steps, target_config
from support.store import take

from ddrl import codec
from ddrl.algorithms.actor_critic import policy as actor_critic_policy
from ddrl.algorithms.sac import policy as sac
from ddrl.store import keys, runs, segments, stream
from ddrl.store.segments import Process
from ddrl.store.stream import Answer
from ddrl.types import Fragment
from ddrl.worker.segment import YIELD_AFTER_S, Clock, Players, play


def begin(client: Redis, **sections) -> tuple[str, int]:
    run = start(client, target_config(**sections))
    return run, take(client, run)


def choose_and_play(client: Redis, players: Players, run: str, node: str = "w", **options: Any) -> int:
    """Play a segment as a task does."""
    others = [other for other in runs.active_names(client) if other != run]
    assert segments.choose(client, Process.this(node), ["ddrl.rollout"], cannot_play=others) == run
    return play(client, client, players, run, node=node, **options)


def fragments(client: Redis, run: str) -> list[Fragment]:
    return [codec.decode(entry.fields) for entry in stream.read(client, run, b"0-0", count=10_000)]


def assert_without_gap(client: Redis, run: str) -> None:
    seqs = [fragment.seq for fragment in fragments(client, run)]
    assert seqs == list(range(len(seqs)))


def begin_long(client: Redis) -> tuple[str, int]:
    """A run with weights whose segments last a minute."""
    run, token = begin(client, rollout={"segment_s": 60})
    play_steps(client, run, token, 10)
    return run, token


def test_segments_continue_episodes_of_one_producer_without_a_gap(client: Redis) -> None:
    run, token = begin(client)
    players = play_steps(client, run, token, 300)
    stream.allow(client, run, token, 10**6, updates=0)
    play(client, client, players, run)
    found = fragments(client, run)
    assert_without_gap(client, run)
    assert len({(fragment.producer, fragment.incarnation) for fragment in found}) == 1
    for one, two in itertools.pairwise(found):
        assert (one.observation[-1] == two.observation[0]).all()  # episodes go on across segments
    assert sum(len(fragment.episode_length) for fragment in found) > 10
    assert all((fragment.episode_length == 10).all() for fragment in found)


def test_a_segment_waits_at_the_allowance_with_at_most_one_fragment_too_much(client: Redis) -> None:
    run, token = begin(client, rollout={"segment_s": 0.3, "max_fragment_steps": 8})
    play_steps(client, run, token, 10)
    before = stream_steps(client, run)
    stream.allow(client, run, token, before + 50, updates=0)
    started = time.monotonic()
    play(client, client, Players(), run)
    assert time.monotonic() - started >= 0.3  # it blocked until the segment's end
    assert before + 50 <= stream_steps(client, run) <= before + 50 + 8 * 4


@pytest.mark.parametrize(("name", "most", "steps"), [("sac", 20, 12), ("sac", 5, 5), ("ppo", 20, 1)])
def test_a_fragment_has_a_few_times_n_steps_however_small_the_allowance(
    client: Redis, name: str, most: int, steps: int
) -> None:
    """With n_step 3 that is 12 steps, or those of the largest fragment; on-policy fragments end with the allowance."""
    algorithm = {"name": name} if name == "ppo" else {"n_step": 3}
    rollout = {"segment_s": 0.3, "max_fragment_steps": most, "fragment_s": 0.3}
    run, token = begin(client, algorithm=algorithm, rollout=rollout)
    players = play_steps(client, run, token, 100)
    before = stream_steps(client, run)
    stream.allow(client, run, token, before + 1, updates=0)
    play(client, client, players, run)
    assert stream_steps(client, run) == before + 4 * steps  # of four environments
    assert fragments(client, run)[-1].num_steps == steps


def test_a_paused_run_accepts_what_is_in_flight_and_a_stopped_one_drops_the_player(client: Redis) -> None:
    run, token = begin(client)
    players = play_steps(client, run, token, 50)
    stream.allow(client, run, token, 10**6, updates=0)
    runs.set_status(client, run, "paused", "test")
    assert play(client, client, players, run) == 0
    player = players.get(client, run)
    assert player.append(client, 16, Clock())[0].answer is Answer.YIELD
    runs.set_status(client, run, "active", "test"), runs.set_status(client, run, "stopped", "test")
    assert play(client, client, players, run) == 0
    assert players.get(client, run) is not player


@pytest.mark.parametrize(("wants", "is_served"), [(True, True), (False, True), (True, False)])
def test_waiting_for_the_learner_ends_the_segment_when_another_run_of_its_queues_wants_the_process(
    client: Redis, wants: bool, is_served: bool
) -> None:
    run, token = begin(client, rollout={"segment_s": 2})
    players = play_steps(client, run, token, 10)
    other, others_token = begin(client)
    play_steps(client, other, others_token, 10)
    stream.allow(client, other, others_token, 10**6 if wants else 0, updates=0)
    before = runs.state(client, run).allowance_wait_s
    started = time.monotonic()
    choose_and_play(client, players, run, serves=lambda queue: is_served)
    assert (time.monotonic() - started < 1.8) == (wants and is_served)
    assert runs.state(client, run).allowance_wait_s - before >= YIELD_AFTER_S


def test_collectors_woken_at_once_ask_the_server_in_turn(client: Redis) -> None:
    run, token = begin(client, rollout={"segment_s": 1})
    players = play_steps(client, run, token, 10)
    before = runs.state(client, run).appended_fragments
    thread = threading.Thread(target=play, args=(client, client, players, run))
    stream.allow(client, run, token, 0, updates=0, players=10_000)
    thread.start()
    while thread.is_alive():  # one fragment more, again and again
        allowance = stream_steps(client, run) + 1
        stream.allow(client, run, token, allowance, updates=0, players=10_000)
        time.sleep(0.005)
    assert 1 <= runs.state(client, run).appended_fragments - before <= 25


def test_a_segment_is_noted_while_it_plays_and_its_time_reported(client: Redis) -> None:
    run, token = begin(client, rollout={"segment_s": 1.5})
    players = play_steps(client, run, token, 10)
    begun = runs.state(client, run)
    with playing(client, run, players, "w@here"):
        (process,) = segments.playing(client, run).values()
        assert process.pid == os.getpid()
        allowance = stream_steps(client, run) + 200  # plays a little, waits again
        stream.allow(client, run, token, allowance, updates=0)
    assert segments.playing(client, run) == {}
    now = runs.state(client, run)
    spent, waited = now.process_s - begun.process_s, now.allowance_wait_s - begun.allowance_wait_s
    assert 1.5 <= spent < 15 and 0.5 <= waited < spent
    assert 0 < now.played_s - begun.played_s < spent
    assert now.room_wait_s == begun.room_wait_s == 0


@contextmanager
def playing(client: Redis, run: str, players: Players, node: str = "leaves") -> Iterator[threading.Thread]:
    """Play a segment in a thread; the block makes it end."""
    thread = threading.Thread(target=choose_and_play, args=(client, players, run, node))
    thread.start()
    until(lambda: node in {one.node for one in segments.playing(client, run).values()})
    yield thread
    thread.join(5)
    assert not thread.is_alive()


def fill(client: Redis, run: str, *, is_full: bool = True) -> None:
    """Use up the stream's budget, or free it again."""
    client.hset(keys.state(run), "appended_bytes", 10**12 if is_full else 0)


def test_a_segment_on_a_node_that_drains_ends_at_its_next_append(client: Redis) -> None:
    run, token = begin_long(client)
    stream.allow(client, run, token, 10**9, updates=0)
    with playing(client, run, Players(), "stays") as stays:
        with playing(client, run, Players()):
            segments.drain(client, "leaves")
        assert stays.is_alive()
        assert [one.node for one in segments.playing(client, run).values()] == ["stays"]
        segments.stay(client, "leaves")  # begun again under the same name
        assert stream.remaining(client, run, node="leaves").answer is Answer.GO
        stream.claim(client, run, 1, for_ms=60_000)  # for another run's sake


@pytest.mark.parametrize("waits_for", ["the learner", "room"])
@pytest.mark.parametrize("reason", ["paused", "draining"])
def test_a_segment_that_waits_ends_when_its_run_is_paused_or_its_node_drains(
    client: Redis, waits_for: str, reason: str
) -> None:
    run, token = begin_long(client)  # the allowance is used up
    players = Players()
    if waits_for == "room":
        fill(client, run)
        stream.allow(client, run, token, 10**9, updates=0)
    with playing(client, run, players):
        if waits_for == "room":
            until(lambda: runs.state(client, run).full)
        if reason == "paused":
            runs.set_status(client, run, "paused", "test")
        else:
            segments.drain(client, "leaves")
    assert players.get(client, run).has_unsent == (waits_for == "room")


def test_a_fragment_that_waited_for_room_is_appended_once_even_if_the_allowance_is_used_up(
    client: Redis,
) -> None:
    """The learner may need it before it allows more."""
    run, token = begin_long(client)
    fill(client, run)
    stream.allow(client, run, token, 10**9, updates=0)
    before = runs.state(client, run).appended_fragments
    with playing(client, run, Players()):
        until(lambda: runs.state(client, run).full)
        assert runs.state(client, run).appended_fragments == before
        stream.allow(client, run, token, 0, updates=0)
        fill(client, run, is_full=False)
        until(lambda: runs.state(client, run).appended_fragments > before)
        segments.drain(client, "leaves")
    assert runs.state(client, run).appended_fragments == before + 1


def test_an_outage_loses_neither_the_fragment_nor_the_end_of_the_segment(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, token = begin(client)
    players = play_steps(client, run, token, 20)
    stream.allow(client, run, token, 10**6, updates=0)
    before = runs.state(client, run)

    def refused(*_: Any, **__: Any) -> None:
        time.sleep(0.05)
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    with monkeypatch.context() as patch:
        patch.setattr(stream, "append", refused)
        with pytest.raises(OutOfMemoryError):
            choose_and_play(client, players, run)
        assert list(segments.playing(client, run)) == [str(Process.this("w"))]
    assert players.get(client, run).has_unsent
    players.report_end(client)
    assert segments.playing(client, run) == {}
    assert runs.state(client, run).process_s >= before.process_s + 0.05
    segments.drain(client, "w")
    assert play(client, client, players, run, node="w") > 0
    assert runs.state(client, run).appended_fragments == before.appended_fragments + 1
    assert_without_gap(client, run)


@pytest.mark.parametrize("is_unsent", [False, True])
def test_players_are_evicted_by_bytes_unless_they_have_an_unsent_fragment(
    client: Redis, is_unsent: bool
) -> None:
    run, token = begin(client)
    players = play_steps(client, run, token, 20, players=Players(max_bytes=1))
    first = players.get(client, run)
    if is_unsent:
        fill(client, run)
        assert first.append(client, 16, Clock())[0].answer is Answer.FULL
    players.get(client, begin(client)[0])
    again = players.get(client, run)
    assert (again is first) == (again.producer == first.producer) == is_unsent


def test_a_machine_with_other_versions_plays_where_that_is_allowed(client: Redis) -> None:
    run, token = begin(client, env={"same_versions": False})
    client.hset(keys.state(run), "versions", json.dumps({"gymnasium": "0.26.3"}))
    play_steps(client, run, token, 20)


def test_nothing_is_played_before_the_first_version(client: Redis) -> None:
    run, token = begin(client, rollout={"segment_s": 0.2})
    stream.allow(client, run, token, 10**6, updates=0)
    assert play(client, client, Players(), run) == 0


@pytest.mark.parametrize(
    ("name", "setting", "at_random"),
    [("sac", None, True), ("sac", True, True), ("sac", False, False), ("ppo", None, False)],
)
def test_version_0_is_random_if_configured_or_off_policy(
    client: Redis, monkeypatch: pytest.MonkeyPatch, name: str, setting: bool | None, at_random: bool
) -> None:
    def explore(self: Any, observation: np.ndarray, generator: np.random.Generator, memory: Any) -> Any:
        return np.full((len(observation), 1), 0.125, np.float32), {}

    monkeypatch.setattr(sac.Policy, "explore", explore)
    monkeypatch.setattr(actor_critic_policy.Policy, "explore", explore)
    run, token = begin(client, algorithm={"name": name}, rollout={"random_until_learned": setting})
    play_steps(client, run, token, 20)
    fragment = fragments(client, run)[0]
    assert fragment.policy_version == 0
    assert (fragment.action != 0.125).all() == at_random
    assert (fragment.action == 0.125).all() != at_random
