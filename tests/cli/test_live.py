"""Following a run: plain lines, the live view, and hints."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console
from support.fleet import note_playing
from support.runs import add_history, make_run

from ddrl.cli import curve, hints, live, view, watcher
from ddrl.store import leases as lease
from ddrl.store import runs, segments, stream, weights, workers

QUEUE = "ddrl.rollout.box2d"


def beat(client: Any, *queues: str, host: str = "here", **more: Any) -> None:
    node = f"ddrl-1@{host}"
    workers.beat(client, workers.Heartbeat(node, host, 1, 3, queues, {}, **more))


def shown(figures: watcher.Figures, width: int = 80, height: int = 40) -> str:
    """Return the live view as text."""
    console = Console(record=True, force_terminal=True, width=width, height=height, file=io.StringIO())
    console.print(view.one_run(figures, width=width, height=height))
    return console.export_text()


def test_plain_line_has_the_figures(server: Any) -> None:
    run = make_run(server.client)
    add_history(server.client, run)
    beat(server.client, QUEUE)
    line = live.plain_line(watcher.Watcher(server.client, run).poll())
    assert "env_steps 30000 (2930/s)  updates 7600 (310/s)  return 143.2  eval " in line
    assert line.startswith("30s  ") and line.endswith("@v31  staleness 0.8")


def test_hints_say_what_is_missing(server: Any) -> None:
    client, run = server.client, make_run(server.client)
    assert "waiting for a learner: start `ddrl learner`" in watcher.Watcher(client, run).poll().hint
    token = lease.acquire(client, run, host="here", folder="")
    missing = f"no worker plays {QUEUE}: start `celery -A ddrl worker`"
    assert watcher.Watcher(client, run).poll().hint == missing
    beat(client, "ddrl.rollout", "ddrl.rollout.atari", capabilities=("atari",))
    beat(client, "ddrl.evaluate", "ddrl.evaluate.box2d", host="judge", capabilities=("box2d",))
    beat(client, QUEUE, host="old", draining=True)
    there = "there: here lacks box2d (pip install 'ddrl[box2d]' there), judge only evaluates"
    workers.leave(client, workers.Heartbeat("ddrl-1@old", "old", 1, 3, (), {}))
    assert watcher.Watcher(client, run).poll().hint == f"{missing}; {there}"
    beat(client, QUEUE)
    assert watcher.Watcher(client, run).poll().hint == "waiting for the first steps"
    segments.note_crash(client, run, "EnvError: no such thing")
    assert "EnvError: no such thing" in watcher.Watcher(client, run).poll().hint
    assert watcher.Watcher(client, run, starting_s=9).poll().hint == "starting"
    lease.release(client, run, token or 0)
    runs.set_status(client, run, "paused", "paused by the operator")
    assert f"`ddrl resume {run}`" in watcher.Watcher(client, run).poll().hint


def test_follow_prints_lines_until_the_end(server: Any) -> None:
    client, run = server.client, make_run(server.client)
    add_history(client, run)
    ticks = []

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 4:
            runs.set_status(client, run, "solved", "return 200 confirmed")

    console = Console(file=io.StringIO(), force_terminal=False)
    (state,) = live.follow(client, [run], json_output=False, console=console, on_tick=tick)
    assert state.status == "solved" and len(ticks) >= 4
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2 and "solved: return 200 confirmed" in lines[1] and "/s)" not in lines[1]


def test_with_json_stdout_stays_empty(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(server.client)
    runs.set_status(server.client, run, "stopped", "stopped by the operator")
    assert live.follow(server.client, [run], json_output=True)[0].ended
    printed = capsys.readouterr()
    assert printed.out == "" and "stopped by the operator" in printed.err


def test_a_deadline_ends_following_and_errors_of_the_tick_pass(server: Any) -> None:
    client, run = server.client, make_run(server.client)
    assert live.follow(client, [run], json_output=True, deadline=time.monotonic())[0].status == "active"

    def fail() -> None:
        raise RuntimeError("a child died")

    with pytest.raises(RuntimeError, match="a child died"):
        live.follow(client, [run], json_output=True, on_tick=fail)


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_shows_everything(server: Any, width: int) -> None:
    run = make_run(server.client)
    add_history(server.client, run)
    beat(server.client, QUEUE)
    for pid in (7, 8):
        note_playing(server.client, run, node="ddrl-1@here", pid=pid)
    text = shown(watcher.Watcher(server.client, run).poll(), width)
    for words in (
        *(run, "active", "30s, 14m", "30,000 (2930/s)", "7,600 (310/s)", "143.2", "31.9 of 32"),
        *("0.8 versions", "1 (2 of 3 processes)", "12 %", "critic_loss", "evaluation v31", "20 episodes"),
        *("confirmation v31", "target 200", "LunarLanderContinuous-v3, sac, seed 1", "◆"),
    ):
        assert words in text, words
    assert "…" not in text
    assert any("⠁" <= character <= "⣿" for character in text)
    assert max(map(len, text.splitlines())) <= width


def test_the_view_of_a_fresh_run(server: Any) -> None:
    text = shown(watcher.Watcher(server.client, make_run(server.client)).poll(), height=24)
    assert "waiting for a learner: start `ddrl learner`" in text and "no episode has ended yet" in text
    assert len(text.splitlines()) <= 24


def test_the_curve_goes_where_the_returns_go() -> None:
    rising = curve.draw(
        [(float(t), float(t)) for t in range(100)], [], width=60, height=10
    ).plain.splitlines()
    assert len(rising) == 10
    inked = [[c for c, mark in enumerate(line[8:]) if "⠁" <= mark <= "⣿"] for line in rising[:-1]]
    assert min(inked[0] or [99]) > max(inked[-1] or [0])
    flat = curve.draw([(1.0, 5.0), (2.0, 5.0)], [(2.0, 5.0, True)], width=40, height=6, target=5.0)
    assert "◆" in flat.plain and "╌" in flat.plain


def test_closing_lines_say_how_to_go_on() -> None:
    summary: dict[str, Any] = {
        "run": "x-1",
        "status": "time",
        "train_s": 61.0,
        "env_steps": 1000,
        "updates": 10,
    }
    summary |= {"policy_version": 3, "artifacts": "/a/x-1", "evaluation": None}
    text = live.closing_lines(summary)
    assert "x-1: time after 1m01s" in text and "`ddrl resume x-1 --time 10m`" in text and "/a/x-1" in text
    summary["evaluation"] = {"return_mean": 9.0, "return_std": 1.0, "episodes": 20}
    assert "return 9.0 ± 1.0 over 20 episodes" in live.closing_lines({**summary, "status": "solved"})


def test_the_last_view_stays_on_the_terminal(server: Any) -> None:
    client, run = server.client, make_run(server.client)
    add_history(client, run)
    runs.set_status(client, run, "solved", "return 200 confirmed")
    console = Console(force_terminal=True, width=100, height=40, file=io.StringIO())
    assert live.follow(client, [run], json_output=False, console=console)[0].status == "solved"
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "solved" in shown and "return 200 confirmed" in shown and "30,000" in shown


def play(client: Any, run: str, seq: int, **times: int) -> None:
    """Append a fragment of one producer."""
    ids = {"producer": 1, "incarnation": 7, "seq": seq}
    stream.append(client, run, {b"h": b"{}"}, num_transitions=100, host="here", **ids, **times)


def test_hints_name_refusals_crashes_and_quarantine(server: Any) -> None:
    client, run = server.client, make_run(server.client)
    lease.acquire(client, run, host="here", folder="")
    beat(client, QUEUE)
    follower = watcher.Watcher(client, run)
    segments.note_refusal(
        client, run, "far", "ale-py 0.9 is not the 0.10 of the submitter; pip install ale-py==0.10"
    )
    segments.note_crash(client, run, "Signal 11 in my_env")
    segments.note_crash(client, run, "Signal 11 in my_env")
    process = note_playing(client, run, node="ddrl-1@here", pid=1)
    segments.note_lost(client, run, process, "ddrl-1@here is gone")
    figures = follower.poll()
    assert figures.hint.startswith("far: ale-py 0.9 is not") and "pip install ale-py==0.10" in figures.hint
    assert [notice.partition(":")[0] for notice in figures.notices] == [
        "refused",
        "a process could not play it",
        "lost a process that played it",
    ], "each once"
    assert "crashed" in shown(figures) and "2 processes, 1 lost" in shown(figures)
    client.delete(f"ddrl:{{{run}}}:refusals")
    again = watcher.Watcher(client, run).poll()
    assert again.hint == "workers cannot play it (2 times since the last fragment): Signal 11 in my_env"
    play(client, run, 0)
    assert watcher.Watcher(client, run).poll().hint == "", "it plays again"
    reason = "quarantined: 5 processes ended without a fragment: Signal 11; mend it and `ddrl resume x`"
    runs.set_status(client, run, "paused", reason)
    assert watcher.Watcher(client, run).poll().hint == reason
    assert "crashes_total" not in shown(again)


def test_shares_and_waits_are_those_of_the_last_minute(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "FLEET_S", 0.0)
    client = server.client
    light, heavy = make_run(client), make_run(client, weight=3.0)
    for run in (light, heavy):
        token = lease.acquire(client, run, host="here", folder="")
        weights.publish(client, run, token, version=0, blob=b"w", allowance=10**6, updates=0)
        play(client, run, 0, process_ms=50_000)
    beat(client, QUEUE)
    followers = [watcher.Watcher(client, run) for run in (light, heavy)]
    assert [follower.poll().recent.share for follower in followers] == [None, None]
    play(client, light, 1, process_ms=1_000, allowance_wait_ms=250, room_wait_ms=100)
    play(client, heavy, 1, process_ms=3_000)
    one, three = (follower.poll() for follower in followers)
    assert (one.recent.share, one.entitled) == (0.25, 0.25)
    assert (three.recent.share, three.entitled) == (0.75, 0.75)
    assert (one.recent.allowance_wait, one.recent.room_wait) == (0.25, 0.1) and three.recent.room_wait == 0.0
    assert one.hint == "the stream is full (512.0 MB): play waits for the learner; raise replay.max_bytes"
    assert "share 25%  waits 10% for room" in live.plain_line(one) and "waits" not in live.plain_line(three)
    assert "25 % of 25 %, normal" in shown(one) and "25 %, 10 % for room" in shown(one)


def test_a_full_server_is_a_hint(make_server: Any) -> None:
    client = make_server("--maxmemory", "100mb").client
    run = make_run(client)
    assert "waiting for a learner" in watcher.Watcher(client, run).poll().hint
    client.config_set("maxmemory", "1")
    text = watcher.Watcher(client, run).poll().hint
    assert text.startswith("the server is full (") and "ddrl prune" in text


def test_notices_are_printed_once(server: Any) -> None:
    client, run = server.client, make_run(server.client)
    follower, file = watcher.Watcher(client, run), io.StringIO()
    lines = live.Lines(file)
    for value in (1, 2, 2):
        changed = runs.config(client, run).model_copy(update={"weight": float(value)})
        version = runs.config_version(client, run)
        runs.change(client, run, changed, {"weight": (1.0, value)}, version=version)
        lines.show([follower.poll()])
    assert follower.poll().config.weight == 2.0
    printed = file.getvalue().splitlines()
    assert [line.split("  ")[1] for line in printed if "set" in line] == [
        "set weight: 1.0 -> 1",
        "set weight: 1.0 -> 2",
    ]


@pytest.mark.parametrize(
    ("queue", "queues", "capabilities", "words"),
    [
        ("ddrl.rollout.atari", ("ddrl.rollout",), (), "lacks atari (pip install 'ddrl[atari]' there)"),
        ("ddrl.rollout.mine", ("ddrl.rollout",), (), "does not allow mine (DDRL_ALLOW_MODULES=mine there"),
        ("ddrl.rollout.atari", ("ddrl.evaluate.atari",), ("atari",), "only evaluates"),
        ("ddrl.evaluate", ("ddrl.rollout",), (), "only plays"),
        ("ddrl.rollout", ("ddrl.rollout.box2d",), ("box2d",), "does not serve that queue"),
        ("ddrl.rollout", ("ddrl.rollout",), (), ""),
    ],
)
def test_why_a_worker_does_not_fit(queue: str, queues: Any, capabilities: Any, words: str) -> None:
    worker = workers.Heartbeat("n", "h", 1, 2, queues, {}, capabilities=capabilities)
    assert hints.misfit(worker, queue).startswith(words) if words else hints.misfit(worker, queue) == ""
