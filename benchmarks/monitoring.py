"""Cost of monitoring: a run with Flower, task events and Prometheus' scrapes on, against off.

    python benchmarks/monitoring.py

`configs/lunar.yaml` as shipped, without its evaluations: a learner on one core and a rollout process on another,
at the pace of the run. In monitored rounds task events are on, Flower (on the learner's core) follows them, and the
metrics of learner and worker are read every 5 s, as in `workers/prometheus.yml`; in the others Flower is stopped and
nothing is sent or read. Rounds alternate; the loss of environment steps and of updates is the median over pairs of
adjacent rounds.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from machine import CONFIG, child, cores, fresh_home, heading

SCRAPE_S = 5.0
SETTLE_S = 1.0
WITHOUT_END = [
    "evaluation.every_s=100000",
    "evaluation.near_every_s=100000",
    "stop.return=null",
    "stop.time=null",
]


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


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
def monitored(flower: subprocess.Popen[bytes], ports: list[int]) -> Iterator[None]:
    """Run Flower, events and scrapes while the context lasts."""
    from ddrl import celery

    flower.send_signal(signal.SIGCONT)
    celery.app.control.enable_events()
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_S / 2):
            for port in ports:
                assert answers(f"http://127.0.0.1:{port}/metrics")
            over.wait(SCRAPE_S / 2)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        yield
    finally:
        over.set()
        scraper.join()
        celery.app.control.disable_events()
        flower.send_signal(signal.SIGSTOP)


def measure(rounds: int, seconds: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return (env steps/s, updates/s) of the monitored rounds, and of the others."""
    with fresh_home() as environment, ExitStack() as stack:
        os.environ.update({name: environment[name] for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")})
        os.environ.pop("DDRL_REDIS_URL", None)
        from ddrl import config
        from ddrl.runs import submit
        from ddrl.store import connection, metrics, runs
        from ddrl.store import server as embedded

        client = connection.connect(stack.enter_context(embedded.use()))
        settings = config.load(CONFIG, WITHOUT_END)
        run = submit.create(client, settings, submit.prepare(settings))
        learning, playing = cores()
        ports = [free_port() for _ in range(3)]
        roles = (["learner", run], ["worker", "--role", "rollout", "--concurrency", "1"])
        for port, core, role in zip(ports, (learning, playing), roles, strict=False):
            served = {**environment, "DDRL_METRICS": str(port)}
            stack.enter_context(child(["-m", "ddrl", *role], served, core))
        arguments = ["-m", "celery", "-A", "ddrl", "flower", "--address=127.0.0.1", f"--port={ports[2]}"]
        flower = stack.enter_context(
            child(arguments, {**environment, "FLOWER_BASIC_AUTH": "user:password"}, learning)
        )
        stack.callback(flower.send_signal, signal.SIGCONT)  # a stopped process does not end
        while not all(answers(f"http://127.0.0.1:{port}/metrics") for port in ports):
            time.sleep(0.2)
        while metrics.last(client, run).get("updates", 0) < 1000:  # past the warm-up
            time.sleep(0.2)
        flower.send_signal(signal.SIGSTOP)

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
                off.append(throughput())
            else:
                with monitored(flower, ports[:2]):
                    on.append(throughput())
        client.close()
        return on, off


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    arguments = parser.parse_args()
    print(heading("Loss by Flower, task events and Prometheus") + "\n")
    on, off = measure(arguments.rounds, arguments.seconds)
    print("| what | monitored (median) | not monitored | loss | of single rounds |\n|---|---|---|---|---|")
    for column, name in enumerate(("env steps/s", "updates/s")):
        ours, bare = [row[column] for row in on], [row[column] for row in off]
        losses = [100 * (1 - one / two) for one, two in zip(ours, bare, strict=True)]
        print(
            f"| {name} | {statistics.median(ours):,.0f} | {statistics.median(bare):,.0f} "
            f"| {statistics.median(losses):.1f} % | {min(losses):.1f} to {max(losses):.1f} % |"
        )
    print(f"\n{arguments.rounds} pairs of {arguments.seconds:g} s; floor 3 %, goal 1 %")


if __name__ == "__main__":
    main()
