"""A segment of play against a real server: when it ends, what it keeps, what it never writes twice."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError
from support.learners import Run
from support.private_server import PrivateServer, until
from support.runs import target_config

from ddrl import codec
from ddrl.algorithms.actor_critic import policy as actor_critic_policy
from ddrl.algorithms.sac import policy as sac
from ddrl.store import keys, runs, segments, stream
from ddrl.store.connection import NotConfirmedError
from ddrl.store.segments import Process
from ddrl.store.stream import Answer
from ddrl.types import Fragment
from ddrl.worker.segment import YIELD_AFTER_S, Clock, Player, Players, play


class Played(Run):
    """A run that is played segment by segment; `steps` transitions or a few more are there, and no more allowed."""

    def __init__(self, server: PrivateServer, *, steps: int = 10, **sections: Any) -> None:
        super().__init__(server, target_config(**sections))
        self.take()
        if steps:
            self.play(steps)

    def allow(self, steps: int = 10**9, *, players: int = 1) -> None:
        """Allow so many steps in all."""
        stream.allow(self.client, self.id, 0, steps, updates=0, players=players)

    def segment(self, **options: Any) -> int:
        """Play a segment; the number of transitions."""
        return play(self.client, self.client, self.players, self.id, **options)

    def chosen_segment(self, node: str = "w", **options: Any) -> None:
        """Play a segment as a task does."""
        others = [other for other in runs.active_names(self.client) if other != self.id]
        process = Process.this(node)
        assert segments.choose(self.client, process, ["ddrl.rollout"], cannot_play=others) == self.id
        self.segment(node=node, **options)

    @contextmanager
    def playing(self, node: str = "leaves") -> Iterator[threading.Thread]:
        """Play a segment in a thread; the block makes it end."""
        thread = threading.Thread(target=self.chosen_segment, args=(node,))
        thread.start()
        until(lambda: node in {one.node for one in segments.playing(self.client, self.id).values()})
        yield thread
        thread.join(5)
        assert not thread.is_alive()

    def fill(self, *, is_full: bool = True) -> None:
        """Use up the stream's budget, or free it again."""
        self.client.hset(keys.counts(self.id), "appended_bytes", 10**12 if is_full else 0)

    @property
    def player(self) -> Player:
        return self.players.get(self.client, self.id)

    @property
    def fragments(self) -> list[Fragment]:
        """All that were appended, without a gap."""
        found = [codec.decode(entry.fields) for entry in self.entries]
        assert [fragment.seq for fragment in found] == list(range(len(found)))
        return found


Begin = Callable[..., Played]


@pytest.fixture
def begin(server: PrivateServer) -> Begin:
    """Begins runs."""
    return partial(Played, server)


@pytest.fixture
def run(begin: Begin) -> Played:
    """A run whose segments last a minute."""
    return begin(rollout={"segment_s": 60})


def test_segments_continue_episodes_of_one_producer_without_a_gap(begin: Begin) -> None:
    run = begin(steps=300)
    run.allow(10**6)
    run.segment()
    found = run.fragments
    assert len({(fragment.producer, fragment.incarnation) for fragment in found}) == 1
    for one, two in itertools.pairwise(found):
        assert (one.observation[-1] == two.observation[0]).all()  # episodes go on across segments
    assert sum(len(fragment.episode_length) for fragment in found) > 10
    assert all((fragment.episode_length == 10).all() for fragment in found)


def test_a_segment_waits_at_the_allowance_with_at_most_one_fragment_too_much(begin: Begin) -> None:
    run = begin(rollout={"segment_s": 0.3, "max_fragment_steps": 8})
    allowed = run.state.appended_steps + 50
    run.allow(allowed)
    started = time.monotonic()
    run.segment()
    assert time.monotonic() - started >= 0.3  # it blocked until the segment's end
    assert allowed <= run.state.appended_steps <= allowed + 8 * 4


