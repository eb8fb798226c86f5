"""Self-play: from a game to the ratings, and an answer that is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import commands
from support.commands import call, call_json
from support.games import exploitability
from support.learners import Run, playing, training
from support.private_server import PrivateServer, until

from ddrl import envs, policy
from ddrl.algorithms import base
from ddrl.config import ConfigError, validate
from ddrl.runs import submit
from ddrl.runs.episodes import Replayer
from ddrl.store import connection, weights
from ddrl.worker.collector import Collector

KUHN: dict[str, Any] = {
    "env": {"id": "support.games:KuhnPoker", "num_envs": 32},
    "algorithm": {
        "name": "ppo",
        "hidden_sizes": [64, 64],
        "learning_rate": 1e-3,
        "gamma": 1.0,
        "lambda": 1.0,
        "entropy_coefficient": 0.05,
        "batch_size": 2048,
    },
    "self_play": {"opponents": "uniform"},
    "weights": {"keep_every": 4},
}
FOUR = {"env": {"id": "pettingzoo/classic/connect_four-v3", "action_mask": True, "num_envs": 8}}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support")


def chances(loaded: policy.LoadedPolicy, rows: np.ndarray) -> np.ndarray:
    """Return the probabilities [B, 2] of choices, from 2,000 draws."""
    drawn, _ = loaded.policy.explore(np.repeat(rows, 2_000, axis=0), np.random.default_rng(0))
    bets = drawn.reshape(len(rows), -1).mean(axis=1)
    return np.stack([1 - bets, bets], axis=1)


def learned(server: PrivateServer, version: int) -> Run:
    """Return a run of poker that has reached a version."""
    run = Run(server, validate(KUHN))
    with training(run.learner()), playing(run.url, run.id):
        until(lambda: run.index.latest >= version, timeout_s=300)
    return run


@pytest.mark.long
def test_the_average_of_the_versions_plays_poker_close_to_the_equilibrium(server: PrivateServer) -> None:
    """As of fictitious self-play (Heinrich et al. 2015): the policy itself goes round the equilibrium."""
    run = learned(server, 40)
    kept = [policy.from_run(run.client, run.id, version) for version in range(0, 41, 4)]
    assert exploitability(lambda rows: chances(kept[0], rows)) > 0.3
    assert exploitability(lambda rows: np.mean([chances(one, rows) for one in kept], axis=0)) < 0.1


def test_versions_are_rated_and_played_against(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = learned(server, 6)
    standings = run.index.standings
    assert standings.keys() == run.index.sizes.keys()
    assert sum(standing.games for standing in standings.values()) > 100
    run.audit()
    monkeypatch.setenv(connection.URL_VARIABLE, run.url)
    assert "elo" in (header := call("versions", run.id).splitlines()[0]) and "beaten by later" in header
    played = [
        call_json("evaluate", run.id, "-n", "200", "--local", *options)
        for options in ([], ["--opponent", "random"], ["--opponent", "support.games:pass_always"])
    ]
    assert [one["opponent"] for one in played] == ["random", "random", "support.games:pass_always"]
    assert played[0]["returns"] == played[1]["returns"] != played[2]["returns"]
    assert all(one["info/opponent"] == -1 for one in played)
    printed = commands.run("evaluate", run.id, "--local", "--opponent", "elsewhere:play")
    assert printed.code == 2 and "env.opponent: elsewhere:play: module elsewhere may not be" in printed.err


def test_discrete_sac_and_dqn_play_against_earlier_versions_under_masks(server: PrivateServer) -> None:
    for name in ("discrete_sac", "dqn"):
        config = {**FOUR, "algorithm": {"name": name, "hidden_sizes": [16]}, "weights": {"keep_every": 1}}
        pace = {"replay": {"warmup_steps": 200, "samples_per_insert": 1}, "learner": {"publish_every_s": 0.1}}
        run = Run(server, validate({**config, **pace, "self_play": {"latest_share": 0.0}}))
        with training(run.learner()), playing(run.url, run.id):
            until(lambda run=run: sum(one.games for one in run.index.standings.values()) > 20, timeout_s=120)
        assert not run.dead
        run.audit()


@pytest.mark.parametrize(("share", "expected"), [(0.0, {7}), (0.5, {-1, 7}), (1.0, {-1})])
def test_the_player_of_the_evaluations_plays_its_share_of_the_training(
    share: float, expected: set[int]
) -> None:
    env = {**FOUR["env"], "opponent": "lookahead", "num_envs": 1, "metrics": ["opponent"]}
    config = validate({"env": env, "algorithm": {"name": "ppo"}, "self_play": {"opponent_share": share}})
    resolved = base.resolve(config, submit.prepare(config))
    who: Any = {"run": "r", "producer": 1, "incarnation": 1, "random_until_learned": False}
    collector = Collector(config=config, resolved=resolved, **who)
    collector.load(7, resolved.learner(device=torch.device("cpu"), seed=1).weights())
    metrics = [collector.collect(max_steps=50).extras["episode_metrics"] for _ in range(10)]
    collector.close()
    games = np.concatenate(metrics)[1:, 0]  # the first one began before there were opponents
    assert len(games) > 10 and {*games.astype(int).tolist()} == expected


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"env": {"id": "CartPole-v1"}}, "self_play.opponents: uniform has no effect but in a game of two players"),
        (
            {"self_play": {"opponents": "latest", "pool": 3}},
            "self_play.pool: 3 has no effect with self_play.opponents: latest; remove it",
        ),
        (
            {"self_play": {"opponents": "uniform", "opponent_share": 1}},
            "self_play.opponents: uniform has no effect with self_play.opponent_share: 1; remove it",
        ),
        ({"algorithm": {"name": "ppo", "recurrent": "lstm", "shared": True}}, "ppo has a recurrent state here"),
        ({"self_play": {"opponents": "best"}}, "self_play.opponents: 'best' cannot be used"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        submit.prepare(validate(KUHN | changed))
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_game_cannot_be_played_again(server: PrivateServer) -> None:
    run = Run(server, validate(KUHN))
    with pytest.raises(envs.EnvError, match=r"KuhnPoker: is a game of two, which cannot be played again"):
        Replayer(run.client, run.id)


def test_standings_survive_on_the_server_and_are_read_whole(server: PrivateServer) -> None:
    run = Run(server, validate(KUHN))
    token = run.take()
    table = {0: weights.Standing(), 12: weights.Standing(31.5, 7, 0.25)}
    weights.rate(run.client, run.id, token, table)
    assert run.index.standings == table
