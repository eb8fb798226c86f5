"""`ddrl evaluate`: the same score here and on a fleet, whatever happens to the fleet; video; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
from redis import Redis
from support.processes import Processes
from support.runs import start, target_config, toy_answers
from typer.testing import CliRunner

from ddrl import celery, policy
from ddrl.algorithms import base
from ddrl.algorithms.base import NO_STATE, RecurrentState
from ddrl.cli import app, main, spread, video
from ddrl.config import validate
from ddrl.envs import describe
from ddrl.policy import LoadedPolicy
from ddrl.store import connection, evaluations, keys, requests, runs, tensors, weights, workers
from ddrl.store import leases as lease
from ddrl.store.requests import Answer
from ddrl.worker import tasks

QUEUE = "ddrl.evaluate"


@pytest.fixture
def client(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Redis:
    """The private server as the one that commands and tasks find; and an empty current folder."""
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "clients", lambda: (server.client, server.client))
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)
    monkeypatch.setattr(spread, "SURVEY_S", 0.02)
    monkeypatch.setattr(spread, "POLL_S", 0.005)
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    """A run with a first version of real weights."""
    config = target_config()
    made = start(client, config)
    token = lease.acquire(client, made, host="here", folder="/tmp")
    assert token is not None
    learner = base.resolve(config, runs.spaces(client, made)).learner(device=torch.device("cpu"), seed=1)
    blob = tensors.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
    weights.publish(client, made, token, version=0, blob=blob, allowance=0, updates=0)
    return made


@pytest.fixture
def sent(client: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A fleet of two workers with three processes, whose tasks play here as soon as they are sent."""
    ids: list[str] = []

    def send(name: str, request_id: str, queue: str) -> None:
        assert queue == QUEUE
        ids.append(request_id)
        assert tasks.evaluate(name, request_id)

    monkeypatch.setattr(celery, "send_evaluation", send)
    beat(client, "one", 1), beat(client, "two", 2)
    beat(client, "players", 8, "ddrl.rollout")
    yield ids


def beat(client: Redis, node: str, processes: int, queue: str = QUEUE) -> None:
    workers.beat(client, workers.Heartbeat(node, "h", 1, processes, (queue,), {}))


def leave(client: Redis, node: str) -> None:
    workers.leave(client, workers.Heartbeat(node, "h", 1, 0, (), {}))


