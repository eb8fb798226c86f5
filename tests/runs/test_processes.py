"""The processes that a command starts: restarts, when they are given up, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from support.private_server import until
from support.processes import ROOT, is_alive
from support.store import make_run

from ddrl.runs import processes as local
from ddrl.runs.processes import ProcessError
from ddrl.store import leases, runs

Script = Callable[[str], None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replaces `python -m ddrl` by a script, as the current folder comes first on the path; two restarts at most."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "PAUSES_S", (0.0,))
    monkeypatch.setattr(local, "MAX_RESTARTS", 2)
    (tmp_path / "ddrl").mkdir()
    (tmp_path / "ddrl" / "__init__.py").touch()
    head = "import os, signal, subprocess, sys, time\nopen('starts', 'a').write(f'{os.getpid()}\\n')\n"

    def write(body: str) -> None:
        (tmp_path / "ddrl" / "__main__.py").write_text(head + textwrap.dedent(body))

    return write


@pytest.fixture
def children(tmp_path: Path) -> Iterator[local.Processes]:
    with local.Processes(tmp_path / "logs") as children:
        yield children
        children.kill()


def starts() -> list[int]:
    """Return the process ids of all starts of the script."""
    file = Path("starts")
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_learner_that_has_finished_is_not_restarted(script: Script, children: local.Processes) -> None:
    script("")
    children.start_learner("x-1", Path("logs"))
    children.wait_for_learners(60)
    for _ in range(3):
        children.check()
    assert len(starts()) == 1 and Path("logs", "learner.log").exists()


def test_learners_know_their_rank_among_those_of_this_machine_after_a_restart_too(
    script: Script, children: local.Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_RESTARTS", 1000)
    script("open('ranks', 'a').write(os.environ['LOCAL_RANK'] + '\\n'); sys.exit(3)")
    for run in ("x-1", "x-2"):
        children.start_learner(run, Path("logs"))

    def is_restarted() -> bool:
        children.check()
        ranks = Path("ranks").read_text() if Path("ranks").exists() else ""
        return min(ranks.count("0"), ranks.count("1")) > 1

    until(is_restarted, 60)
    assert set(Path("ranks").read_text()) == {"0", "1", "\n"}


@pytest.mark.parametrize(
    ("role", "code", "num_starts"), [("learner", 2, 1), ("learner", 3, 3), ("workers", 3, 3)]
)
def test_a_process_that_keeps_dying_is_given_up_with_its_last_line(
    script: Script, children: local.Processes, role: str, code: int, num_starts: int
) -> None:
    """A learner that ends with code 2 refuses its run."""
    script(f"print('ddrl: error: no such option', file=sys.stderr); sys.exit({code})")
    if role == "learner":
        children.start_learner("x-1", Path("logs"))
    else:
        children.start_workers(1)
    last_line = rf" ended with code {code}: no such option \(see "
    with pytest.raises(ProcessError, match=last_line) as error:
        until(lambda: children.check(), 60)
    assert error.value.run == ("x-1" if role == "learner" else None)
    if role == "learner":
        children.check()  # it is reported once, and the others continue
        assert len(starts()) == num_starts
    assert len(starts()) >= num_starts


def test_workers_that_end_with_code_0_are_always_restarted(script: Script, children: local.Processes) -> None:
    """As while the server is full."""
    script("if len(open('starts').read().splitlines()) >= 9:\n    time.sleep(600)")
    children.start_workers(1)

    def all_up() -> bool:
        children.check()
        return len(starts()) >= 10

    until(all_up, 120)
    assert sorted(path.name for path in Path("logs").iterdir()) == ["evaluation.log", "rollout.log"]


CHILD = "child = subprocess.Popen(['sleep', '600']); open('child', 'w').write(str(child.pid))\n"
POLITE = "signal.signal(15, lambda *_: (open('asked', 'w').close(), child.kill(), sys.exit(0)))\n"
STUBBORN = "signal.signal(15, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("handler", "error"), [(POLITE, None), (STUBBORN, KeyboardInterrupt)], ids=["stop", "kill"]
)
def test_leaving_stops_all_and_an_interrupt_kills_all(
    script: Script, tmp_path: Path, handler: str, error: type[BaseException] | None
) -> None:
    script(CHILD + handler + "open('up', 'w'); time.sleep(600)")
    begun = 0.0
    try:
        with local.Processes(tmp_path / "logs") as children:
            children.start_learner("x-1", tmp_path / "logs")
            until(Path("up").exists, 60)
            begun = time.monotonic()
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    assert time.monotonic() - begun < local.STOP_S
    for pid in (*starts(), int(Path("child").read_text())):
        until(lambda pid=pid: not is_alive(pid))
    assert Path("asked").exists() == (error is None)


def test_a_child_ends_with_its_parent() -> None:
    reader, writer = os.pipe()
    code = "import signal, time; from ddrl.runs.processes import follow_parent; follow_parent(signal.SIGTERM)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('up', flush=True); time.sleep(600)"],
        env={**os.environ, "PYTHONPATH": str(ROOT), local.PARENT_VARIABLE: str(reader)},
        pass_fds=[reader],
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        os.close(writer)  # as the kernel does when the parent ends
        assert child.wait(20) == -signal.SIGTERM
    os.close(reader)


def test_pipes_are_closed_on_leaving(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with local.Processes(tmp_path):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_run_goes_on_while_one_of_its_learners_does(client: Redis, script: Script, children) -> None:
    run, reports = make_run(client), list[str]()
    script("""
        if os.environ["LOCAL_RANK"] == "0":
            sys.exit(2)
        time.sleep(600)
    """)
    for number in (1, 2):
        children.start_learner(run, Path("logs"), number)
    until(lambda: (local.keep_running(client, children, [run], reports.append), reports)[1])
    assert "learner ended with code 2" in reports[0] and runs.status(client, run) == "active"
    assert children.learns(run) and not children.learns("other")


def test_a_run_whose_learner_keeps_dying_fails_unless_held(client: Redis, script: Script, children) -> None:
    lost, held = make_run(client), make_run(client)
    assert leases.acquire(client, held, host="test", folder="/tmp", ttl_ms=60_000) is not None
    assert leases.acquire(client, lost, host="test", folder="/tmp") is not None  # of the one that dies
    script("sys.exit(2)")
    reports: list[str] = []
    local.start(client, children, [lost, held], workers=0, with_learner=True)
    children.wait_for_learners(60)
    for _ in range(2):
        local.keep_running(client, children, [lost, held], reports.append)
    assert [runs.status(client, run) for run in (lost, held)] == ["failed", "active"]
    assert "learner ended with code 2" in json.loads(Path("runs", lost, "summary.json").read_text())["reason"]
    assert [report.partition(":")[0] for report in reports] == [lost, held]
    assert local.any_active(client, [lost, held]) and not local.any_active(client, [lost])
