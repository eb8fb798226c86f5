"""Following runs: plain lines, the live views, and hints."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from typing import Any

import pytest
import redis
from rich.console import Console, RenderableType
from support.commands import call, refused
from support.private_server import until
from support.store import add_history, append, end, make_run, note_playing, take, want_processes

from ddrl.cli import curve, hints, live, view, watcher
from ddrl.cli.watcher import Figures, Watcher, entitled
from ddrl.store import connection, keys, metrics, runs, segments, workers

QUEUE = "ddrl.rollout.box2d"


def beat(client: Any, *queues: str, host: str = "here", **more: Any) -> None:
    workers.beat(client, workers.Heartbeat(f"ddrl-1@{host}", host, 1, 3, queues, {}, **more))


def poll(client: Any, run: str, *, starting_s: float = 0.0) -> Figures:
    return Watcher(client, run, starting_s=starting_s).poll()


def terminal(width: int = 100) -> Console:
    return Console(record=True, force_terminal=True, width=width, height=40, file=io.StringIO())


def text_of(shown: RenderableType, width: int) -> str:
    console = terminal(width)
    console.print(shown)
    return console.export_text()


def shown(figures: Figures, width: int = 80, height: int = 40) -> str:
    return text_of(view.one_run(figures, width=width, height=height), width)


# --- following ---------------------------------------------------------------------------------------


def test_plain_line_has_the_figures(client: Any, lander: str) -> None:
    beat(client, QUEUE)
    line = live.plain_line(poll(client, lander))
    assert "env_steps 30000 (2930/s)  updates 7600 (310/s)  return 143.2  eval " in line
    assert line.startswith("30s  ") and line.endswith("@v31  staleness 0.8")


def test_following_prints_lines_until_the_end(
    client: Any, lander: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = iter(range(100))

    def tick() -> None:
        tick = next(ticks)
        if tick == 3:
            runs.set_status(client, lander, "solved", "return 200 confirmed")
        if tick == 12:
            runs.complete(client, lander, 0)

    (state,) = live.follow(client, [lander], json_output=False, on_tick=tick)
    assert state.status == "solved" and next(ticks) > 12
    _, last = capsys.readouterr().out.splitlines()
    assert "solved: return 200 confirmed" in last and "/s)" not in last


def test_with_json_stdout_stays_empty_and_errors_of_the_tick_pass(
    client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("a child died")

    run = make_run(client)
    with pytest.raises(RuntimeError, match="a child died"):
        live.follow(client, [run], json_output=True, on_tick=fail)
    end(client, run, "stopped", "stopped by the operator")
    assert live.follow(client, [run], json_output=True)[0].ended
    printed = capsys.readouterr()
    assert printed.out == "" and "stopped by the operator" in printed.err


def test_a_terminal_shows_names_that_look_like_markup(
    client: Any, lander: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may report any evaluation, with metrics of any name."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = {
        "version": 0,
        "first_seed": 0,
        "num_episodes": 1,
        "purpose": "watch",
        "returns": [0],
        "lengths": [1],
    }
    result |= {"return_mean": 0, "return_std": 0, "metrics": {"[/a]": [7]}}
    client.xadd(keys.evaluations(lander), {"result": json.dumps(result)})
    end(client, lander, "stopped", "stopped by the operator")
    live.follow(client, [lander], json_output=False)
    assert "[/a] 7" in capsys.readouterr().out


def test_following_waits_for_a_server_that_came_back_empty(
    client: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LINE_S", 0.0)
    run = make_run(client)
    kept = {key: client.dump(key) for key in client.scan_iter()}

    def tick() -> None:
        if printed := capsys.readouterr().err:
            client.flushall()
        if "not on the server" in printed:
            for key, value in kept.items():
                client.restore(key, 0, value, replace=True)
            end(client, run, "stopped", "enough")

    (state,) = live.follow(client, [run], json_output=True, on_tick=tick)
    assert state.ended and state.reason == "enough"


def test_the_last_view_stays_on_the_terminal(
    client: Any, lander: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = terminal()
    monkeypatch.setattr(live, "Console", lambda **_: console)
    end(client, lander, "solved", "return 200 confirmed")
    assert live.follow(client, [lander], json_output=False)[0].status == "solved"
    text = console.export_text()
    assert "solved" in text and "return 200 confirmed" in text and "30,000" in text


def test_notices_are_printed_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there have been more than are kept."""
    monkeypatch.setattr(watcher, "MOST_NOTICES", 2)
    run, file = make_run(client), io.StringIO()
    follower, lines = Watcher(client, run), live.Lines(file)
    for weight in ("3", "2", "2", "4", "5"):
        call("set", run, f"weight={weight}")
        lines.show([follower.poll()])
    assert follower.poll().config.weight == 5.0
    printed = [line.split("  ")[1] for line in file.getvalue().splitlines() if "set" in line]
    assert printed == [
        f"set weight: {change}" for change in ("1.0 -> 3.0", "3.0 -> 2.0", "2.0 -> 4.0", "4.0 -> 5.0")
    ]