def call(*arguments: str) -> tuple[Any, str]:
    """Run `ddrl evaluate --json`; what it printed, and what it said on stderr."""
    result = CliRunner().invoke(app, ["evaluate", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def scores(report: Any) -> tuple[list[float], list[int]]:
    return report["returns"], report["lengths"]


def nothing_left(client: Redis, run: str) -> bool:
    return not [*client.scan_iter(keys.requests(run, "*")), *client.scan_iter(keys.answers(run, "*"))]


@pytest.fixture
def expected(run: str) -> tuple[list[float], list[int]]:
    """The score of 10 episodes as played here."""
    report, _ = call(f"{run}@0", "-n", "10", "--epsilon", "0.2", "--local")
    assert report["episodes_on_fleet"] == 0 and report["epsilon"] == 0.2 and report["noop"] is None
    return scores(report)


ASK = ("-n", "10", "--epsilon", "0.2")


def test_a_fleet_gives_the_same_score(client: Redis, run: str, expected: Any, sent: list[str]) -> None:
    before = client.hgetall(keys.state(run))
    report, said = call(f"{run}@0", *ASK)
    assert scores(report) == expected and said == ""
    assert report["episodes_on_fleet"] == 10 and report["first_seed"] == 1_000_020
    assert len(sent) == 3  # at least one chunk for each process
    assert nothing_left(client, run)
    # The run knows nothing of it.
    assert evaluations.results(client, run)[0] == [] and weights.index(client, run).best < 0
    assert runs.state(client, run).evaluation is None
    assert client.hgetall(keys.state(run)) == before
    report, _ = call(f"{run}@0", *ASK, "--num-envs", "2")
    assert scores(report) == expected and len(sent) == 3 + 5
    text = CliRunner().invoke(app, ["evaluate", f"{run}@0", *ASK]).stdout
    assert "played    10 by the fleet (3 processes)" in text and "epsilon   0.2" in text


def test_without_a_fleet_or_with_local_it_is_played_here(
    client: Redis, run: str, expected: Any, sent: list[str]
) -> None:
    assert scores(call(f"{run}@0", *ASK, "--local")[0]) == expected and sent == []
    for node in ("one", "two"):
        leave(client, node)  # those that only play rollouts stay
    report, _ = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 0 and sent == []
    assert "played    here" in CliRunner().invoke(app, ["evaluate", f"{run}@0", *ASK]).stdout


def test_a_request_played_twice_counts_once(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(name: str, request_id: str, _: str) -> None:
        assert tasks.evaluate(name, request_id) and not tasks.evaluate(name, request_id)
        set_name, number = request_id.split(":")[1:]
        client.rpush(keys.answers(name, set_name), client.lindex(keys.answers(name, set_name), -1))
        assert int(number) < 3

    monkeypatch.setattr(celery, "send_evaluation", twice)
    report, _ = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes"] == report["episodes_on_fleet"] == 10


@pytest.mark.parametrize("dies", ["before it takes it", "while it plays"])
def test_what_a_dead_worker_had_is_sent_again(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    monkeypatch.setattr(spread, "OVERDUE_S", 0.1)
    ids: list[str] = []

    def send(name: str, request_id: str, _: str) -> None:
        ids.append(request_id)
        if ids.count(request_id) > 1:
            assert tasks.evaluate(name, request_id)
        elif dies == "while it plays":
            assert requests.take(client, name, request_id, "dead")

    monkeypatch.setattr(celery, "send_evaluation", send)
    report, _ = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 10
    assert sorted(ids) == sorted([*set(ids), *set(ids)]) and len(ids) == 6


def test_what_is_still_played_is_not_sent_again(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "OVERDUE_S", 0.15)
    ids: list[str] = []
    look, looks = requests.look, []

    def slow_look(*arguments: Any) -> Any:
        looks.append(1)
        for request_id in ids:  # the workers give a sign; and after a while their answers
            number = int(request_id.rpartition(":")[2])
            if len(looks) < 40 + number:
                assert requests.take(client, run, request_id, f"w{number}")
            elif len(looks) == 40 + number:
                requests.put(client, run, request_id.split(":")[1], {number: waiting[number]})
                assert tasks.evaluate(run, request_id)
        return look(*arguments)

    waiting: dict[int, requests.Request] = {}
    put = requests.put

    def note(c: Any, r: str, n: str, wanted: Any) -> None:
        waiting.update(wanted)
        put(c, r, n, wanted)

    monkeypatch.setattr(requests, "put", note)
    monkeypatch.setattr(requests, "look", slow_look)
    monkeypatch.setattr(celery, "send_evaluation", lambda name, request_id, _: ids.append(request_id))
    report, _ = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 10
    assert len(ids) == 3 and len(looks) > 40


def test_the_rest_is_played_here_when_the_fleet_goes_away(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []

    def send(name: str, request_id: str, _: str) -> None:
        ids.append(request_id)
        if len(ids) == 2:
            assert tasks.evaluate(name, request_id)
        if len(ids) == 3:
            leave(client, "one"), leave(client, "two")

    monkeypatch.setattr(celery, "send_evaluation", send)
    report, said = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 4
    assert said == "the fleet has gone; playing the rest here\n"
    assert nothing_left(client, run)
    assert not tasks.evaluate(run, ids[0])  # it comes too late, and leaves nothing
    assert nothing_left(client, run)


def test_the_rest_is_played_here_when_the_server_goes_away(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> Any:
        raise redis.ConnectionError("no answer")

    monkeypatch.setattr(requests, "answers", gone)
    report, said = call(f"{run}@0", *ASK)
    assert scores(report) == expected and "server does not answer" in said


def test_what_a_worker_cannot_play_is_played_here(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plays = tasks.play_episodes

    def broken(player: Any, env: Any, spaces: Any, seeds: Any, **options: Any) -> Any:
        if seeds[0] == 1_000_024:
            raise RuntimeError("no such\nlibrary")
        return plays(player, env, spaces, seeds, **options)

    monkeypatch.setattr(tasks, "play_episodes", broken)
    report, said = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 6
    assert "RuntimeError: no such library" in said and said.count("\n") == 1
    assert runs.state(client, run).status == "active"
    assert "RuntimeError" not in str(client.hgetall(keys.state(run)))


def test_an_answer_of_a_wrong_length_is_not_believed(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(name: str, request_id: str, _: str) -> None:
        number = int(request_id.rpartition(":")[2])
        assert requests.answer(client, name, request_id, Answer(number, (1.0,), (1,)))

    monkeypatch.setattr(celery, "send_evaluation", send)
    report, said = call(f"{run}@0", *ASK)
    assert scores(report) == expected and report["episodes_on_fleet"] == 0 and "number is wrong" in said


@pytest.mark.parametrize("row", [b"{", b'{"number": 0}', b'{"number": 0, "returns": [1], "lengths": 7}'])
def test_an_answer_that_cannot_be_read_is_none(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch, row: bytes
) -> None:
    def send(name: str, request_id: str, _: str) -> None:
        if request_id.endswith(":0"):
            client.rpush(keys.answers(name, request_id.split(":")[1]), row)
        assert tasks.evaluate(name, request_id)

    monkeypatch.setattr(celery, "send_evaluation", send)
    report, said = call(f"{run}@0", *ASK)
    num_spoiled = 4 if b"number" in row else 0  # without a number it is nobody's
    assert scores(report) == expected and report["episodes_on_fleet"] == 10 - num_spoiled
    assert said.count("answer cannot be read") == bool(num_spoiled)


def test_a_request_that_cannot_be_read_is_answered_with_the_reason(client: Redis, run: str) -> None:
    name = requests.new_name()
    for number, row in enumerate((b"{", b"[1]", b'{"version": 0}')):
        client.hset(keys.requests(run, name), str(number), row)
        assert tasks.evaluate(run, requests.request_id(name, number))
    client.hset(keys.requests(run, name), "x", b"{}")
    assert not tasks.evaluate(run, f"request:{name}:x")
    given = requests.answers(client, run, name)
    assert [answer.number for answer in given] == [0, 1, 2]
    assert all("ValueError: request" in answer.error and answer.returns == () for answer in given)


def test_a_worker_stops_playing_what_nobody_waits_for(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SIGN_EVERY_S", 0.0)
    name = requests.new_name()
    requests.put(client, run, name, {0: requests.Request(0, 1, 3, 1, 0.0, None)})
    begun: list[int] = []
    step = tasks.requests.take

    def take(*arguments: Any) -> Any:
        begun.append(1)
        if len(begun) == 4:
            requests.withdraw(client, run, name)
        return step(*arguments)

    monkeypatch.setattr(requests, "take", take)
    assert not tasks.evaluate(run, requests.request_id(name, 0))
    assert len(begun) == 4 and nothing_left(client, run)


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
    config = validate({"name": "spot", "env": {"id": "ddrl/Spot-v0"}, "algorithm": {"name": "ppo"}})
    loaded = LoadedPolicy(Solved(), config, describe(config.env), "spot-1", 3)
    monkeypatch.setattr(policy, "load", lambda path: loaded)
    monkeypatch.chdir(tmp_path)
    return "spot.safetensors"


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # imageio's reader leaves pipes
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


def test_the_filmed_episode_is_played_here_and_the_rest_by_the_fleet(
    client: Redis, run: str, expected: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    from ddrl.runs import evaluation

    monkeypatch.setattr(evaluation._Film, "make", lambda film: evaluation.envs.make_one(film._env))
    picture = np.zeros((8, 8), np.uint8)
    monkeypatch.setattr(evaluation._Film, "take", lambda film, *_: film._on_frame(picture, 30.0))
    report, _ = call(f"{run}@0", *ASK, "--video", "out.mp4")
    assert scores(report) == expected and report["episodes_on_fleet"] == 9 and Path("out.mp4").exists()


def test_an_interrupted_video_leaves_no_file(spot: str, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(KeyboardInterrupt), video.Recorder(tmp_path / "a.mp4") as recorder:
        recorder.add(np.zeros((9, 15, 3), np.uint8), 30.0)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_enlarged_to_even_sides() -> None:
    picture = np.arange(3 * 5, dtype=np.uint8).reshape(3, 5)
    large = video.enlarge(picture)
    assert large.shape == (322, 536, 3) and large[0, 0, 0] == 0 and (large[320, 534] == 14).all()
    assert video.enlarge(np.zeros((400, 600, 3), np.uint8)).shape == (400, 600, 3)


def test_the_epsilon_of_the_algorithm_is_the_default(spot: str) -> None:
    report, _ = call(spot, "-n", "40")
    assert report["epsilon"] == 0.5 and 5.0 < report["return_mean"] < 7.5
    assert call(spot, "-n", "4", "--epsilon", "0")[0]["return_mean"] == 10.0


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail with a last line on stderr and nothing on stdout; that line."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["evaluate", *arguments]) == 2
        printed = capsys.readouterr()
        *said, line = printed.err.splitlines()
        assert printed.out == "" and set(said) <= {"playing 2 episodes"}
        assert line.startswith("ddrl: error: ")
        return line.removeprefix("ddrl: error: ")

    return run


def test_bad_input(
    spot: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert refused(spot, "--noop", "30") == "--noop 30: ddrl/Spot-v0 is no ALE game; leave the option out"
    for option, value in (("--epsilon", "1.5"), ("--epsilon", "nan"), ("--noop", "-1"), ("--num-envs", "0")):
        assert option in refused(spot, option, value)
    assert refused(spot, "--video", "out.avi").endswith("use a name that ends in .mp4")
    assert "cannot be written" in refused(spot, "--video", "nowhere/out.mp4")
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
    line = refused(spot, "--video", "out.mp4")
    assert line == "--video out.mp4: needs imageio with ffmpeg; run pip install 'ddrl[video]'"
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_cannot_be_filmed_is_refused(run: str, refused: Callable[..., str]) -> None:
    pytest.importorskip("imageio_ffmpeg")
    assert "cannot be filmed" in refused(f"{run}@0", "-n", "2", "--video", "out.mp4")
    assert list(Path.cwd().glob("*.mp4")) == []


def test_no_op_starts_of_a_game(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")
    env = {"id": "ALE/Asterix-v5", "atari": {"max_frames": 80}}
    config = validate({"name": "game", "env": env, "algorithm": {"name": "ppo"}})

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
    text = CliRunner().invoke(app, ["evaluate", "game.safetensors", "-n", "1", "--noop", "7"]).stdout
    assert "no-ops    up to 7 frames" in text


def test_a_real_worker_plays_it(server: Any, run: str, expected: Any, processes: Processes) -> None:
    processes.celery(server.url)
    processes.until(lambda: workers.alive(server.client))
    done = processes.ddrl(server.url, "evaluate", f"{run}@0", *ASK, "--json")
    report = json.loads(done.stdout)
    assert report["episodes_on_fleet"] == 10, (done.stderr, processes.logs())
    assert scores(report) == expected
    assert nothing_left(server.client, run) and evaluations.results(server.client, run)[0] == []
