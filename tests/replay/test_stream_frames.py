"""Frames through the whole pipe, exactly: environments, collector, codec, real server, reader, stacks of the replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from redis import Redis
from support.replays import admit, gather, make_replay

from ddrl import codec, envs
from ddrl.algorithms import base
from ddrl.config import EnvConfig, RunConfig, validate
from ddrl.envs.toy import Catch
from ddrl.replay.reader import decode
from ddrl.replay.transitions import TransitionItems
from ddrl.runs import submit
from ddrl.store import stream
from ddrl.types import Fragment
from ddrl.worker import collector
from ddrl.worker.collector import Collector

K = 4
SIZES = (3, 4, 6, 7, 12, 14, 21)


class AnyCatch(gymnasium.Env[np.ndarray, np.int64]):
    """84x84 Catch on a board of another size each episode, some of them truncated."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(0, 255, (84, 84), np.uint8), Discrete(3)
        self._game, self._left = Catch(3), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._game = Catch(int(self.np_random.choice(SIZES)))
        self._left = int(self.np_random.integers(1, 25))
        return self._game.reset(seed=int(self.np_random.integers(2**31)))

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = self._game.step(action)
        self._left -= 1
        return observation, reward, terminated, self._left == 0, info


class Recording:
    """A vector of environments that keeps copies of all it gave, by step."""

    def __init__(self, vector: Any) -> None:
        self._vector = vector
        self.num_envs = vector.num_envs
        self.single_observation_space = vector.single_observation_space
        self.single_action_space = vector.single_action_space
        self.frames: list[np.ndarray] = []  # [N, *O] before each step, and the newest ones
        self.steps: list[tuple[np.ndarray, ...]] = []  # reward, terminated, truncated, life lost
        self.actions: list[np.ndarray] = []
        self.finals: dict[tuple[int, int], np.ndarray] = {}

    def reset(self, *, seed: Any) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = self._vector.reset(seed=seed)
        self.frames.append(observation.copy())
        return observation, info

    def step(self, actions: np.ndarray) -> Any:
        self.actions.append(actions.copy())
        given = observation, reward, terminated, truncated, info = self._vector.step(actions)
        lost = info.get("life_lost", np.zeros(self.num_envs, bool))
        for lane in np.flatnonzero(terminated | truncated):
            self.finals[len(self.steps), int(lane)] = np.array(info["final_obs"][lane])
        self.steps.append(tuple(np.array(column) for column in (reward, terminated, truncated, lost)))
        self.frames.append(observation.copy())
        return given

    def close(self) -> None:
        self._vector.close()


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", __name__)
    yield


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The vectors that collectors make."""
    made: list[Recording] = []

    def make(env: EnvConfig) -> Recording:
        made.append(Recording(envs.make_vector(env)))
        return made[-1]

    class Envs:
        make_vector = staticmethod(make)
        EnvError, check_spaces, training_reward = envs.EnvError, envs.check_spaces, envs.training_reward

    monkeypatch.setattr(collector, "envs", Envs)
    return made


def pixels(env: dict[str, Any]) -> RunConfig:
    return validate(
        {
            "env": {"frame_stack": K, "reward_sign": True, **env},
            "algorithm": {"name": "dqn", "network": "data_efficient", "hidden_sizes": [16], "n_step": 3},
            "rollout": {"max_fragment_steps": 64, "fragment_s": 5},
        }
    )


def play_into(
    client: Redis, config: RunConfig, *, episodes: int = 0, steps: int = 0, seed: int = 1
) -> tuple[str, list[Fragment]]:
    """A run with at least so many episodes and steps of random play appended, fragments of 1 to 40 steps.

    Returns:
        Its id, and its fragments as a learner reads them.
    """
    spec = submit.prepare(config)
    run, resolved = submit.create(client, config, spec), base.resolve(config, spec)
    producer, generator = stream.new_producer(client), np.random.default_rng(seed)
    player = Collector(
        run=run,
        producer=producer,
        incarnation=7,
        env=config.env,
        rollout=config.rollout,
        spec=spec,
        policy=resolved.policy(producer=producer),
        random_until_learned=True,
        seed=seed,
        context=resolved.context,
    )
    player.load(0, resolved.learner(device=_cpu(), seed=1).weights())
    ended = played = 0
    while ended < episodes or played < steps:
        fragment = player.collect(max_steps=int(generator.integers(1, 41)))
        ended, played = ended + len(fragment.episode_length), played + fragment.num_steps
        answer = stream.append(
            client,
            run,
            codec.encode(fragment),
            producer=producer,
            incarnation=7,
            seq=fragment.seq,
            num_transitions=fragment.num_transitions,
        ).answer
        assert answer in (stream.Answer.GO, stream.Answer.WAIT)
    player.close()
    read, cursor = [], b"0-0"
    while entries := stream.read(client, run, cursor, count=7):
        decoded = [decode(entry, run, spec) for entry in entries]
        assert [one.reason for one in decoded] == [""] * len(decoded)
        read += [one.fragment for one in decoded if one.fragment is not None]
        cursor = entries[-1].entry_id
    return run, read


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def assert_equal_to_the_recording(fragments: list[Fragment], given: Recording) -> None:
    """Every frame, reward and end of every fragment, context included, one by one; and nothing is missing."""
    begin = 0
    for seq, fragment in enumerate(fragments):
        assert (fragment.seq, fragment.context) == (seq, min(begin, K - 1))
        assert fragment.observation.dtype == np.uint8
        first, end = begin - fragment.context, begin + fragment.num_steps
        for row, frames in enumerate(given.frames[first : end + 1]):
            for lane in range(given.num_envs):
                assert np.array_equal(fragment.observation[row, lane], frames[lane]), (first + row, lane)
        finals = {}
        for row, (reward, terminated, truncated, lost) in enumerate(given.steps[first:end]):
            np.testing.assert_array_equal(fragment.reward[row], np.sign(reward))
            np.testing.assert_array_equal(fragment.terminated[row], terminated | lost)
            np.testing.assert_array_equal(fragment.truncated[row], truncated & ~terminated)
            np.testing.assert_array_equal(fragment.action[row], given.actions[first + row])
            for lane in np.flatnonzero(truncated & ~terminated):
                finals[row, int(lane)] = given.finals[first + row, int(lane)]
        assert list(map(tuple, fragment.final_index.tolist())) == list(finals)
        for found, wanted in zip(fragment.final_observation, finals.values(), strict=True):
            assert np.array_equal(found, wanted)
        begin = end
    assert begin == len(given.steps)
    totals = np.zeros(given.num_envs)
    returns = []
    for reward, terminated, truncated, _ in given.steps:
        totals += reward
        for lane in np.flatnonzero(terminated | truncated):
            returns.append(totals[lane])
            totals[lane] = 0
    np.testing.assert_array_equal(np.concatenate([one.episode_return for one in fragments]), returns)


def assert_stacks_are_plain_ones(fragments: list[Fragment], given: Recording) -> None:
    """The compressed replay returns for one-step transitions the stacks that are kept beside each environment here."""
    items = TransitionItems(gamma=0.5, n_step=1, frame_stack=K)
    replay = make_replay(items, capacity=10**5, compressed=True)
    for fragment in fragments:
        admit(replay, fragment)
    num_envs = given.num_envs
    stacks = [[given.frames[0][lane]] * K for lane in range(num_envs)]
    for step, (_, terminated, truncated, lost) in enumerate(given.steps):
        batch = gather(replay, np.arange(step * num_envs, (step + 1) * num_envs))
        for lane in range(num_envs):
            assert np.array_equal(batch.observation[lane], stacks[lane]), (step, lane)
            after = given.finals.get((step, lane), given.frames[step + 1][lane])
            following = [*stacks[lane][1:], after]
            if not (terminated[lane] or lost[lane]):
                assert np.array_equal(batch.next_observation[lane], following), (step, lane)
            starts = terminated[lane] or truncated[lane] or lost[lane]
            stacks[lane] = [given.frames[step + 1][lane]] * K if starts else following


def test_200_episodes_come_out_of_the_stream_as_they_were_played(
    server: Any, recordings: list[Recording]
) -> None:
    config = pixels({"id": f"{__name__}:AnyCatch", "num_envs": 3})
    _, fragments = play_into(server.client, config, episodes=200)
    (given,) = recordings
    assert len(given.finals) >= 200
    num_truncated = sum(len(fragment.final_index) for fragment in fragments)
    assert num_truncated > 20 and len(fragments) > 10
    assert_equal_to_the_recording(fragments, given)
    assert_stacks_are_plain_ones(fragments, given)


def test_a_game_comes_out_of_the_stream_as_it_was_played(server: Any, recordings: list[Recording]) -> None:
    pytest.importorskip("ale_py")
    config = pixels({"id": "ALE/Asterix-v5", "num_envs": 2, "atari": {"max_frames": 700, "noop_max": 10}})
    run, fragments = play_into(server.client, config, steps=350)
    (given,) = recordings
    assert sum(int(lost.sum()) for *_, lost in given.steps) > 0 and len(given.finals) >= 2
    assert_equal_to_the_recording(fragments, given)
    assert_stacks_are_plain_ones(fragments, given)
    sizes = [
        sum(map(len, entry.fields.values())) for entry in stream.read(server.client, run, b"0-0", count=100)
    ]
    num_frames = sum(fragment.observation.shape[0] * fragment.num_envs for fragment in fragments)
    assert sum(sizes) / num_frames < 84 * 84 / 10  # compressed on the wire
