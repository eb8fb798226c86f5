"""The processes that a command brings along: restarts, what is given up, and their end in order or at once."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.private_server import wait_until

from ddrl.runs import crew
from ddrl.runs.crew import Crew, CrewError

Script = Callable[[str], None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes `python -m ddrl` a script of the test's, for the current folder comes first on the path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddrl").mkdir()
    (tmp_path / "ddrl" / "__init__.py").touch()

    def write(body: str) -> None:
        text = "import os, signal, subprocess, sys, time\n" + textwrap.dedent(body)
        (tmp_path / "ddrl" / "__main__.py").write_text(text)

    return write


@pytest.fixture
def brought(tmp_path: Path) -> Iterator[Crew]:
    brought = Crew(tmp_path / "logs")
    yield brought
    brought.kill()


def starts(folder: Path) -> int:
    """How often the script has begun: it says so in a file."""
    file = folder / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


STARTED = "open('starts', 'a').write(f'{os.getpid()}\\n')\n"


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_learner_that_has_ended_well_stays_ended(script: Script, brought: Crew, tmp_path: Path) -> None:
    script(STARTED)
    brought.start_learner("x-1", tmp_path / "logs")
    brought.wait_for_learners(60)
    for _ in range(3):
        brought.check()
    assert starts(tmp_path) == 1 and (tmp_path / "logs" / "learner.log").exists()


def test_a_learner_that_refuses_its_run_is_given_up_with_its_last_line(
    script: Script, brought: Crew, tmp_path: Path
) -> None:
    script(STARTED + "print('ddrl: error: no such option', file=sys.stderr); sys.exit(2)")
    brought.start_learner("x-1", tmp_path / "logs")
    brought.wait_for_learners(60)
    with pytest.raises(
        CrewError, match=r"learner ended with code 2: ddrl: error: no such option \(see "
    ) as error:
        brought.check()
    assert error.value.run == "x-1"
    brought.check()  # it is not mentioned again, and the others go on
    assert starts(tmp_path) == 1


def test_what_keeps_dying_is_given_up(
    script: Script, brought: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "PAUSES_S", (0.0,))
    script(STARTED + "os.kill(os.getpid(), signal.SIGKILL)")
    brought.start_learner("x-1", tmp_path / "logs")
    with pytest.raises(CrewError, match="code -9: no output"):
        wait_until(lambda: brought.check(), 60)
    assert starts(tmp_path) == 1 + crew.MAX_RESTARTS


def test_workers_come_back_for_as_long_as_the_server_is_full(
    script: Script, brought: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "PAUSES_S", (0.0,))
    monkeypatch.setattr(crew, "MAX_RESTARTS", 2)
    script(
        STARTED
        + """
        if len(open('starts').read().splitlines()) < 12:  # both workers count
            print("redis.exceptions.OutOfMemoryError: command not allowed when used memory > 'maxmemory'.")
            sys.exit(0)
        time.sleep(600)
        """.replace("\n        ", "\n")
    )
    brought.start_workers(1)

    def all_up() -> bool:
        brought.check()
        return starts(tmp_path) >= 13

    wait_until(all_up, 120)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["evaluation.log", "rollout.log"]


def test_workers_that_die_of_something_else_are_given_up(
    script: Script, brought: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "PAUSES_S", (0.0,))
    monkeypatch.setattr(crew, "MAX_RESTARTS", 2)
    script("print('no such module'); sys.exit(1)")
    brought.start_workers(1)
    with pytest.raises(CrewError, match="ended with code 1: no such module") as error:
        wait_until(lambda: brought.check(), 60)
    assert error.value.run is None


CHILD = "child = subprocess.Popen(['sleep', '600']); open('child', 'w').write(str(child.pid))\n"


def test_stop_asks_and_kill_does_not(script: Script, tmp_path: Path) -> None:
    polite = (
        "signal.signal(signal.SIGTERM, lambda *_: (open('asked', 'w').close(), child.kill(), sys.exit(0)))\n"
    )
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    for word, leave in (("polite", Crew.stop), ("stubborn", Crew.kill)):
        (tmp_path / "child").unlink(missing_ok=True)
        script(
            STARTED
            + CHILD
            + (polite if word == "polite" else stubborn)
            + f"open('{word}', 'w'); time.sleep(600)"
        )
        brought = Crew(tmp_path / "logs")
        brought.start_learner("x-1", tmp_path / "logs")
        wait_until((tmp_path / word).exists, 60)
        begun = time.monotonic()
        leave(brought)
        assert time.monotonic() - begun < crew.STOP_S
        for pid in (
            int((tmp_path / "starts").read_text().split()[-1]),
            int((tmp_path / "child").read_text()),
        ):
            wait_until(lambda pid=pid: not is_alive(pid))
    assert (tmp_path / "asked").exists()


def test_leaving_by_an_interrupt_ends_all_at_once(script: Script, tmp_path: Path) -> None:
    script(STARTED + "signal.signal(signal.SIGTERM, signal.SIG_IGN); open('up', 'w'); time.sleep(600)")
    begun = 0.0
    with pytest.raises(KeyboardInterrupt), Crew(tmp_path / "logs") as brought:
        brought.start_learner("x-1", tmp_path / "logs")
        wait_until((tmp_path / "up").exists, 60)
        begun = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - begun < crew.STOP_S
    assert not is_alive(int((tmp_path / "starts").read_text()))


def test_pipes_are_closed_with_the_crew(tmp_path: Path) -> None:
    with Crew(tmp_path):  # the modules that it needs are open by now
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with Crew(tmp_path):
            pass
    assert len(os.listdir("/proc/self/fd")) == before
