"""Cost of monitoring: a run that is monitored, against one that is not; and how fast the page is.

    python benchmarks/monitoring.py flower      # Flower, task events and Prometheus' scrapes
    python benchmarks/monitoring.py page        # `ddrl web` with five viewers of the run
    python benchmarks/monitoring.py live        # the folder and the history of a run that goes on, and MLflow
    python benchmarks/monitoring.py shadow      # a learner of another run that reads the same stream, on the other core
    PYTHONPATH=tests python benchmarks/monitoring.py paint     # time until a browser shows a long run, and many runs

`configs/lunar.yaml` as shipped, without its evaluations: a learner on one core and a rollout process on another,
at the pace of the run. In monitored rounds task events are on, Flower (on the learner's core) follows them, and the
metrics of learner and worker are read every 5 s, as in `workers/prometheus.yml`; or the page (on the learner's core)
streams to its viewers. In the others Flower or the page is stopped, and nothing is sent or read. For `live`, each round
has a learner of its own, with or without the threads that write. Rounds alternate; the
loss of environment steps and of updates is the median over pairs of adjacent rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from machine import CONFIG, child, cores, fresh_home, heading, server

Monitor = Callable[[], AbstractContextManager[None]]

SCRAPE_S = 5.0
SETTLE_S = 1.0
VIEWERS = 5
PAINT = """new Promise((found) => {
  const look = () => {
    const [entry] = performance.getEntriesByName("first-contentful-paint");
    entry ? found(entry.startTime) : setTimeout(look, 10);
  };
  look();
})"""
SILENT = """
import contextlib, sys
from ddrl import trackers
from ddrl.cli import main
from ddrl.runs import artifacts
artifacts.following = trackers.following = lambda *_: contextlib.nullcontext()
sys.exit(main(sys.argv[1:]))
"""
NAMING = """
import json, os, sys, threading, time
from ddrl.cli import main
def name():
    time.sleep(20)  # by then all threads have begun
    with open(os.environ["DDRL_BENCH_THREADS"], "w") as file:
        json.dump({thread.name: thread.native_id for thread in threading.enumerate()}, file)
