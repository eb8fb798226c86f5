"""`ddrl evaluate`: the same score here and on a fleet, whatever happens to the fleet; video; what is refused."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
from redis import Redis
from support import commands
from support.processes import Processes
from support.runs import start, target_config, toy_answers

from ddrl import celery, policy
from ddrl.algorithms import base
from ddrl.algorithms.base import NO_STATE, RecurrentState
from ddrl.config import RunConfig, validate
from ddrl.envs import describe
from ddrl.policy import LoadedPolicy
from ddrl.store import evaluations, keys, leases, runs, weights, workers
from ddrl.types import EvaluationResult
from ddrl.worker import tasks

command = importlib.import_module("ddrl.cli.evaluate")  # the package names the function so

QUEUE = "ddrl.evaluate"
SPOT = validate(
    {"name": "spot", "env": {"id": "ddrl/Spot-v0"}, "algorithm": {"name": "ppo", "network": "conv"}}
)


@pytest.fixture
def client(client: Redis, monkeypatch: pytest.MonkeyPatch) -> Redis:
    """The server that commands and tasks find."""
    monkeypatch.setattr(tasks, "kept", lambda: tasks.Kept(client, client))
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)
    monkeypatch.setattr(command, "SURVEY_S", 0.02)
    monkeypatch.setattr(command, "POLL_S", 0.005)
    return client


def published(client: Redis, config: RunConfig) -> str:
    """A run with a first version of real weights."""
    run = start(client, config)
    token = leases.acquire(client, run, host="here", folder="/tmp")
    assert token is not None
    learner = base.resolve(config, runs.spaces(client, run)).learner(device=torch.device("cpu"), seed=1)
    blob = weights.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
    weights.publish(client, run, token, version=0, blob=blob, allowance=0, updates=0)
    return run


@pytest.fixture
def run(client: Redis) -> str:
    return published(client, target_config())


class Fleet:
    """Two workers with three processes; `send` plays a task as soon as it is sent, unless a test replaces it."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.sent: list[str] = []
        self.play: Callable[[str, str], object] = tasks.evaluate
        self.beat("one", 1), self.beat("two", 2), self.beat("players", 8, "ddrl.rollout")

    def send(self, run: str, message: str, queue: str) -> None:
        assert queue == QUEUE
        self.sent.append(message)
        self.play(run, message)

    def beat(self, node: str, processes: int, queue: str = QUEUE) -> None:
        workers.beat(self.client, workers.Heartbeat(node, "h", 1, processes, (queue,), {}))

    def leave(self) -> None:
        for node in ("one", "two"):
            workers.leave(self.client, workers.Heartbeat(node, "h", 1, 0, (), {}))


