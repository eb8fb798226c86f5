"""`ddrl evaluate`: the same score here and on a fleet, whatever happens to the fleet; video; what is refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis import Redis
from support import commands
from support.processes import Processes
from support.runs import Acts, publish_initial, start, target_config, toy_answers
from support.store import SPACES, heartbeat, take

from ddrl import celery, policy
from ddrl.cli import evaluate as command
from ddrl.config import RunConfig, validate
from ddrl.envs import describe
from ddrl.policy import LoadedPolicy
from ddrl.runs import evaluation
from ddrl.store import evaluations, keys, segments, weights, workers
from ddrl.types import EvaluationResult
from ddrl.worker import tasks

QUEUE = "ddrl.evaluate"
ASK = ("-n", "10", "--epsilon", "0.2")
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
    publish_initial(client, run, take(client, run))
    return run


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this for its process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def run(client: Redis) -> str:
    return published(client, target_config())


def call(*arguments: str) -> tuple[Any, str]:
    """Run `ddrl evaluate --json`; return what it printed, and its stderr."""
    printed = commands.run("evaluate", *arguments, "--json")
    assert printed.code == 0, printed
    return json.loads(printed.out), printed.err


def scores(report: Any) -> tuple[list[float], list[int]]:
    return report["returns"], report["lengths"]


class Fleet:
    """Two workers with three processes; `play` plays a task as soon as it is sent, unless a test replaces it."""

    def __init__(self, client: Redis, run: str) -> None:
        self.client, self.run = client, run
        self.sent: list[str] = []
        self.play: Callable[[str, str], object] = tasks.evaluate
        self.serving = {"one": 1, "two": 2}
        self.beat()

    def beat(self) -> None:
        workers.beat(self.client, heartbeat("players", 8, "ddrl.rollout"))
        for node, processes in self.serving.items():
            workers.beat(self.client, heartbeat(node, processes, QUEUE))

    def send(self, run: str, message: str, queue: str) -> None:
        assert queue == QUEUE
        self.sent.append(message)
        self.play(run, message)

    def leave(self) -> None:
        while self.serving:
            workers.leave(self.client, heartbeat(self.serving.popitem()[0], 0))

    def score(self, *options: str) -> tuple[Any, str]:
        """Run the command; return its report, whose score is that of the same episodes played here, and its stderr."""
        local, _ = call(f"{self.run}@0", *ASK, "--local")
        assert (local["episodes_on_fleet"], local["epsilon"], local["noop"]) == (0, 0.2, None)
        self.beat()  # a busy machine may have taken longer than a heartbeat lasts
        report, err = call(f"{self.run}@0", *ASK, *options)
        assert scores(report) == scores(local)
        return report, err

    def is_clean(self) -> bool:
        """Return whether no open evaluation and no result is left on the server."""
        kinds = (keys.evaluating(self.run, "*"), keys.evaluations(self.run, "*"))
        return not any(self.client.keys(kind) for kind in kinds)


@pytest.fixture
def fleet(client: Redis, run: str, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet(client, run)
    monkeypatch.setattr(celery, "send_evaluation", made.send)
    return made


def test_a_fleet_gives_the_same_score_and_leaves_the_run_as_it_is(client: Redis, fleet: Fleet) -> None:
    before = client.hgetall(keys.state(fleet.run))
    report, err = fleet.score()
    assert report["episodes_on_fleet"] == 10 and report["first_seed"] == 1_000_020 and err == ""
    assert len(fleet.sent) == 3, "one chunk for each process"
    assert fleet.is_clean() and evaluations.results(client, fleet.run)[0] == []
    assert weights.index(client, fleet.run).best < 0 and client.hgetall(keys.state(fleet.run)) == before
    fleet.score("--num-envs", "2")
    assert len(fleet.sent) == 3 + 5
    text = commands.call("evaluate", f"{fleet.run}@0", *ASK)
    assert "played    10 by the fleet (3 processes)" in text and "epsilon   0.2" in text


def test_a_wait_for_the_server_is_no_step_of_an_environment(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[float | None] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [watched.append(tasks.watchdog._step_began), function(*args)][1]

    monkeypatch.setattr(tasks, "BEAT_S", 0.0)
    monkeypatch.setattr(tasks.evaluations, "take", noting(evaluations.take))
    monkeypatch.setattr(tasks.policy, "from_run", noting(policy.from_run))
    fleet.score()
    assert len(watched) > 20 and {*watched} == {None}


def test_few_evaluations_wait_for_the_fleet_at_a_time(
    client: Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers delete a list of more than they can be."""
    monkeypatch.setattr(command, "REQUESTS_AT_ONCE", 2)
    most = []

    def play(run: str, message: str) -> None:
        requester = message.partition("/")[0]
        done = client.xlen(keys.evaluations(run, requester))
        most.append(client.hlen(keys.evaluating(run, requester)) - done)
        tasks.evaluate(run, message)

    monkeypatch.setattr(fleet, "play", play)
    assert fleet.score("--num-envs", "1")[0]["episodes_on_fleet"] == 10
    assert len(most) == 10 and max(most) == 2


