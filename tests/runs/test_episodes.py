"""Episodes of the stream: what is listed, and whether each, played again, is the same bit for bit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from support import commands
from support.runs import play_steps, start, target_config

from ddrl.runs import episodes
from ddrl.store import keys, stream
from ddrl.store.connection import StoreError

DQN: dict[str, Any] = {"name": "dqn"}
PONG = {"id": "ALE/Pong-v5", "atari": {"max_frames": 400, "episodic_life": False}}
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "lander": ({"env": {"id": "LunarLanderContinuous-v3"}}, 1500),
    "cartpole": ({"env": {"id": "CartPole-v1"}, "algorithm": DQN}, 400),
    "pendulum": ({"env": {"id": "Pendulum-v1", "max_episode_steps": 50}}, 500),
    "rewards of float32": (
        {
            "env": {
                "id": "Pendulum-v1",
                "max_episode_steps": 50,
                "reward_scale": 0.1,
                "wrappers": [{"id": "support.odd_envs:SinglePrecision"}],
            }
        },
        500,
    ),
    "cheetah": ({"env": {"id": "HalfCheetah-v5", "max_episode_steps": 40}}, 400),
    "frozen lake": ({"env": {"id": "FrozenLake-v1", "reward_scale": 3.0}, "algorithm": DQN}, 300),
    "pong": ({"env": {**PONG, "reward_sign": True}, "algorithm": {**DQN, "network": "nature"}}, 1000),
}


def played(client: Redis, steps: int, **sections: Any) -> str:
    """A run of which so many steps are in the stream."""
    run = start(client, target_config(**sections, replay={"capacity": 5_000, "max_bytes": "200MB"}))
    play_steps(client, run, 0, steps)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_are_the_same_when_they_are_played_again(
    server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    sections, steps = KINDS[kind]
    run = played(server.client, steps, **sections)
    found = list(episodes.read(server.client, run))
    told = [value for row in stream.episodes(server.client, run)[0] for value in row["returns"]]
    assert len(found) >= 4 and sorted(round(one.episode_return, 3) for one in found) == pytest.approx(
        sorted(told)
    )
    assert len({one.lane for one in found}) >= 3 and len({one.name for one in found}) == len(found)
    with episodes.Replayer(server.client, run) as replayer:
        for one in found:
            again = replayer.play(one)
            assert again.difference == "" and again.steps >= one.length


def test_games_are_reached_through_those_before_as_long_as_the_stream_has_them(server) -> None:
    run = played(server.client, 1000, **KINDS["pong"][0])
    found = list(episodes.read(server.client, run))
    assert {one.seed for one in found[4:]} == {-1} and all(one.seed >= 0 for one in found[:4])
    server.client.xtrim(keys.experience(run), minid=stream.following(found[0].entries[0]))
    later = list(episodes.read(server.client, run))
    assert later and all(one.seeded is None for one in later)
    began_before = "its random numbers began before what the stream still holds"
    with episodes.Replayer(server.client, run) as replayer:
        with pytest.raises(StoreError, match=began_before):
            replayer.play(later[0])
        with pytest.raises(StoreError, match="has left the stream meanwhile"):
            replayer.play(found[0])


CHANGES = {
    "reward": r"step 3: reward is \S+ here, \S+ recorded",
    "observation": r"step 3: observation\[1\] is \S+ here, \S+ recorded",
    "terminated": r"step 3: terminated is False here, True recorded",
    "truncated": r"step 3: truncated is False here, True recorded",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_is_named(server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = played(server.client, 400, **KINDS["cartpole"][0])
    [episode, *_] = [
        one for one in episodes.read(server.client, run) if one.begin == (0, 0) and one.length > 5
    ]
    decode = episodes.codec.decode

    def altered(fields: Any) -> Any:
        fragment = decode(fields)
        column = getattr(fragment, name).copy()
        if fragment.seq == 0:
            place = (3, episode.lane, 1)[: column.ndim]
            column[place] = True if column.dtype == bool else np.nextafter(column[place], np.float32(9))
        return replace(fragment, **{name: column})

    monkeypatch.setattr(episodes.codec, "decode", altered)
    with episodes.Replayer(server.client, run) as replayer:
        difference = replayer.play(episode).difference
    assert re.fullmatch(CHANGES[name], difference), difference


def test_few_fragments_are_kept_decoded(server, monkeypatch: pytest.MonkeyPatch) -> None:
    run = played(server.client, 400, **KINDS["cartpole"][0])
    monkeypatch.setattr(episodes, "MOST_BYTES", 1)
    with episodes.Replayer(server.client, run) as replayer:
        assert all(replayer.play(one).difference == "" for one in episodes.read(server.client, run))
        [left] = replayer._fragments.values()
        assert replayer._num_bytes == left.num_bytes


def test_a_gap_in_the_stream_begins_anew(server) -> None:
    """Episodes that began before it are not listed; those after it are the same."""
    run = played(server.client, 400, **KINDS["cartpole"][0])
    entries = stream.read(server.client, run, b"0-0", count=1000)
    every = {one.name for one in episodes.read(server.client, run)}
    server.client.xdel(keys.experience(run), entries[len(entries) // 2].entry_id)
    left = list(episodes.read(server.client, run))
    assert left and {one.name for one in left} < every
    with episodes.Replayer(server.client, run) as replayer:
        assert all(replayer.play(one).difference == "" for one in left if one.seeded)


def test_commands(server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DDRL_REDIS_URL", server.url)
    monkeypatch.chdir(tmp_path)
    run = played(server.client, 400, **KINDS["cartpole"][0])
    rows = commands.call_json("episodes", run, "-n", "1000")
    returns = [row["return"] for row in rows]
    [best], [worst] = (
        commands.call_json("episodes", run, option, "-n", "1") for option in ("--best", "--worst")
    )
    assert (
        best["return"] == max(returns)
        and worst["return"] == min(returns)
        and best["length"] == best["return"]
    )
    assert commands.call_json("episodes", run, "--host", "elsewhere") == []
    assert "no whole episode of elsewhere" in commands.call("episodes", run, "--host", "elsewhere")
    assert best["episode"] in commands.call("episodes", run, "--best")
    report = commands.call_json("replay", run)
    assert (report["episodes"], report["equal"], report["differences"]) == (len(rows), len(rows), {})
    assert "1 episode, " in commands.call("replay", f"{run}/best", "--video", "best.gif")
    assert (tmp_path / "best.gif").stat().st_size > 1000
    line = commands.refused("replay", f"{run}/7-7-7-7")
    assert line == (f"{run}/7-7-7-7: this episode is not in the stream any more, or never was; "
                    f"`ddrl episodes {run}` lists those that are")  # fmt: skip
    assert "--video all.gif: is for one episode" in commands.refused("replay", run, "--video", "all.gif")
    assert "not together with --worst" in commands.refused("episodes", run, "--best", "--worst")


@pytest.mark.parametrize("kind", ["lander", "frozen lake"])
def test_a_minari_dataset_has_what_the_environment_gave(
    server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("DDRL_REDIS_URL", server.url)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = played(server.client, KINDS[kind][1], **KINDS[kind][0])
    report = commands.call_json("export", run, "--minari", "toy/made-v0")
    found = episodes.in_order(episodes.read(server.client, run))
    dataset = minari.load_dataset("toy/made-v0")
    assert dataset.total_episodes == report["episodes"] == len(found)
    assert dataset.total_steps == report["steps"] == sum(one.length for one in found)
    env = dataset.recover_environment()
    for recorded, one in zip(dataset.iterate_episodes(), found, strict=True):
        assert len(recorded.observations) == one.length + 1 == len(recorded.actions) + 1
        assert recorded.rewards.sum() == pytest.approx(one.episode_return, abs=1e-3)
        assert (recorded.terminations | recorded.truncations).nonzero()[0].tolist() == [one.length - 1]
        if one.seed < 0:
            continue
        seen = [env.reset(seed=one.seed)[0]]
        seen += [env.step(action)[0] for action in recorded.actions]
        np.testing.assert_array_equal(recorded.observations, seen)
    assert "toy/made-v0" in commands.refused("export", run, "--minari", "toy/made-v0")
    assert "goes with none of the other options" in commands.refused("export", f"{run}@1", "--minari", "x-v0")
    assert commands.refused("export", run, "--minari", "no name!").startswith("--minari no name!: ")
    assert (
        commands.refused("export", run, "--minari", "toy/x")
        == "--minari toy/x: lacks a version; write it like toy/x-v0"
    )
    assert [path.parent.name for path in tmp_path.rglob("data")] == ["made-v0"]


def test_a_dataset_leaves_out_episodes_whose_seed_has_left_the_stream(
    server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("DDRL_REDIS_URL", server.url)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    run = played(server.client, 4_000, **KINDS["cartpole"][0])
    first, *_ = stream.read(server.client, run, b"0-0", count=1)
    server.client.xdel(keys.experience(run), first.entry_id)
    found = list(episodes.read(server.client, run))
    playable = [one for one in found if one.seeded is not None]
    assert 0 < len(playable) < len(found)
    report = commands.call_json("export", run, "--minari", "toy/rest-v0")
    assert report["episodes"] == len(playable)
    assert report["without_seed"] == len(found) - len(playable)


def test_a_dataset_of_episodes_that_differ_is_not_left_half_made(
    server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("minari")
    from ddrl.runs import datasets

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    run = played(server.client, 400, **KINDS["cartpole"][0])
    play, calls = episodes.Replayer.play, iter(range(10))

    def differs(*args: Any) -> episodes.Replayed:
        done = play(*args)
        return done if next(calls) < 3 else replace(done, difference="a bit")

    monkeypatch.setattr(episodes.Replayer, "play", differs)
    monkeypatch.setattr(datasets, "AT_ONCE", 1)
    with pytest.raises(StoreError, match="is not the same again: a bit"):
        datasets.write_minari(server.client, run, "half-v0", lambda done, total: None)
    assert not list(tmp_path.glob("half*"))
    game = played(server.client, 200, **KINDS["pong"][0])
    with pytest.raises(StoreError, match="is a game, whose last frames are not in the stream"):
        datasets.write_minari(server.client, game, "game-v0", lambda done, total: None)