@pytest.fixture
def fleet(client: Redis, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet(client)
    monkeypatch.setattr(celery, "send_evaluation", made.send)
    return made


def call(*arguments: str) -> tuple[Any, str]:
    """Run `ddrl evaluate --json`; return what it printed, and its stderr."""
    printed = commands.run("evaluate", *arguments, "--json")
    assert printed.code == 0, printed
    return json.loads(printed.out), printed.err


def scores(report: Any) -> tuple[list[float], list[int]]:
    return report["returns"], report["lengths"]


def nothing_left(client: Redis, run: str) -> bool:
    kinds = (keys.evaluating(run, "*"), keys.evaluations(run, "*"))
    return not [key for kind in kinds for key in client.scan_iter(kind)]


@pytest.fixture
def expected(run: str) -> tuple[list[float], list[int]]:
    """The score of 10 episodes as played here."""
    report, _ = call(f"{run}@0", "-n", "10", "--epsilon", "0.2", "--local")
    assert report["episodes_on_fleet"] == 0 and report["epsilon"] == 0.2 and report["noop"] is None
    return scores(report)


ASK = ("-n", "10", "--epsilon", "0.2")


def test_a_fleet_gives_the_same_score_and_leaves_the_run_as_it_is(
    client: Redis, run: str, expected: Any, fleet: Fleet
) -> None:
    before = client.hgetall(keys.state(run))
    report, err = call(f"{run}@0", *ASK)
    assert scores(report) == expected and err == ""
    assert report["episodes_on_fleet"] == 10 and report["first_seed"] == 1_000_020
    assert len(fleet.sent) == 3  # one chunk for each process
    assert nothing_left(client, run)
    assert evaluations.results(client, run)[0] == [] and weights.index(client, run).best < 0
    assert client.hgetall(keys.state(run)) == before
    report, _ = call(f"{run}@0", *ASK, "--num-envs", "2")
    assert scores(report) == expected and len(fleet.sent) == 3 + 5
    text = commands.call("evaluate", f"{run}@0", *ASK)
    assert "played    10 by the fleet (3 processes)" in text and "epsilon   0.2" in text


def test_without_a_fleet_or_with_local_it_is_played_here(
    client: Redis, run: str, expected: Any, fleet: Fleet
) -> None:
    assert scores(call(f"{run}@0", *ASK, "--local")[0]) == expected and fleet.sent == []
    fleet.leave()  # those that only play rollouts stay
    report, _ = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 0 and fleet.sent == []
    assert "played    here" in commands.call("evaluate", f"{run}@0", *ASK)


def test_a_task_that_arrives_twice_counts_once(client: Redis, run: str, expected: Any, fleet: Fleet) -> None:
    def twice(run: str, message: str) -> None:
        assert tasks.evaluate(run, message) and not tasks.evaluate(run, message)

    fleet.play = twice
    report, _ = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes"] == report["episodes_on_fleet"] == 10


@pytest.mark.parametrize("dies", ["before it takes it", "while it plays"])
def test_what_a_dead_worker_had_is_sent_again(
    client: Redis, run: str, expected: Any, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    monkeypatch.setattr(command, "LOST_S", 0.1)

    def play(run: str, message: str) -> None:
        if fleet.sent.count(message) > 1:
            assert tasks.evaluate(run, message)
        elif dies == "while it plays":
            assert evaluations.take(client, run, message, "dead")

    fleet.play = play
    report, _ = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 10
    assert len(fleet.sent) == 6 and len(set(fleet.sent)) == 3


def test_the_rest_is_played_here_when_the_fleet_goes_away(
    client: Redis, run: str, expected: Any, fleet: Fleet
) -> None:
    def play(run: str, message: str) -> None:
        if len(fleet.sent) == 2:
            assert tasks.evaluate(run, message)
        if len(fleet.sent) == 3:
            fleet.leave()

    fleet.play = play
    report, err = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 4
    assert err == "the fleet has gone; playing the rest here\n"
    assert nothing_left(client, run)
    assert not tasks.evaluate(run, fleet.sent[0])  # it comes too late, and leaves nothing
    assert nothing_left(client, run)


def test_the_rest_is_played_here_when_the_server_goes_away(
    client: Redis, run: str, expected: Any, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise redis.ConnectionError("no answer")

    monkeypatch.setattr(evaluations, "results", gone)
    report, err = call(f"{run}@0", *ASK)
    assert scores(report) == expected and "server does not answer" in err


def test_an_interrupt_leaves_no_open_evaluation(client: Redis, run: str, fleet: Fleet) -> None:
    def interrupt(run: str, message: str) -> None:
        if len(fleet.sent) == 3:
            raise KeyboardInterrupt

    fleet.play = interrupt
    assert commands.run("evaluate", f"{run}@0", *ASK).code == 130
    assert nothing_left(client, run)
    assert not any(tasks.evaluate(run, message) for message in fleet.sent)


def test_what_a_worker_cannot_play_is_played_here(
    client: Redis, run: str, expected: Any, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = tasks.score

    def broken(loaded: Any, seeds: Any, **options: Any) -> Any:
        if seeds[0] == 1_000_024:
            raise RuntimeError("no such\nlibrary")
        return score(loaded, seeds, **options)

    monkeypatch.setattr(tasks, "score", broken)
    report, err = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 6
    assert "RuntimeError: no such library" in err and err.count("\n") == 1
    assert "RuntimeError" not in str(client.hgetall(keys.state(run)))  # it is not the run's fault


def test_an_incomplete_result_is_not_counted(client: Redis, run: str, expected: Any, fleet: Fleet) -> None:
    def play(run: str, message: str) -> None:
        evaluation = evaluations.take(client, run, message, "p")
        assert evaluation is not None
        result = EvaluationResult(0, (evaluation.first_seed,), (1.0,), (1,))
        assert evaluations.finish(client, run, message, evaluation, result)

    fleet.play = play
    report, err = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 0 and "cannot be read" in err


@pytest.mark.parametrize("outage", [False, True])
def test_a_worker_stops_a_withdrawn_evaluation_but_not_for_an_outage(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch, outage: bool
) -> None:
    monkeypatch.setattr(tasks, "BEAT_S", 0.0)
    sent: list[str] = []
    waiting = evaluations.OpenEvaluations(client, run, send=sent.append, timeout_s=60)
    wanted = evaluations.Evaluation(version=0, first_seed=1, num_episodes=3, purpose="request", num_envs=1)
    waiting.open([wanted])
    beats: list[int] = []
    take = evaluations.take

    def interrupted(*arguments: Any) -> Any:
        beats.append(1)
        if len(beats) == 4:
            if outage:
                raise redis.ConnectionError("no answer")
            waiting.withdraw()
        return take(*arguments)

    monkeypatch.setattr(evaluations, "take", interrupted)
    assert tasks.evaluate(run, sent[0]) is outage
    assert len(beats) == (31 if outage else 4)
    assert len(waiting.poll()) == outage


class Solved:
    """The answers of a toy."""

    evaluation_epsilon = 0.5

    def initial_state(self, num_envs: int) -> RecurrentState:
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        return toy_answers(observation)


@pytest.fixture
def spot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A file that holds a policy for an environment of images."""
    loaded = LoadedPolicy(Solved(), SPOT, describe(SPOT.env), "spot-1", 3)
    monkeypatch.setattr(policy, "load", lambda path: loaded)
    monkeypatch.chdir(tmp_path)
    return "spot.safetensors"


# imageio's reader leaves pipes open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_video_of_the_first_episode(spot: str, tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    plain, _ = call(spot, "-n", "3", "--epsilon", "0")
    report, _ = call(spot, "-n", "3", "--epsilon", "0", "--video", "out.mp4")
    assert scores(report) == scores(plain) == ([10.0] * 3, [10] * 3) and report["video"] == "out.mp4"
    with imageio.get_reader(tmp_path / "out.mp4") as reader:
        pictures = [np.asarray(picture) for picture in reader]
        assert reader.get_meta_data()["fps"] == 30.0
    assert len(pictures) == 11 and pictures[0].shape == (320, 320, 3)
    for picture in pictures:  # one pixel of 64 is bright, enlarged to a square
        assert 0.5 / 64 < (picture.mean(axis=2) > 128).mean() < 2 / 64
    assert [path.name for path in tmp_path.iterdir()] == ["out.mp4"]


def test_the_filmed_episode_is_played_here_and_the_rest_by_the_fleet(client: Redis, fleet: Fleet) -> None:
    pytest.importorskip("imageio_ffmpeg")
    run = published(client, SPOT)
    local, _ = call(run, *ASK, "--local")
    report, _ = call(run, *ASK, "--video", "out.mp4")
    assert scores(report) == scores(local) and report["episodes_on_fleet"] == 9 and Path("out.mp4").exists()


def test_an_interrupted_video_leaves_no_file(spot: str, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(KeyboardInterrupt), command.video_writer(tmp_path / "a.mp4") as add:
        add(np.zeros((9, 15, 3), np.uint8), 30.0)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_enlarged_to_even_sides() -> None:
    picture = np.arange(3 * 5, dtype=np.uint8).reshape(3, 5)
    large = command.enlarge(picture)
    assert large.shape == (322, 536, 3) and large[0, 0, 0] == 0 and (large[320, 534] == 14).all()
    assert command.enlarge(np.zeros((400, 600, 3), np.uint8)).shape == (400, 600, 3)


def test_the_epsilon_of_the_algorithm_is_the_default(spot: str) -> None:
    report, _ = call(spot, "-n", "40")
    assert report["epsilon"] == 0.5 and 5.0 < report["return_mean"] < 7.5
    assert call(spot, "-n", "4", "--epsilon", "0")[0]["return_mean"] == 10.0


def test_bad_input(spot: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        return commands.refused("evaluate", spot, *arguments)

    assert refused("--noop", "30") == "--noop 30: ddrl/Spot-v0 is not an ALE game; leave the option out"
    for option, value in (("--epsilon", "1.5"), ("--epsilon", "nan"), ("--noop", "-1"), ("--num-envs", "0")):
        assert option in refused(option, value)
    assert refused("--video", "out.avi").endswith("use one that ends in .mp4")
    assert "cannot be written" in refused("--video", "nowhere/out.mp4")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    line = refused("--video", "out.mp4")
    assert line == "--video out.mp4: needs imageio with ffmpeg; run pip install 'ddrl[video]'"
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_cannot_be_filmed_is_refused(run: str) -> None:
    pytest.importorskip("imageio_ffmpeg")
    printed = commands.run("evaluate", f"{run}@0", "-n", "2", "--video", "out.mp4")
    assert printed.code == 2 and "cannot be filmed" in printed.err
    assert list(Path.cwd().glob("*.mp4")) == []


def test_no_op_starts_of_a_game(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    env = {"id": "ALE/Asterix-v5", "atari": {"max_frames": 80}}
    config = validate({"name": "game", "env": env, "algorithm": {"name": "ppo", "network": "conv"}})

    class Still(Solved):
        evaluation_epsilon = 0.0
        first: list[bytes] = []

        def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
            self.first.append(observation[0].tobytes())
            return np.zeros(len(observation), np.int64)

    loaded = LoadedPolicy(Still(), config, describe(config.env), "game-1", 3)
    monkeypatch.setattr(policy, "load", lambda path: loaded)
    report, _ = call("game.safetensors", "-n", "2", "--noop", "0", "--seed", "5")
    assert report["noop"] == 0 and report["lengths"] == [20, 20]
    num = len(Still.first)
    assert call("game.safetensors", "-n", "2", "--seed", "5")[0]["noop"] == 30
    assert Still.first[0] != Still.first[num]
    text = commands.call("evaluate", "game.safetensors", "-n", "1", "--noop", "7")
    assert "no-ops    up to 7 frames" in text


def test_a_real_worker_plays_it(server: Any, run: str, expected: Any, processes: Processes) -> None:
    processes.celery(server.url)
    processes.until(lambda: workers.alive(server.client))
    done = processes.ddrl(server.url, "evaluate", f"{run}@0", *ASK, "--json")
    report = json.loads(done.stdout)
    assert report["episodes_on_fleet"] == 10, (done.stderr, processes.logs())
    assert scores(report) == expected
    assert nothing_left(server.client, run) and evaluations.results(server.client, run)[0] == []
