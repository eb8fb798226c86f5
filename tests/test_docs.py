"""Commands in the documentation: all are understood, those in blocks run, those of the tutorial as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.processes import SLOW_S, Processes
from typer._click.exceptions import UsageError

from ddrl.cli import COMMANDS, app
from ddrl.store import runs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "workers" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text("utf-8")
# What does not end (a learner of whatever waits, a view, the page, a recording), or needs replicas, a recording or a
# run in lockstep: other tests run these.
ELSEWHERE = re.compile(r"learner$|watch$|.* --watch|web|record|rerun|.* (durability=replica|--from-data)")


def blocks(text: str, language: str = "") -> list[str]:
    """The fenced blocks of a page, of one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for kind, block in found if kind == language]


def shell_lines(block: str) -> list[str]:
    """What a shell gets of a block, with its variables put in; where lines have prompts, the others are output."""
    values = dict(re.findall(r'^(\w+)="(.*?)"', block, re.MULTILINE | re.DOTALL))
    block = re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), block).replace("\\\n", " ")
    lines = block.splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")] or lines


def commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words of each ddrl command, and whether it is whole: in a block. A sentence may name a command only."""
    whole = [line for block in blocks(text) for line in shell_lines(block)]
    named = [part for line in text.splitlines() for part in line.split("`")[1::2]]
    for line in (*whole, *named):
        for part in re.split(r"[;&|]", re.sub(r"\s#.*| \[.*?\]|\.\.\.|\$\w+", "", line)):
            if found := re.fullmatch(r"\s*(?:(?:exec|\w+=\S+) +)*ddrl +([a-z].*?)\s*", part):
                yield shlex.split(re.sub(r"\b[A-Z]\b", "1", found[1])), line in whole


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_understood(page: Path) -> None:
    group = typer.main.get_command(app)
    for words, is_whole in commands(page.read_text("utf-8")):
        assert words[0] in COMMANDS, words
        _, command, rest = group.resolve_command(typer.Context(group), words)  # type: ignore[attr-defined]
        # It refuses options and values that it does not know.
        command.make_context(words[0], rest, resilient_parsing=not is_whole)


def test_these_checks_can_fail() -> None:
    found = list(commands("```\nA=b ddrl submit x --seed 3   # some\n```\nand `ddrl status`, `ddrl --help`"))
    assert found == [(["submit", "x", "--seed", "3"], True), (["status"], False)]
    found = list(
        commands('```\n$ ddrl logs last\nddrl says it\n```\n```\na="-s b=1 \\\n-s c"\nddrl submit x $a\n```')
    )
    assert found == [(["logs", "last"], True), (["submit", "x", "-s", "b=1", "-s", "c"], True)]
    assert len([words for page in PAGES for words in commands(page.read_text("utf-8"))]) > 100
    group = typer.main.get_command(app)
    with pytest.raises(UsageError):
        group.resolve_command(typer.Context(group), ["status"])[1].make_context("status", ["--nope"])  # type: ignore[attr-defined]


def shell(processes: Processes, url: str | None, line: str, time: str = "8s") -> str:
    """Run a line of a page that must succeed; runs are ended early, their evaluations short."""
    if "ddrl submit" in line or "--shadow" in line:
        line = re.sub(r"--time \S+", "", line) + f" -s stop.time={time}"
        line += " -s evaluation.max_steps=200 -s evaluation.confirm_episodes=0"
    environment = processes.environment(url) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] += f":{processes.folder}"
    environment["MINARI_DATASETS_PATH"] = str(processes.folder)
    done = subprocess.run(
        ["sh", "-ec", line],
        cwd=processes.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SLOW_S,
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def lines_of(part: int) -> list[str]:
    """The shell lines of a part of the tutorial."""
    text = TUTORIAL.split("\n## ")[part]
    return [line for block in blocks(text) for line in block.splitlines() if line.strip()]


@pytest.mark.long
def test_part_one_runs_as_it_stands(home: Path, processes: Processes) -> None:
    install, *lines = lines_of(1)
    assert install.startswith("make setup EXTRAS=")
    for line in lines:
        if line == "ddrl web":
            look_at_the_page(processes)
        else:
            shell(processes, None, line)
    assert (processes.folder / "cartpole.safetensors").exists()
    assert len(list((processes.folder / "runs").iterdir())) == 2


def look_at_the_page(processes: Processes) -> None:
    page = processes.start("web", None, "-m", "ddrl", "web")
    processes.until(lambda: "http://" in page.text())
    address = re.findall(r"http://\S+", page.text())[0]
    with urllib.request.urlopen(address) as reply:
        assert "cartpole" in reply.read().decode()
    page.terminate()


@pytest.mark.long
def test_part_two_runs_as_it_stands(server, processes: Processes) -> None:
    export, *lines = lines_of(2)
    assert export.startswith("export DDRL_REDIS_URL=") and "`ddrl learner`" in TUTORIAL
    assert "`celery -A ddrl worker`" in TUTORIAL
    processes.learner(server.url), processes.celery(server.url)
    printed = [shell(processes, server.url, line) for line in lines]
    [run] = runs.names(server.client)
    assert runs.state(server.client, run).outcome in ("time", "solved") and run in printed[-1] + printed[-2]


@pytest.mark.long
def test_part_three_runs_as_it_stands(home: Path, processes: Processes) -> None:
    for language in ("python", "yaml"):
        [block] = blocks(TUTORIAL, language)
        path = processes.folder / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    [line] = lines_of(3)
    assert "solved" in shell(processes, None, line.replace("-s stop.time=8s", ""))


def run_here(page: Path) -> list[str]:
    """The commands in the blocks of a page that the test below runs."""
    lines = [shlex.join(words) for words, is_whole in commands(page.read_text("utf-8")) if is_whole]
    return [line for line in lines if page.stem != "tutorial" and not ELSEWHERE.match(line)]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [*filter(run_here, PAGES)], ids=lambda page: page.stem)
def test_commands_of_other_pages_run(page: Path, home: Path, processes: Processes) -> None:
    [study] = [block for block in blocks(GUIDE, "yaml") if "search:" in block]
    study = study.replace("trials: 16", "trials: 2").replace("stop.time: 3m", "stop.time: 5s")
    (processes.folder / "study.yaml").write_text(study)

    def listed(command: str) -> list[dict[str, Any]]:
        return json.loads(shell(processes, None, f"ddrl {command} --json"))

    submit = "ddrl submit lunar --detach --json -s stop.return=null -s weights.keep_every=5"
    run = json.loads(shell(processes, None, submit, "1h"))["run"]
    try:
        processes.until(lambda: listed(f"episodes {run}") and len(listed(f"versions {run}")) > 2)
        shell(processes, None, f"ddrl pause {run}")
        here = {  # what a page names -> what there is
            r"(?<=^compare RUN )RUN|\bconnect-four-[\w-]+": "last",
            r"\bRUN\b|\b[a-z]+(?:-[a-z]+)*-\d{4}-\d{6}-s\d-\w{4}\b|(?<=^set )last|(?<=--from )last": run,
            r"(?<=@)\d+": str(listed(f"versions {run}")[0]["version"]),
            r"(?<=/)\d+-\d+-\d+-\d+": listed(f"episodes {run}")[-1]["episode"],
            r"(?<=^submit )configs": str(ROOT / "configs"),
            r"(?<=--episodes )\d+": "3",
        }
        for line in run_here(page):
            for named, there in here.items():
                line = re.sub(named, there, line)
            shell(processes, None, f"ddrl {line}")
    finally:
        for row in listed("runs"):
            if row["status"] in ("active", "paused"):
                shell(processes, None, f"ddrl stop {row['run']} || true")  # one may just have ended