threading.Thread(target=name, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
WITHOUT_END = [
    "evaluation.every_s=100000",
    "evaluation.near_every_s=100000",
    "stop.return=null",
    "stop.time=null",
]


BOUND_BY_UPDATES = ["replay.samples_per_insert=1000"]  # the learner never waits for play


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for(url: str) -> None:
    """Wait until a server answers there."""
    while not answers(url):
        time.sleep(0.2)


def answers(url: str) -> bool:
    """Return whether a server answers there, if only with a request for a password."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return bool(reply.read())
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


@contextmanager
def flower(environment: dict[str, str], core: int, scraped: list[int], run: str) -> Iterator[Monitor]:
    """Start Flower; yield what lets it, events and scrapes run while a context lasts."""
    from ddrl import celery

    port = free_port()
    arguments = ["-m", "celery", "-A", "ddrl", "flower", "--address=127.0.0.1", f"--port={port}"]
    with child(arguments, {**environment, "FLOWER_BASIC_AUTH": "user:password"}, core) as process:
        wait_for(f"http://127.0.0.1:{port}/metrics")

        @contextmanager
        def monitored() -> Iterator[None]:
            process.send_signal(signal.SIGCONT)
            celery.app.control.enable_events()
            over = threading.Event()

            def scrape() -> None:
                while not over.wait(SCRAPE_S / 2):
                    for each in scraped:
                        assert answers(f"http://127.0.0.1:{each}/metrics")
                    over.wait(SCRAPE_S / 2)

            scraper = threading.Thread(target=scrape)
            scraper.start()
            try:
                yield
            finally:
                over.set()
                scraper.join()
                celery.app.control.disable_events()
                process.send_signal(signal.SIGSTOP)

        process.send_signal(signal.SIGSTOP)
        yield monitored
        process.send_signal(signal.SIGCONT)  # a stopped process does not end


@contextmanager
def page(environment: dict[str, str], core: int, scraped: list[int], run: str) -> Iterator[Monitor]:
    """Start the page; yield what lets VIEWERS follow the run while a context lasts."""
    port, spent = free_port(), [0.0, 0.0]  # seconds of the processor, and of rounds
    with child(["-m", "ddrl", "web", "--port", str(port)], environment, core) as process:
        wait_for(f"http://127.0.0.1:{port}/")

        @contextmanager
        def monitored() -> Iterator[None]:
            over, received = threading.Event(), [0] * VIEWERS

            def follow(number: int) -> None:
                figure = ("env_steps_per_s", "critic_loss")[number % 2]
                url = f"http://127.0.0.1:{port}/runs/{run}/events?figure={figure}"
                with urllib.request.urlopen(url, timeout=30) as stream:
                    while not over.is_set():
                        received[number] += len(stream.readline())

            viewers = [threading.Thread(target=follow, args=(number,)) for number in range(VIEWERS)]
            for viewer in viewers:
                viewer.start()
            began = processor_s(process.pid), time.perf_counter()
            try:
                yield
            finally:
                spent[0] += processor_s(process.pid) - began[0]
                spent[1] += time.perf_counter() - began[1]
                over.set()
                for viewer in viewers:
                    viewer.join()
                assert min(received) > 0

        yield monitored
    print(f"The page took {100 * spent[0] / spent[1]:.2f} % of the learner's core while it was looked at.\n")


@contextmanager
def busy(core: int) -> Iterator[None]:
    """Have a core multiply matrices: two cores of a machine may share more than memory."""
    program = "import torch\na = torch.randn(128, 128)\nwhile True: a @ a"
    with child(
        ["-c", program], dict(os.environ) | {"DDRL_BENCH_FOLDER": "/tmp", "OMP_NUM_THREADS": "1"}, core
    ):
        time.sleep(3.0)
        yield


@contextmanager
def shadow(environment: dict[str, str], core: int, scraped: list[int], run: str) -> Iterator[Monitor]:
    """Yield what has a shadow learn on the player's core while a context lasts."""
    from ddrl.store import connection, runs

    with contextlib.closing(connection.connect()) as client:

        @contextmanager
        def monitored() -> Iterator[None]:
            before = {*runs.names(client)}
            arguments = ["-m", "ddrl", "learner", "--shadow", run, "-s", "algorithm.name=td3"]
            with child(arguments, environment, cores()[1]):
                while not (new := {*runs.names(client)} - before) or not runs.state(client, min(new)).updates:
                    time.sleep(0.2)
                yield
            runs.set_status(client, min(new), "stopped", "enough")

        yield monitored


def processor_s(pid: int, thread: int | None = None) -> float:
    """Return the processor time that a process, or one of its threads, has taken."""
    fields = (
        Path(f"/proc/{pid}" + (f"/task/{thread}" if thread else "") + "/stat")
        .read_text()
        .rpartition(")")[2]
        .split()
    )
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    monitor: Callable[..., AbstractContextManager[Monitor]], rounds: int, seconds: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return (env steps/s, updates/s) of the monitored rounds, and of the others."""
    with fresh_home() as environment, ExitStack() as stack:
        os.environ.update({name: environment[name] for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")})
        os.environ.pop("DDRL_REDIS_URL", None)
        from ddrl import config
        from ddrl.runs import submit
        from ddrl.store import connection, metrics, runs
        from ddrl.store import server as embedded

        client = connection.connect(stack.enter_context(embedded.use()))
        settings = config.load(CONFIG, WITHOUT_END + (BOUND_BY_UPDATES if monitor is shadow else []))
        run = submit.create(client, settings, submit.prepare(settings))
        learning, playing = cores()
        ports = [free_port() for _ in range(2)]
        roles = (["learner", run], ["worker", "--role", "rollout", "--concurrency", "1"])
        for port, core, role in zip(ports, (learning, playing), roles, strict=True):
            served = {**environment, "DDRL_METRICS": str(port)}
            stack.enter_context(child(["-m", "ddrl", *role], served, core))
        for port in ports:
            wait_for(f"http://127.0.0.1:{port}/metrics")
        while metrics.last(client, run).get("updates", 0) < 1000:  # past the warm-up
            time.sleep(0.2)
        monitored = stack.enter_context(monitor(environment, learning, ports, run))

        def throughput() -> tuple[float, float]:
            time.sleep(SETTLE_S)
            before, started = runs.state(client, run), time.perf_counter()
            time.sleep(seconds)
            after, elapsed = runs.state(client, run), time.perf_counter() - started
            steps = (after.appended_steps - before.appended_steps) / elapsed
            return steps, (after.updates - before.updates) / elapsed

        on, off = [], []
        for number in range(2 * rounds):
            if number % 4 in (0, 3):  # off, on, on, off: both have the same share of drift
                with busy(playing) if monitor is shadow else contextlib.nullcontext():
                    off.append(throughput())
            else:
                with monitored():
                    on.append(throughput())
        client.close()
        return on, off


def live(rounds: int, seconds: float) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return the figures of learners that write their run's folder and tell MLflow, and of silent ones.

    Each (env steps/s, updates/s, updates for each second of the processor).
    """
    with server() as url, fresh_home() as environment, ExitStack() as stack:
        from ddrl import config
        from ddrl.runs import artifacts, submit
        from ddrl.store import connection, runs

        client = stack.enter_context(contextlib.closing(connection.connect(url)))
        settings = config.load(CONFIG, [*WITHOUT_END, "tracking=[mlflow]"])
        run = submit.create(client, settings, submit.prepare(settings))
        database = f"sqlite:///{environment['DDRL_BENCH_FOLDER']}/mlflow.db"
        threads = Path(environment["DDRL_BENCH_FOLDER"], "threads.json")
        environment |= {connection.URL_VARIABLE: url, "MLFLOW_TRACKING_URI": database}
        environment |= {"DDRL_BENCH_THREADS": str(threads)}
        shares: dict[str, list[float]] = {"folder": [], "mlflow": []}
        learning, playing = cores()
        stack.enter_context(
            child(["-m", "ddrl", "worker", "--role", "rollout", "--concurrency", "1"], environment, playing)
        )

        def throughput(*start: str) -> tuple[float, ...]:
            first = runs.state(client, run).updates
            with child([*start, "learner", run], environment, learning) as process:
                while runs.state(client, run).updates < first + 1_000:  # past the warm-up
                    time.sleep(0.2)
                time.sleep(
                    4 * artifacts.EVERY_S
                )  # the first call of each imports for ten seconds beside the updates
                before, started, spent_s = (
                    runs.state(client, run),
                    time.perf_counter(),
                    processor_s(process.pid),
                )
                ids = json.loads(threads.read_text()) if start[-1] == NAMING else {}
                own_s = {name: processor_s(process.pid, ids[name]) for name in ("folder", "mlflow") if ids}
                time.sleep(seconds)
                after, elapsed = runs.state(client, run), time.perf_counter() - started
                spent_s = processor_s(process.pid) - spent_s
                for name, before_s in own_s.items():
                    shares[name].append(100 * (processor_s(process.pid, ids[name]) - before_s) / elapsed)
            steps, updates = after.appended_steps - before.appended_steps, after.updates - before.updates
            return steps / elapsed, updates / elapsed, updates / spent_s

        on, off = [], []
        for number in range(2 * rounds):
            if number % 4 in (0, 3):
                off.append(throughput("-c", SILENT))
            else:
                on.append(throughput("-c", NAMING))
        for name, values in shares.items():
            print(f"The thread of {name} took {statistics.median(values):.2f} % of the learner's core.")
        print()
        return on, off


def paint() -> None:
    """Print the time from a request to the first contentful paint, in a browser, of pages that have much to show."""
    from playwright.sync_api import sync_playwright

    with server() as url, fresh_home() as environment, ExitStack() as stack:
        from support.store import add_history, append, make_run

        from ddrl.store import connection

        client = stack.enter_context(contextlib.closing(connection.connect(url)))
        for _ in range(200):
            add_history(client, make_run(client))
        run = make_run(client)
        add_history(client, run)
        for seq in range(30, 20_030):
            append(client, run, seq, episode_returns=[float(seq % 999)] * 5)
        port = free_port()
        served = {**environment, connection.URL_VARIABLE: url}
        stack.enter_context(child(["-m", "ddrl", "web", "--port", str(port)], served))
        wait_for(f"http://127.0.0.1:{port}/fleet")
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        browser.new_page().goto(f"http://127.0.0.1:{port}/fleet")  # its own start is not measured
        print("| page | first paint (first time) | again (median of 5) |\n|---|---|---|")
        for name, path in (("a run with 100,000 episodes", f"/runs/{run}"), ("200 runs", "/")):
            times = []
            for _ in range(6):
                tab = browser.new_page()
                tab.goto(f"http://127.0.0.1:{port}{path}")
                times.append(tab.evaluate(PAINT) / 1e3)
                tab.close()
            print(f"| {name} | {times[0]:.2f} s | {statistics.median(times[1:]):.2f} s |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("flower", "page", "live", "shadow", "paint"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    arguments = parser.parse_args()
    if arguments.what == "paint":
        print(heading("The page with much to show") + "\n")
        paint()
        return
    title = {
        "flower": "Loss by Flower, task events and Prometheus",
        "page": f"Loss by the page with {VIEWERS} viewers",
        "shadow": "Loss by a shadow on another core",
        "live": "Loss by the folder of a run that goes on, and MLflow",
    }[arguments.what]
    print(heading(title) + "\n")
    on: Sequence[tuple[float, ...]]
    off: Sequence[tuple[float, ...]]
    if arguments.what == "live":
        on, off = live(arguments.rounds, arguments.seconds)
    else:
        monitor = {"flower": flower, "page": page, "shadow": shadow}[arguments.what]
        on, off = measure(monitor, arguments.rounds, arguments.seconds)
    print("| what | monitored (median) | not monitored | loss | of single rounds |\n|---|---|---|---|---|")
    names = ("env steps/s", "updates/s", "updates for each second of the learner's processor")
    for column, name in enumerate(names[: len(on[0])]):
        ours, bare = [row[column] for row in on], [row[column] for row in off]
        losses = [100 * (1 - one / two) for one, two in zip(ours, bare, strict=True)]
        print(
            f"| {name} | {statistics.median(ours):,.0f} | {statistics.median(bare):,.0f} "
            f"| {statistics.median(losses):.1f} % | {min(losses):.1f} to {max(losses):.1f} % |"
        )
    print(f"\n{arguments.rounds} pairs of {arguments.seconds:g} s")


if __name__ == "__main__":
    main()
