"""The heading of every benchmark (commit, machine, versions), and the processes that benchmarks share."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "lunar.yaml"


def heading(title: str) -> str:
    """Return the title and the facts as Markdown."""
    return f"# {title}\n{facts()}"


def facts() -> str:
    """Return commit, machine and versions in one line."""
    import numpy
    import torch

    commit = _output("git", "rev-parse", "--short", "HEAD") or "no commit"
    results = (":!benchmarks/results", ":!docs/*.png")  # output of benchmarks is no change of the program
    if _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", *results):
        commit += " with changes"
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return (
        f"commit {commit}; {os.cpu_count()} cores, {cpu}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {numpy.__version__}"
    )


@contextmanager
def fresh_home() -> Iterator[dict[str, str]]:
    """Yield environment variables under which the embedded server, its data and the runs are new and temporary."""
    with tempfile.TemporaryDirectory(prefix="ddrl-bench-") as folder:
        for name in ("state", "run", "work"):
            Path(folder, name).mkdir(mode=0o700)
        yield {
            **{name: value for name, value in os.environ.items() if name != "DDRL_REDIS_URL"},
            "XDG_STATE_HOME": str(Path(folder, "state")),
            "XDG_RUNTIME_DIR": str(Path(folder, "run")),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "DDRL_BENCH_FOLDER": str(Path(folder, "work")),
        }


@contextmanager
def child(
    arguments: list[str], environment: dict[str, str], core: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a `python -m ...` process while the context lasts, on one core if given."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=environment["DDRL_BENCH_FOLDER"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=(lambda: os.sched_setaffinity(0, {core})) if core is not None else None,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def server() -> Iterator[str]:
    """Run a private server without persistence while the context lasts; yield its URL."""
    from ddrl.store.server import server_binary

    with tempfile.TemporaryDirectory(prefix="ddrl-bench-") as folder:
        socket = Path(folder, "s")
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        process = subprocess.Popen([server_binary(), *options], stdout=subprocess.DEVNULL)
        try:
            while not socket.exists():
                time.sleep(0.02)
            yield f"unix://{socket}"
        finally:
            process.terminate()
            process.wait()


def figure(code: str, *arguments: object, environment: dict[str, str], core: int) -> float:
    """Return the number that a Python program prints, run by itself on one core."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return float(done.stdout)


def cores() -> tuple[int, int]:
    """Return two cores for learner and players; twice the same one if there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[min(1, len(usable) - 1)]


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