def test_without_a_fleet_or_with_local_it_is_played_here(fleet: Fleet) -> None:
    fleet.score("--local")
    fleet.leave()  # those that only play rollouts stay
    assert fleet.score()[0]["episodes_on_fleet"] == 0 and fleet.sent == []
    assert "played    here" in commands.call("evaluate", f"{fleet.run}@0", *ASK)


@pytest.mark.parametrize("dies", ["before it takes it", "while it plays"])
def test_what_a_dead_worker_had_is_sent_again(
    client: Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    monkeypatch.setattr(command, "LOST_S", 0.1)

    def play(run: str, message: str) -> None:
        if fleet.sent.count(message) > 1:
            assert tasks.evaluate(run, message)
        elif dies == "while it plays":
            assert evaluations.take(client, run, message, "dead")

    fleet.play = play
    assert fleet.score()[0]["episodes_on_fleet"] == 10
    assert len(fleet.sent) == 6 and len(set(fleet.sent)) == 3


def test_the_rest_is_played_here_when_the_fleet_goes_away(fleet: Fleet) -> None:
    def play(run: str, message: str) -> None:
        if len(fleet.sent) == 2:
            assert tasks.evaluate(run, message)
        if len(fleet.sent) == 3:
            fleet.leave()

    fleet.play = play
    report, err = fleet.score()
    assert report["episodes_on_fleet"] == 4 and err == "the fleet has gone; playing the rest here\n"
    assert fleet.is_clean()
    assert not tasks.evaluate(fleet.run, fleet.sent[0])  # it comes too late, and leaves nothing
    assert fleet.is_clean()


def test_the_rest_is_played_here_when_the_server_goes_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise redis.ConnectionError("no answer")

    monkeypatch.setattr(evaluations, "results", gone)
    monkeypatch.setattr("ddrl.cli.evaluate.OUTAGE_S", 0.2)
    assert "server does not answer" in fleet.score()[1]


def test_an_outage_is_waited_for(client: Redis, fleet: Fleet) -> None:
    def play(run: str, message: str) -> None:
        assert tasks.evaluate(run, message)
        if len(fleet.sent) == 2:  # the next message is not taken
            fleet.play = refuse

    def refuse(*_: str) -> None:
        fleet.sent.pop()
        fleet.play = play
        raise redis.ReadOnlyError("You can't write against a read only replica.")

    fleet.play = play
    report, _ = fleet.score()
    assert report["episodes_on_fleet"] == 10 and len(fleet.sent) == 3 and fleet.is_clean()


def test_an_interrupt_leaves_no_open_evaluation(fleet: Fleet) -> None:
    def interrupt(run: str, message: str) -> None:
        if len(fleet.sent) == 3:
            raise KeyboardInterrupt

    fleet.play = interrupt
    printed = commands.run("evaluate", f"{fleet.run}@0", *ASK)
    assert printed.code == 130 and "Traceback" not in printed.err and fleet.is_clean()
    assert not any(tasks.evaluate(fleet.run, message) for message in fleet.sent)


def test_what_a_worker_cannot_play_is_played_here(
    client: Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = tasks.score

    def broken(loaded: Any, seeds: Any, **options: Any) -> Any:
        if seeds[0] == 1_000_024:
            raise RuntimeError("no such\nlibrary")
        return score(loaded, seeds, **options)

    monkeypatch.setattr(tasks, "score", broken)
    report, err = fleet.score()
    assert report["episodes_on_fleet"] == 6
    assert "RuntimeError: no such library" in err and err.count("\n") == 1
    assert "RuntimeError" not in str(client.hgetall(keys.state(fleet.run)))  # it is not the run's fault


def test_a_fleet_that_only_says_it_is_there_is_waited_for_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "REQUESTS_AT_ONCE", 1)
    monkeypatch.setattr(command, "LOST_S", 0.05)
    fleet.play = lambda *_: None
    report, err = fleet.score("--num-envs", "1")
    assert report["episodes_on_fleet"] == 0 and len(fleet.sent) == 3 and fleet.is_clean()
    assert err.count("\n") == 1 and "lost 3 times" in err


@pytest.mark.parametrize("outage", [False, True])
def test_a_worker_stops_a_withdrawn_evaluation_but_not_for_an_outage(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch, outage: bool
) -> None:
    monkeypatch.setattr(tasks, "BEAT_S", 0.0)
    sent: list[str] = []
    waiting = evaluations.OpenEvaluations(client, run, send=sent.append, timeout_s=60)
    waiting.open(
        [evaluations.Evaluation(version=0, first_seed=1, num_episodes=3, purpose="request", num_envs=1)]
    )
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


def test_where_a_worker_leaves_another_one_plays_the_evaluation(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "BEAT_S", 0.0)
    again: list[tuple[str, str, str]] = []
    monkeypatch.setattr(tasks.celery, "send_evaluation", lambda *message: again.append(message))
    sent: list[str] = []
    waiting = evaluations.OpenEvaluations(client, run, send=sent.append, timeout_s=60)
    waiting.open([evaluations.Evaluation(version=0, first_seed=1, num_episodes=2, purpose="request")])
    leaving = workers.Heartbeat("-", socket.gethostname(), os.getpid(), 1, (), {}, draining=True)
    workers.beat(client, leaving)
    client.set(
        keys.worker(f"-:{socket.gethostname()}:{os.getpid() + 1}"), json.dumps(asdict(leaving))
    )  # forged
    monkeypatch.setenv("DDRL_WORKER_PID", str(os.getpid() + 2))  # of its worker
    assert tasks.evaluate(run, sent[0]) and len(waiting.poll()) == 1
    monkeypatch.setenv("DDRL_WORKER_PID", str(os.getpid()))
    waiting.open([evaluations.Evaluation(version=0, first_seed=2, num_episodes=2, purpose="request")])
    sent.pop(0)
    assert not tasks.evaluate(run, sent[0]) and again == [(run, sent[0], "ddrl.evaluate")]
    assert waiting.poll() == [] and waiting.given_up == {}
    workers.beat(client, replace(leaving, draining=False))
    assert tasks.evaluate(run, sent[0]) and len(waiting.poll()) == 1


def test_evaluations_of_a_run_that_cannot_be_played_here_cost_one_pause(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.hset(keys.state(run), "versions", json.dumps({"gymnasium": "0.26.3"}))
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)
    sent: list[str] = []
    waiting = evaluations.OpenEvaluations(
        client, run, send=sent.append, timeout_s=60, token=take(client, run)
    )
    waiting.open([evaluations.Evaluation(version=0, first_seed=1, num_episodes=2, purpose="request")])
    assert not tasks.evaluate(run, sent[0]) and "gymnasium" in next(
        iter(segments.refusals(client, run).values())
    )
    monkeypatch.setattr(tasks, "play_evaluation", None)
    assert not tasks.evaluate(run, sent[0])
    tasks.kept().refused.clear()


def test_an_evaluation_whose_weights_are_gone_keeps_nobody_from_playing_the_run(
    client: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)
    sent: list[str] = []
    waiting = evaluations.OpenEvaluations(
        client, run, send=sent.append, timeout_s=60, token=take(client, run)
    )
    waiting.open([evaluations.Evaluation(version=9, first_seed=1, num_episodes=2, purpose="watch")])
    assert not tasks.evaluate(run, sent[0])
    assert not segments.refusals(client, run) and run not in tasks.kept().refused


@pytest.fixture
def spot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A file that holds a policy for an environment of images."""
    loaded = LoadedPolicy(Acts(toy_answers), SPOT, describe(SPOT.env), "spot-1", 3)
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


def test_a_gif_holds_the_first_seconds(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio")
    with command.video_writer(tmp_path / "a.gif") as add:
        for number in range(1000):
            add(np.full((210, 160, 3), number % 256, np.uint8), 50.0)
    pictures = imageio.mimread(tmp_path / "a.gif", memtest=False)
    assert len(pictures) == 250 and pictures[0].shape == (420, 320, 3), "every third of 15 s"
    assert [int(picture[0, 0, 0]) for picture in pictures[:3]] == [0, 3, 6]
    assert imageio.v3.immeta(tmp_path / "a.gif")["duration"] == 60
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]


def test_the_filmed_episode_is_played_here_and_the_rest_by_the_fleet(client: Redis, fleet: Fleet) -> None:
    pytest.importorskip("imageio_ffmpeg")
    fleet.run = published(client, SPOT)
    assert fleet.score("--video", "out.mp4")[0]["episodes_on_fleet"] == 9 and Path("out.mp4").exists()


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


def test_torch_has_one_thread_as_in_a_worker(spot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "playing 1 episode\n" in commands.run("evaluate", spot, "-n", "1").err
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_bad_input(spot: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = commands.refused("evaluate", spot, "--noop", "30")
    assert line == "--noop 30: ddrl/Spot-v0 is not an ALE game; leave the option out"
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    line = commands.refused("evaluate", spot, "--video", "out.mp4")
    assert line == "--video out.mp4: needs imageio with ffmpeg; run pip install 'ddrl[video]'"
    assert list(tmp_path.iterdir()) == []


def test_no_op_starts_of_a_game(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int | None] = []
    config = SPOT.model_copy(update={"env": SPOT.env.model_copy(update={"id": "ALE/Asterix-v5"})})

    def score(
        loaded: LoadedPolicy, seeds: range, *, noop_max: int | None, on_episode: Any, **_: Any
    ) -> EvaluationResult:
        played.append(noop_max)
        for seed in seeds:
            on_episode(seed, 1.0, 2)
        return EvaluationResult((1.0,) * len(seeds), (2,) * len(seeds))

    loaded = LoadedPolicy(Acts(toy_answers), config, SPACES, "game-1", 3)
    monkeypatch.setattr(policy, "load", lambda path: loaded)
    monkeypatch.setattr(evaluation, "score", score)
    assert call("game.safetensors", "-n", "2")[0]["noop"] == 30
    text = commands.call("evaluate", "game.safetensors", "-n", "1", "--noop", "7")
    assert "no-ops    up to 7 frames" in text and played == [None, 7]


def test_the_report_has_the_median_and_the_range(run: str) -> None:
    report, _ = call(f"{run}@0", "-n", "5", "--seed", "7")
    returns = report["returns"]
    assert (report["first_seed"], report["last_seed"], report["policy_version"]) == (7, 11, 0)
    assert report["return_median"] == sorted(returns)[2] and report["return_max"] == max(returns)
    assert report["return_mean"] == pytest.approx(np.mean(returns))
    text = commands.call("evaluate", run, "-n", "3", "--seed", "7")
    assert "seeds 7 to 9" in text and f"{run}@0" in text


def test_a_real_worker_plays_it(server: Any, run: str, processes: Processes) -> None:
    processes.celery(server.url)
    processes.until(lambda: workers.alive(server.client))
    done = processes.ddrl(server.url, "evaluate", f"{run}@0", *ASK, "--json")
    report = json.loads(done.stdout)
    assert report["episodes_on_fleet"] == 10, (done.stderr, processes.logs())
    assert scores(report) == scores(call(f"{run}@0", *ASK, "--local")[0])
    assert evaluations.results(server.client, run)[0] == []