def test_the_clock_starts_with_the_first_step_and_never_goes_back(client: Any) -> None:
    run = make_run(client)
    client.hset(keys.state(run), "created_ms", runs.server_ms(client) - 60_000)
    follower = Watcher(client, run)
    waiting = follower.poll()
    assert live.plain_line(waiting).startswith("-  waiting for a learner")
    assert "0s, 15m00s left" in shown(waiting)
    append(client, run, 0, played_ms=5_000)
    assert follower.poll().elapsed_s == pytest.approx(5, abs=2)
    before = follower.poll().elapsed_s
    runs.set_status(client, run, "stopped", "enough")
    assert follower.poll().elapsed_s >= before


def test_closing_lines_say_how_to_go_on(client: Any) -> None:
    state = replace(runs.state(client, make_run(client)), host="far", reason="time limit of 60 s")
    summary: dict[str, Any] = {"run": "x-1", "status": "time", "train_s": 61.0, "env_steps": 1000}
    summary |= {"updates": 10, "policy_version": 3, "artifacts": "/a/x-1", "evaluation": None}
    text = live.closing_lines(summary, state)
    assert "x-1: time after 1m01s" in text and "`ddrl resume x-1 --time 10m`" in text and "far:/a/x-1" in text
    state = replace(state, reason="limit of 10 updates")
    assert "resume" not in live.closing_lines(summary, state), "it would be refused"
    summary["evaluation"] = {"return_mean": 9.0, "return_std": 1.0, "episodes": 20}
    assert "return 9.0 ± 1.0 over 20 episodes" in live.closing_lines({**summary, "status": "solved"}, state)


# --- views -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_of_a_run_shows_everything(client: Any, lander: str, width: int) -> None:
    beat(client, QUEUE)
    for pid in (7, 8):
        note_playing(client, lander, node="ddrl-1@here", pid=pid)
    text = shown(poll(client, lander), width)
    for words in (
        *(lander, "active", "30s, 14m", "30,000 (2930/s)", "7,600 (310/s)", "143.2", "31.9 of 32"),
        *("0.8 versions", "1 (2 of 3 processes)", "12 %", "critic_loss", "evaluation v31", "20 episodes"),
        *("confirmation v31", "target 200", "LunarLanderContinuous-v3, sac, seed 1", "◆"),
    ):
        assert words in text, words
    assert "…" not in text and any("⠁" <= character <= "⣿" for character in text)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("algorithm", ["sac", "ppo"])
def test_no_cell_of_a_view_is_cut(client: Any, algorithm: str) -> None:
    run, other = (make_run(client, algorithm={"name": algorithm}) for _ in range(2))
    token, size = take(client, run), 512 * 1024**2
    counts = {"appended_steps": 123_456_789, "appended_bytes": size, "version": 12_345}
    client.hset(keys.counts(run), mapping=counts | {"crashes_total": 1_234, "lost_producers": 1_234})
    row = {
        "env_steps_per_s": 12_345.0,
        "updates": 1_234_567,
        "updates_per_s": 1_234.0,
        "return_mean": -1_234.5,
    }
    row |= {"staleness": 123.4, "max_staleness": 200, "queued_steps": 1_234_567, "dropped": 1_234_567}
    row |= {"samples_per_insert": 31.9, "replay_size": 1_000_000, "replay_bytes": size, "learner_wait": 1.0}
    metrics.add(client, run, token, row | {"explained_variance": -0.0001234, "learning_rate": 0.0001234})
    for number in range(100):
        beat(client, QUEUE, host=f"h{number}")
    figures = [poll(client, run), poll(client, other)]
    cells = view.cells(figures[0]) | view.other_metrics(figures[0])
    for width in (60, 80, 100, 110, 120, 200):
        text = shown(figures[0], width)
        assert {word for item in cells.items() for part in item for word in part.split()} <= {*text.split()}
        assert max(map(len, text.splitlines())) <= width and "…" not in text
        several = text_of(view.several_runs(figures, width=max(80, width)), max(80, width))
        assert {"123,456,789", "12,345", "1,234,567", "-1,234.5"} <= {*several.split()}, several


