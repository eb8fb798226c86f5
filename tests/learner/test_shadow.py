"""A shadow: a run that learns from the experience of another one, and leaves that one as it is."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support import commands
from support.learners import (
    Run,
    contents,
    endless_config,
    fields_of,
    finished,
    pick_config,
    playing,
    training,
    until,
)
from support.processes import Processes
from support.store import end, fold_now

from ddrl.config import ConfigError
from ddrl.learner import run as run_module
from ddrl.runs import submit
from ddrl.store import keys, ledger, quarantine, runs

QUICK = ["learner.checkpoint_every_s=1"]


def shadow(source: Run, *options: str) -> Run:
    config = submit.shadow_config(source.client, source.id, [*QUICK, *options])
    return Run(source.server, run=submit.create_shadow(source.client, source.id, config))


def test_a_shadow_has_the_same_replay_and_writes_nothing_of_its_source(server) -> None:
    source = Run(server, endless_config(algorithm={"name": "sac", "n_step": 3}))
    source.play(1500)
    mine = source.learner()
    with training(mine):
        source.catch_up(mine)
    mine.finish()
    held, before = contents(source.learner()), source.keys()
    other = shadow(source, "algorithm.learning_rate=1e-4")
    learner = other.learner()
    with training(learner):
        until(lambda: learner.shared.env_steps == mine.shared.env_steps and learner.shared.updates > 50)
        until(lambda: other.meta.get("env_steps") == mine.shared.env_steps)
    learner.finish()
    assert source.keys() == before
    same = contents(other.learner())
    assert same.keys() == held.keys() and all(np.array_equal(same[name], held[name]) for name in held)
    state = other.state
    assert (state.reads, state.queue) == (
        source.id,
        "ddrl.nobody",
    ) and state.appended_steps == mine.shared.env_steps
    assert other.index.latest >= 1 and other.dead == [] and ledger.audit(other.client, other.id).is_balanced
    source.audit()


def test_another_algorithm_learns_while_its_source_goes_on_and_ends_after_it(server, learn: Any) -> None:
    source = Run(server, endless_config(algorithm={"name": "sac", "n_step": 3}))
    other = shadow(source, "algorithm.name=td3", "algorithm.hidden_sizes=[16]")
    assert "n_step" not in runs.config(other.client, other.id).algorithm  # its own default
    learning, following = learn(source), learn(other)
    with playing(source.url, source.id):
        until(lambda: source.state.updates > 100 and other.state.updates > 100)
    first = other.state.first_step_s
    assert first > 0 and other.state.appended_steps > 500
    learning.end()
    end(source.client, source.id)
    until(lambda: other.state.ended)
    assert other.state.reason == f"end of {source.id}, whose experience it reads"
    assert following.error is None and learning.error is None
    assert other.client.xlen(keys.experience(other.id)) == 0


def test_what_a_shadow_cannot_be_is_refused(server) -> None:
    source = Run(server, pick_config())
    with pytest.raises(ConfigError, match="algorithm.name: ppo cannot learn from what ppo plays"):
        shadow(source)
    with pytest.raises(ConfigError, match="algorithm.name: r2d2 cannot learn from what ppo plays"):
        shadow(source, "algorithm.name=r2d2")
    with pytest.raises(ConfigError, match="env: a shadow plays nothing; leave it as"):
        shadow(source, "algorithm.name=dqn", "env.num_envs=2")
    other = shadow(source, "algorithm.name=dqn")
    source.play(300)
    learner = other.learner()
    with training(learner):
        until(lambda: learner.shared.env_steps >= 300)
    learner.close()
    assert other.dead == []


def test_a_shadow_waits_for_its_source_and_fails_if_it_is_gone(server, learn: Any, monkeypatch) -> None:
    """As after a loss of the server, from which another learner restores the source."""
    source = Run(server, endless_config())
    other = shadow(source)
    end(source.client, source.id)
    for key in (keys.state(source.id), keys.spec(source.id)):
        source.client.rename(key, f"{key}:away")
    learning = learn(other)
    until(lambda: other.state.leased)
    time.sleep(1.0)
    for key in (keys.state(source.id), keys.spec(source.id)):
        source.client.rename(f"{key}:away", key)
    until(lambda: other.index.latest >= 0)
    learning.end()
    assert learning.error is None and not other.state.ended
    source.client.delete(keys.state(source.id), keys.spec(source.id))
    monkeypatch.setattr(run_module, "RETURN_S", 0.5)
    learning = learn(other)
    learning.thread.join(60.0)
    assert other.state.status == "failed" and f"{source.id}, which is not on the server" in str(
        learning.error
    )


def test_what_folded_producers_have_played_is_learned_from(server) -> None:
    source = Run(server, endless_config())
    source.play(300)
    with finished(source) as learner:
        source.catch_up(learner)
    assert fold_now(source.client, source.id, source.take(), source.meta["ledger"]) == 1
    other = shadow(source)
    with finished(other) as learner:
        source.catch_up(learner)
    assert other.dead == [] and learner.shared.env_steps == source.state.appended_steps
    source.append(fields_of(source.entries[-1]), producer=2, seq=0)
    source.client.hdel(keys.producers(source.id), "2")  # which is no fold
    with finished(other) as learner:
        source.catch_up(learner)
    assert other.dead == [b"no append wrote it"]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_shadow_counts_each_fragment_once_though_producers_are_folded(
    server, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr("ddrl.learner.publisher.FOLD_EVERY_S", 0.0)
    monkeypatch.setattr("ddrl.learner.publisher.RENEW_S", 0.0)
    source = Run(server, endless_config())
    other = shadow(source)
    learner = other.learner()

    def follow() -> None:
        with training(learner, serves=False):
            source.catch_up(learner)
            cursor = learner.shared.ledger.cursor.decode()
            until(lambda: (learner.publisher.round(), other.meta.get("cursor"))[1] == cursor)
            learner.publisher.round()
        learner.stopping.clear()

    for part in range(4):
        source.play(200, anew=part == 2)
        if part == 1:
            with finished(source) as mine:
                source.catch_up(mine)
            assert fold_now(source.client, source.id, source.take(), source.meta["ledger"]) == 1
        if part == 1 and restarts:
            learner.finish()
            learner = other.learner()
        follow()
    learner.finish()
    assert "lost fragments" not in other.journal and other.dead == []
    assert learner.shared.ledger.fragments == source.state.appended_fragments
    assert set(learner.shared.ledger.rows) == {2, ledger.ENDED}
    assert ledger.audit(other.client, other.id).is_balanced


@pytest.mark.long
def test_the_command(server, processes: Processes) -> None:
    source = Run(server, endless_config())
    processes.learner(server.url, source.id)
    processes.worker(server.url)
    command = (
        "-m",
        "ddrl",
        "learner",
        "--shadow",
        source.id,
        "-s",
        "algorithm.name=td3",
        "-s",
        "stop.updates=300",
    )
    following = processes.start("shadow", server.url, *command)
    assert following.wait() == 0
    [other] = [name for name in runs.names(server.client) if name != source.id]
    assert runs.state(server.client, other).reason == "limit of 300 updates"
    processes.ddrl(server.url, "stop", source.id)


def test_its_status_names_its_source_and_misses_no_players(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_REDIS_URL", server.url)
    source = Run(server, endless_config())
    other = shadow(source)
    learner = other.learner()
    other.client.set(keys.lease(other.id), other.token)
    assert source.id in commands.call("status", other.id)
    assert "no worker plays" not in commands.call("status", other.id)
    with training(learner):
        for version in (1, 2):  # few steps may be learned within one publication
            source.play(600)
            until(lambda version=version: other.index.latest >= version)
    learner.finish()
    commands.call("rollback", f"{other.id}@1")  # whose versions are not those that have played
    assert quarantine.read(other.client, other.id)[0] == ()