@pytest.mark.parametrize(("name", "most", "steps"), [("sac", 20, 3), ("ppo", 20, 1)])
def test_a_fragment_has_n_steps_however_small_the_allowance(
    begin: Begin, name: str, most: int, steps: int
) -> None:
    """On-policy fragments end with the allowance."""
    algorithm = {"name": name} if name == "ppo" else {"n_step": 3}
    rollout = {"segment_s": 0.3, "max_fragment_steps": most, "fragment_s": 0.3}
    run = begin(steps=100, algorithm=algorithm, rollout=rollout)
    before = run.state.appended_steps
    run.allow(before + 1)
    run.segment()
    assert run.state.appended_steps == before + 4 * steps  # of four environments
    assert run.fragments[-1].num_steps == steps


def test_a_paused_run_accepts_what_is_in_flight_and_a_stopped_one_drops_the_player(begin: Begin) -> None:
    run = begin()
    run.allow()
    runs.set_status(run.client, run.id, "paused", "test")
    assert run.segment() == 0
    player = run.player
    assert player.append(run.client, 16, Clock())[0].answer is Answer.YIELD
    for status in ("active", "stopped"):
        runs.set_status(run.client, run.id, status, "test")
    assert run.segment() == 0
    assert run.player is not player


@pytest.mark.parametrize(("wants", "is_served"), [(True, True), (False, True), (True, False)])
def test_waiting_for_the_learner_ends_the_segment_when_another_run_of_its_queues_wants_the_process(
    begin: Begin, wants: bool, is_served: bool
) -> None:
    gives_way = wants and is_served
    segment_s = 60.0 if gives_way else 2.0
    run, other = begin(rollout={"segment_s": segment_s}), begin()
    other.allow(10**6 if wants else 0)
    before, started = run.state.allowance_wait_s, time.monotonic()
    run.chosen_segment(serves=lambda queue: is_served)
    took_s = time.monotonic() - started
    assert took_s < segment_s / 2 if gives_way else took_s >= 0.9 * segment_s
    assert run.state.allowance_wait_s - before >= YIELD_AFTER_S


def test_collectors_woken_at_once_ask_the_server_in_turn(begin: Begin) -> None:
    run = begin(rollout={"segment_s": 1})
    before = run.state.appended_fragments
    run.allow(0, players=10_000)
    thread = threading.Thread(target=run.segment)
    thread.start()
    while thread.is_alive():  # one fragment more, again and again
        run.allow(run.state.appended_steps + 1, players=10_000)
        time.sleep(0.005)
    assert 1 <= run.state.appended_fragments - before <= 25


def test_a_segment_is_noted_while_it_plays_and_its_time_reported(begin: Begin) -> None:
    run = begin(rollout={"segment_s": 1.5})
    begun = run.state
    with run.playing("w@here"):
        (process,) = segments.playing(run.client, run.id).values()
        assert process.pid == os.getpid()
        run.allow(run.state.appended_steps + 200)  # plays a little, waits again
    assert segments.playing(run.client, run.id) == {}
    now = run.state
    spent, waited = now.process_s - begun.process_s, now.allowance_wait_s - begun.allowance_wait_s
    assert spent >= 1.5 and 0 < waited < spent
    assert 0 < now.played_s - begun.played_s < spent
    assert now.room_wait_s == begun.room_wait_s == 0


@pytest.mark.parametrize("waits_for", ["the learner", "room"])
@pytest.mark.parametrize("reason", ["paused", "draining"])
def test_a_segment_that_waits_ends_when_its_run_is_paused_or_its_node_drains(
    client: Redis, run: Played, waits_for: str, reason: str
) -> None:
    if waits_for == "room":
        run.fill()
        run.allow()
    with run.playing("leaves"):
        if waits_for == "room":
            until(lambda: run.state.full)
        if reason == "paused":
            runs.set_status(client, run.id, "paused", "test")
        else:
            segments.drain(client, "leaves")
    assert run.player.has_unsent == (waits_for == "room")