def test_the_view_of_a_fresh_run(client: Any) -> None:
    text = shown(poll(client, make_run(client, algorithm={"name": "ppo"})), height=24)
    assert "queued" in text and "too stale" in text and "replay" not in text, "PPO has no replay"
    assert "waiting for a learner: start `ddrl learner`" in text and "no episode has ended yet" in text
    assert len(text.splitlines()) <= 24


def test_plain_lines_and_the_view_of_several_runs_name_each_seed(client: Any) -> None:
    first, second = make_run(client, seed=5), make_run(client, seed=6)
    add_history(client, first)
    end(client, first, "solved", "return 200 confirmed")
    figures, file = [poll(client, run) for run in (first, second)], io.StringIO()
    lines = live.Lines(file, show_seed=True)
    for _ in range(3):
        lines.show(figures)
    one, two = file.getvalue().splitlines()
    assert one.startswith("seed 5  30s  solved: return 200 confirmed  env_steps 30000")
    assert two.startswith("seed 6  -  waiting for a learner")
    text = text_of(view.several_runs(figures, width=78), 80)
    names = ("sac, 2 seeds", f"{first} and 1 more")
    for words in ("30,000", "205.0 v31", "seed 6: waiting for a learner", *names):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 78


def test_the_curve_goes_where_the_returns_go() -> None:
    rising = [(float(t), float(t)) for t in range(100)]
    lines = curve.draw(rising, [], width=60, height=10).plain.splitlines()
    assert len(lines) == 10
    inked = [[c for c, mark in enumerate(line[8:]) if "⠁" <= mark <= "⣿"] for line in lines[:-1]]
    assert min(inked[0] or [99]) > max(inked[-1] or [0])
    flat = curve.draw([(1.0, 5.0), (2.0, 5.0)], [(2.0, 5.0, True)], width=40, height=6, target=5.0)
    assert "◆" in flat.plain and "╌" in flat.plain
    wide = curve.draw([(1.0, -2e6), (2.0, 2e12)], [], width=60, height=6).plain
    assert wide.startswith(" 1.0e12│")


# --- hints -------------------------------------------------------------------------------------------


def test_hints_say_what_is_missing(client: Any) -> None:
    run = make_run(client)
    take(client, run)
    missing = f"no worker plays {QUEUE}: start `celery -A ddrl worker`"
    assert poll(client, run).hint == missing
    beat(client, "ddrl.rollout", "ddrl.rollout.atari", capabilities=("atari",))
    beat(client, "ddrl.evaluate", "ddrl.evaluate.box2d", host="judge", capabilities=("box2d",))
    there = "there: here lacks box2d (pip install 'ddrl[box2d]' there), judge only evaluates"
    assert poll(client, run).hint == f"{missing}; {there}"
    beat(client, QUEUE)
    assert poll(client, run).hint == "waiting for the first steps"
    assert poll(client, run, starting_s=9).hint == "starting"
    runs.set_status(client, run, "paused", "paused by the operator")
    assert f"`ddrl resume {run}`" in poll(client, run).hint


def test_a_run_that_waits_for_a_learner_names_its_device(client: Any) -> None:
    run = make_run(client, learner={"device": "cuda"})
    assert poll(client, run).hint == "waiting for a learner that has cuda: start `ddrl learner`"


