"""A segment of play against a real server: when it ends, what it keeps, what it never writes twice."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError
from support.private_server import wait_until
from support.runs import play_steps, start, stream_steps, target_config
from support.store import take

import ddrl
from ddrl import codec
from ddrl.algorithms.actor_critic import policy as actor_critic_policy
from ddrl.algorithms.sac import policy as sac
from ddrl.envs import requirements
from ddrl.envs.requirements import UnfitError
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
    run, token = begin(client)
    play_steps(client, run, token, 10)
    spec = json.loads(client.get(keys.spec(run)))
    spec["rollout"]["segment_s"] = 60
    client.set(keys.spec(run), json.dumps(spec))
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


@pytest.mark.parametrize(("most", "steps"), [(20, 12), (5, 5)])
def test_a_fragment_has_a_few_times_n_steps_however_small_the_allowance(
    client: Redis, most: int, steps: int
) -> None:
    """With n_step 3 that is 12 steps, or those of the largest fragment; the allowance is exceeded by no more."""
    rollout = {"segment_s": 0.3, "max_fragment_steps": most, "fragment_s": 0.3}
    run, token = begin(client, algorithm={"n_step": 3}, rollout=rollout)
    players = play_steps(client, run, token, 100)
    before = stream_steps(client, run)
    stream.allow(client, run, token, before + 1, updates=0)
    play(client, client, players, run)
    assert stream_steps(client, run) == before + 4 * steps  # of four environments
    last = codec.decode(client.xrevrange(keys.experience(run), count=1)[0][1])
    assert last.num_steps == steps


def test_on_policy_fragments_are_as_short_as_what_is_left(client: Redis) -> None:
    run, token = begin(client, algorithm={"name": "ppo"}, rollout={"segment_s": 0.3, "fragment_s": 0.3})
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
    assert player.append(client, 16, Clock())[0].answer is Answer.YIELD
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
    assert players.get(client, run).has_unsent
    client.hset(keys.state(run), "appended_bytes", 0)
    assert play(client, client, players, run) > 0
    assert_without_gap(client, run)


@pytest.mark.parametrize("reason", ["the run is paused", "the node drains"])
def test_a_segment_that_waits_for_room_ends_when_it_is_to(client: Redis, reason: str) -> None:
    run, token = begin_long(client)
    stream.allow(client, run, token, 10**9, updates=0)
    client.hset(keys.state(run), "appended_bytes", 10**12)  # as if the budget were used up
    players = Players()
    thread = threading.Thread(target=choose_and_play, args=(client, players, run, "w"))
    thread.start()
    wait_until(lambda: runs.state(client, run).full)
    if reason == "the run is paused":
        runs.set_status(client, run, "paused", "test")
    else:
        segments.drain(client, "w")
    thread.join(2)
    assert not thread.is_alive() and players.get(client, run).has_unsent


def test_a_segment_that_waits_for_room_goes_on_when_there_is_some_though_the_allowance_is_used_up(
    client: Redis,
) -> None:
    """The learner may need the fragment before it allows more."""
    run, token = begin_long(client)
    stream.allow(client, run, token, stream_steps(client, run) + 1, updates=0)
    client.hset(keys.state(run), "appended_bytes", 10**12)
    before = runs.state(client, run).appended_fragments
    thread = threading.Thread(target=choose_and_play, args=(client, Players(), run, "w"))
    thread.start()
    wait_until(lambda: runs.state(client, run).full)
    stream.allow(client, run, token, 0, updates=0)
    client.hset(keys.state(run), "appended_bytes", 0)
    wait_until(lambda: runs.state(client, run).appended_fragments == before + 1)
    segments.drain(client, "w")
    thread.join(20)
    assert not thread.is_alive()


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
    begun, seen = runs.state(client, run), {}
    thread = threading.Thread(target=choose_and_play, args=(client, players, run, "w@here"))
    thread.start()
    wait_until(lambda: seen.update(segments.playing(client, run)) or seen)
    (playing,) = seen.values()
    assert (playing.node, playing.pid) == ("w@here", os.getpid())
    stream.allow(
        client, run, token, stream_steps(client, run) + 200, updates=0
    )  # plays a little, waits again
    thread.join()
    assert segments.playing(client, run) == {}
    now = runs.state(client, run)
    spent, waited = now.process_s - begun.process_s, now.allowance_wait_s - begun.allowance_wait_s
    assert 1.5 <= spent < 15 and 0.5 <= waited < spent
    assert 0 < now.played_s - begun.played_s < spent
    assert now.room_wait_s == begun.room_wait_s == 0


def test_a_segment_on_a_node_that_drains_ends_at_its_next_append(client: Redis) -> None:
    run, token = begin_long(client)
    stream.allow(client, run, token, 10**9, updates=0)
    threads = [
        threading.Thread(target=choose_and_play, args=(client, Players(), run, node))
        for node in ("leaves", "stays")
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(segments.playing(client, run)) == 2)
    segments.drain(client, "leaves")
    threads[0].join(20)
    assert not threads[0].is_alive() and threads[1].is_alive()
    assert [playing.node for playing in segments.playing(client, run).values()] == ["stays"]
    segments.stay(client, "leaves")  # begun again under the same name
    assert stream.remaining(client, run, node="leaves").answer is Answer.GO
    stream.claim(client, run, 1, for_ms=60_000)  # for another run's sake
    threads[1].join(20)
    assert not threads[1].is_alive()


def test_a_draining_node_that_waits_for_its_learner_ends_too(client: Redis) -> None:
    run, _ = begin_long(client)  # the allowance is used up
    thread = threading.Thread(target=choose_and_play, args=(client, Players(), run, "leaves"))
    thread.start()
    wait_until(lambda: segments.playing(client, run))
    segments.drain(client, "leaves")
    thread.join(20)
    assert not thread.is_alive()


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
        client.hset(keys.state(run), "appended_bytes", 10**12)  # as if the budget were used up
        assert first.append(client, 16, Clock())[0].answer is Answer.FULL
    players.get(client, begin(client)[0])
    again = players.get(client, run)
    assert (again is first) == (again.producer == first.producer) == is_unsent


def test_a_machine_with_other_versions_is_refused_with_the_remedy(client: Redis) -> None:
    run, token = begin(client)
    client.hset(keys.state(run), "versions", json.dumps({"ddrl": ddrl.__version__, "gymnasium": "0.26.3"}))
    with pytest.raises(UnfitError) as refused:
        play(client, client, Players(), run)
    assert str(refused.value) == (
        f"host {socket.gethostname()}: gymnasium is {requirements.installed_version('gymnasium')}, "
        "the run was submitted with 0.26.3; run pip install 'gymnasium==0.26.3' there and restart the worker, "
        "or submit with env.same_versions=false"
    )
    assert runs.state(client, run).appended_fragments == 0
    other, others_token = begin(client, env={"same_versions": False})
    client.hset(keys.state(other), "versions", json.dumps({"gymnasium": "0.26.3"}))
    play_steps(client, other, others_token, 20)


def test_a_host_that_plays_the_run_no_longer_refuses_it(client: Redis) -> None:
    run, token = begin(client)
    for host in (socket.gethostname(), "another"):
        segments.note_refusal(client, run, host, "lacks something")
    play_steps(client, run, token, 20)
    assert segments.refusals(client, run) == {"another": "lacks something"}


def test_a_module_is_refused_where_it_is_not_allowed(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "bad_envs")
    run, _ = begin(client, env={"id": "bad_envs:make", "kwargs": {"kind": "none"}})
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    with pytest.raises(
        UnfitError, match=r"host \S+: bad_envs:make: .* set DDRL_ALLOW_MODULES=bad_envs on every"
    ):
        play(client, client, Players(), run)


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
