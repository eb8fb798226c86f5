"""Frames through the whole pipe, exactly: environments, collector, codec, real server, reader, stacks of the replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from support.recordings import EPISODES, assert_rebuilt, assert_recorded, make_collector, record

from ddrl import codec
from ddrl.algorithms import base
from ddrl.config import validate
from ddrl.replay.reader import decode
from ddrl.runs import submit
from ddrl.store import stream
from ddrl.types import Fragment

K = 4
GAME = {"id": "ALE/Asterix-v5", "num_envs": 2, "atari": {"max_frames": 700, "noop_max": 10}}
IMAGES = {"id": EPISODES, "num_envs": 3, "kwargs": {"shape": [84, 84], "lives": True}}


def play_into(client: Redis, env: dict[str, Any], *, num_steps: int) -> tuple[str, list[Fragment]]:
    """A run with random play appended by its collector, fragments of 1 to 40 steps.

    Returns:
        Its id, and its fragments as a learner reads them.
    """
    algorithm = {"name": "dqn", "network": "data_efficient", "hidden_sizes": [16], "n_step": 3}
    config = validate(
        {
            "env": {"frame_stack": K, "reward_sign": True, **env},
            "algorithm": algorithm,
            "rollout": {"max_fragment_steps": 64, "fragment_s": 5},
        }
    )
    spec = submit.prepare(config)
    run, resolved = submit.create(client, config, spec), base.resolve(config, spec)
    producer, generator = stream.new_producer(client), np.random.default_rng(1)
    policy = resolved.policy(producer=producer)
    names = {"run": run, "producer": producer, "spec": spec, "rollout": config.rollout}
    player = make_collector(config.env, policy=policy, context=resolved.context, version=None, **names)
    player.load(0, resolved.learner(device=torch.device("cpu"), seed=1).weights())
    while num_steps > 0:
        fragment = player.collect(max_steps=int(generator.integers(1, 41)))
        num_steps -= fragment.num_steps
        sender = {"producer": producer, "incarnation": 7, "seq": fragment.seq}
        sent = stream.append(
            client, run, codec.encode(fragment), **sender, num_transitions=fragment.num_transitions
        )
        assert sent.answer in (stream.Answer.GO, stream.Answer.WAIT)
    player.close()
    read, cursor = [], b"0-0"
    while entries := stream.read(client, run, cursor, count=7):
        decoded = [decode(entry, run, spec) for entry in entries]
        assert [one.reason for one in decoded] == [""] * len(decoded)
        read += [one.fragment for one in decoded if one.fragment is not None]
        cursor = entries[-1].entry_id
    return run, read


@pytest.mark.parametrize(("env", "num_steps", "num_games"), [(IMAGES, 350, 200), (GAME, 350, 2)])
def test_games_come_out_of_the_stream_as_they_were_played(
    server: Any, monkeypatch: pytest.MonkeyPatch, env: dict[str, Any], num_steps: int, num_games: int
) -> None:
    pytest.importorskip("ale_py")
    recordings = record(monkeypatch)
    run, fragments = play_into(server.client, env, num_steps=num_steps)
    (given,) = recordings
    assert len(given.finals) >= num_games and len(fragments) > 10
    assert any(lost.any() for _, _, lost in given.ends) and any(cut.any() for _, cut, _ in given.ends)
    assert fragments[0].observation.dtype == np.uint8
    assert_recorded(fragments, given, context=K - 1, reward=np.sign)
    assert_rebuilt(fragments, given, K)
    entries = stream.read(server.client, run, b"0-0", count=100)
    num_frames = sum(fragment.observation.shape[0] * fragment.num_envs for fragment in fragments)
    if env is GAME:
        sizes = sum(len(value) for entry in entries for value in entry.fields.values())
        assert sizes / num_frames < 84 * 84 / 10  # compressed on the wire