def test_who_submits_with_the_embedded_server_is_not_told_to_start_a_learner_at_once(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(client)
    monkeypatch.delenv(connection.URL_VARIABLE)
    assert poll(client, run).hint == "starting"
    client.hset(keys.state(run), "created_ms", 1)
    assert poll(client, run).hint == "waiting for a learner: start `ddrl learner`"


def test_hints_name_refusals_crashes_and_quarantine(client: Any) -> None:
    run = make_run(client)
    take(client, run)
    beat(client, QUEUE)
    follower = Watcher(client, run)
    refusal = "ale-py 0.9 is not the 0.10 of the submitter; pip install ale-py==0.10"
    segments.note_refusal(client, run, "far", refusal)
    for _ in range(2):
        segments.note_crash(client, run, "Signal 11 in my_env")
    process = note_playing(client, run, node="ddrl-1@here", pid=1)
    segments.note_lost(client, run, [process], "ddrl-1@here is gone")
    for event in ("lost fragments", "lost"):  # `lost` in journals of earlier versions
        runs.note(client, run, event, "1 fragment of producer 2 before number 3 left the stream unread")
    figures = follower.poll()
    assert figures.hint == f"far: {refusal}"
    crashed, lost = "a process could not play it", "lost a process that played it"
    notices = [notice.partition(":")[0] for notice in figures.notices]
    assert notices == ["refused", crashed, lost, "lost fragments"], "each once"
    assert "crashed" in shown(figures) and "2 processes, 1 lost" in shown(figures)
    client.hset(keys.refusals(run), mapping={f"machine-{number}": refusal for number in range(3_000)})
    lines = [line for line in call("status").splitlines() if "cannot play" in line]
    assert len(lines) == 21 and lines[-1].split(maxsplit=2)[2] == "2,981 more machines; all with --json"
    client.delete(keys.refusals(run))
    again = poll(client, run)
    assert again.hint == "workers cannot play it (2 times since the last fragment): Signal 11 in my_env"
    append(client, run, 0)
    assert poll(client, run).hint == "", "it plays again"
    reason = "quarantined: 5 processes ended without a fragment: Signal 11; mend it and `ddrl resume x`"
    runs.set_status(client, run, "paused", reason)
    assert poll(client, run).hint == reason


def test_shares_and_waits_are_those_of_the_last_minute(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddrl.cli.watcher.FLEET_S", 0.0)
    light, heavy = make_run(client), make_run(client, weight=3.0)
    for run in (light, heavy):
        want_processes(client, run)
        append(client, run, 0, process_ms=50_000)
    beat(client, QUEUE)
    followers = [Watcher(client, run) for run in (light, heavy)]
    assert [follower.poll().recent.share for follower in followers] == [None, None]
    append(client, light, 1, process_ms=1_000, allowance_wait_ms=250, room_wait_ms=100)
    append(client, heavy, 1, process_ms=3_000)
    one, three = (follower.poll() for follower in followers)
    assert (one.recent.share, entitled(one.state, one.loads)) == (0.25, 0.25)
    assert (three.recent.share, entitled(three.state, three.loads)) == (0.75, 0.75)
    assert (one.recent.allowance_wait, one.recent.room_wait) == (0.25, 0.1) and three.recent.room_wait == 0.0
    assert one.hint == "the stream is full (512.0 MB): play waits for the learner; raise replay.max_bytes"
    assert "share 25%  10% of the time waiting for room" in live.plain_line(one)
    assert "waiting" not in live.plain_line(three)
    assert "25 % of 25 %, normal" in shown(one) and "25 %, 10 % for room" in shown(one)


def test_a_full_server_is_a_hint(client: Any) -> None:
    run = make_run(client)
    client.config_set("maxmemory", "1")
    try:
        text = poll(client, run).hint
    finally:
        client.config_set("maxmemory", "0")
    assert text.startswith("the server is full (") and "ddrl prune" in text


def test_a_server_whose_disk_is_full_can_be_looked_at(make_server, monkeypatch: pytest.MonkeyPatch) -> None:
    private = make_server("--appendonly", "yes")
    monkeypatch.setenv(connection.URL_VARIABLE, private.url)
    run = make_run(private.client)
    with private.full_disk():
        with contextlib.suppress(redis.RedisError):
            private.client.set("large", bytes(10**6))
        until(lambda: not private.is_writable())
        assert run in call("runs")
        assert "the server cannot write to its disk: all wait; free space there" in " ".join(
            call("status").split()
        )
        assert "the server cannot write to its disk; make room there" in refused("pause", run, code=3)


@pytest.mark.parametrize(
    ("queue", "queues", "capabilities", "words"),
    [
        ("ddrl.rollout.atari", ("ddrl.rollout",), (), "lacks atari (pip install 'ddrl[atari]' there)"),
        ("ddrl.rollout.mine", ("ddrl.rollout",), (), "does not allow mine (DDRL_ALLOW_MODULES=mine there"),
        ("ddrl.evaluate", ("ddrl.rollout",), (), "only plays"),
        ("ddrl.rollout", ("ddrl.rollout.box2d",), ("box2d",), "does not serve that queue"),
        ("ddrl.rollout", ("ddrl.rollout",), (), ""),
    ],
)
def test_why_a_worker_does_not_fit(queue: str, queues: Any, capabilities: Any, words: str) -> None:
    worker = workers.Heartbeat("n", "h", 1, 2, queues, {}, capabilities=capabilities)
    assert hints.misfit(worker, queue).startswith(words) if words else hints.misfit(worker, queue) == ""