def test_a_fragment_that_waited_for_room_is_appended_once_even_if_the_allowance_is_used_up(
    client: Redis, run: Played
) -> None:
    """The learner may need it before it allows more."""
    run.fill()
    run.allow()
    before = run.state.appended_fragments
    with run.playing("leaves"):
        until(lambda: run.state.full)
        assert run.state.appended_fragments == before
        run.allow(0)
        run.fill(is_full=False)
        until(lambda: run.state.appended_fragments > before)
        segments.drain(client, "leaves")
    assert run.state.appended_fragments == before + 1


def test_an_outage_loses_neither_the_fragment_nor_the_end_of_the_segment(
    client: Redis, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin()
    run.allow()
    before = run.state

    def refused(*_: Any, **__: Any) -> None:
        time.sleep(0.05)
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    with monkeypatch.context() as patch:
        patch.setattr(stream, "append", refused)
        with pytest.raises(OutOfMemoryError):
            run.chosen_segment("w")
        assert list(segments.playing(client, run.id)) == [str(Process.this("w"))]
    assert run.player.has_unsent
    run.players.report_end(client)
    assert segments.playing(client, run.id) == {}
    assert run.state.process_s >= before.process_s + 0.05
    segments.drain(client, "w")
    assert run.segment(node="w") > 0
    assert len(run.fragments) == run.state.appended_fragments == before.appended_fragments + 1


@pytest.mark.parametrize("is_unsent", [False, True])
def test_players_are_evicted_by_bytes_unless_they_have_an_unsent_fragment(
    begin: Begin, is_unsent: bool
) -> None:
    run = begin(steps=0)
    run.players = Players(max_bytes=1)
    run.play(20)
    first = run.player
    if is_unsent:
        run.fill()
        assert first.append(run.client, 16, Clock())[0].answer is Answer.FULL
    run.players.get(run.client, begin(steps=0).id)
    assert (run.player is first) == (run.player.producer == first.producer) == is_unsent


def test_a_machine_with_other_versions_plays_where_that_is_allowed(client: Redis, begin: Begin) -> None:
    run = begin(steps=0, env={"same_versions": False})
    client.hset(keys.state(run.id), "versions", json.dumps({"gymnasium": "0.26.3"}))
    run.play(20)


def test_nothing_is_played_before_the_first_version(begin: Begin) -> None:
    run = begin(steps=0, rollout={"segment_s": 0.2})
    run.allow()
    assert run.segment() == 0


@pytest.mark.parametrize(
    ("name", "setting", "at_random"),
    [("sac", None, True), ("sac", True, True), ("sac", False, False), ("ppo", None, False)],
)
def test_version_0_is_random_if_configured_or_off_policy(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, name: str, setting: bool | None, at_random: bool
) -> None:
    def explore(self: Any, observation: np.ndarray, generator: np.random.Generator, memory: Any) -> Any:
        return np.full((len(observation), 1), 0.125, np.float32), {}

    monkeypatch.setattr(sac.Policy, "explore", explore)
    monkeypatch.setattr(actor_critic_policy.Policy, "explore", explore)
    run = begin(algorithm={"name": name}, rollout={"random_until_learned": setting})
    fragment = run.fragments[0]
    assert fragment.policy_version == 0
    assert (fragment.action != 0.125).all() == at_random
    assert (fragment.action == 0.125).all() != at_random


def test_a_fragment_of_a_durable_run_counts_once_the_disk_has_it(make_server) -> None:
    server = make_server("--appendonly", "yes", "--appendfsync", "always")
    run = Played(server, durability="disk")
    run.allow()
    server.client.config_set("appendfsync", "no")  # nothing is confirmed from now on
    with pytest.raises(NotConfirmedError):
        run.segment()
    assert run.player.has_unsent
