"""Many workers on one machine: is every fragment accounted for, does the learner starve, what does dispatching cost?

    python benchmarks/fleet.py [--workers 200] [--seconds 30]

Workers are threads of a few `celery worker --pool threads`, hence share a core; each plays `ddrl/Sleep-v0`, which
sleeps: tasks, policies, appends and learner are real. This machine does the work of all of them, so with more than 200
each must do less: `--workers 1000 --step 0.5 --fragment 5 --segment 20`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from machine import child, fresh_home, heading, server


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sections of the run's config."""
    return {
        "name": "fleet",
        "env": {"id": "ddrl/Sleep-v0", "kwargs": {"step_s": arguments.step}, "num_envs": 1},
        "algorithm": {"name": "dqn", "hidden_sizes": [16], "batch_size": 32},
        "rollout": {"segment_s": arguments.segment, "fragment_s": arguments.fragment},
        "replay": {"samples_per_insert": 1, "warmup_steps": 1000, "slack_steps": 500_000, "max_bytes": "1GB"},
        "learner": {"device": "cpu", "publish_every_s": 5, "metrics_every_s": 1},
        "evaluation": {"every_s": "10h"},
        "stop": {"time": "10h"},
    }


def learn(run: str) -> None:
    """Learn the run in this process, and print what its dispatcher cost."""
    from ddrl.learner import dispatcher as fleet
    from ddrl.learner import run as runner
    from ddrl.store import connection

    ticks: list[tuple[float, float, int]] = []  # wall time, processor time, messages sent

    def tick(dispatcher: fleet.Dispatcher, admitted: int = 0) -> int:
        wall, processor = time.perf_counter(), time.thread_time()
        sent = original(dispatcher, admitted)
        ticks.append((time.perf_counter() - wall, time.thread_time() - processor, sent))
        return sent

    def interrupt_at_end_of_input() -> None:
        sys.stdin.read()
        interrupt.set()

    original = fleet.Dispatcher.tick
    fleet.Dispatcher.tick = tick  # type: ignore[assignment, method-assign]
    interrupt, begun = runner.handle_signals(), time.perf_counter()
    threading.Thread(target=interrupt_at_end_of_input, daemon=True).start()
    runner.learn(connection.connect(), run, Path(os.environ["DDRL_BENCH_FOLDER"]), interrupt)
    walls = sorted(wall for wall, _, _ in ticks)
    print(
        json.dumps(
            {
                "ticks_per_s": len(ticks) / (time.perf_counter() - begun),
                "median_ms": 1e3 * walls[len(walls) // 2],
                "p99_ms": 1e3 * walls[int(0.99 * len(walls))],
                "processor": sum(processor for _, processor, _ in ticks) / (time.perf_counter() - begun),
                "messages": sum(sent for _, _, sent in ticks),
            }
        )
    )


def measure(arguments: argparse.Namespace, url: str, environment: dict[str, str]) -> dict[str, Any]:
    """Let the fleet play; return the rows of the table."""
    from ddrl import config
    from ddrl.runs import submit
    from ddrl.store import connection, ledger, metrics, runs, segments

    client = connection.connect(url)
    wanted = config.validate(settings(arguments))
    run = submit.create(client, wanted, submit.prepare(wanted))
    log = (Path(environment["DDRL_BENCH_FOLDER"]) / "learner.log").open("w")
    command = [sys.executable, str(Path(__file__).resolve()), "--as-learner", run]
    learner = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    threads = arguments.workers // arguments.processes
    play = [
        "-m",
        "celery",
        "-A",
        "ddrl",
        "worker",
        "--pool",
        "threads",
        "-c",
        str(threads),
        "-Q",
        "ddrl.rollout",
    ]
    play += ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "error"]
    num = threads * arguments.processes
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(arguments.processes):
            stack.enter_context(child(play, environment))
        while len(segments.playing(client, run)) < 0.98 * num:
            if time.monotonic() > started + 300:
                raise SystemExit(
                    f"only {len(segments.playing(client, run))} of {num} workers play after 300 s"
                )
            time.sleep(0.2)
        ready_s = time.monotonic() - started
        time.sleep(5.0)
        before, cursor, load = runs.state(client, run), metrics.read(client, run)[1], _redis_s(client)
        begun = time.monotonic()
        playing = []
        while time.monotonic() < begun + arguments.seconds:
            time.sleep(0.5)
            playing.append(len(segments.playing(client, run)))
        elapsed, after = time.monotonic() - begun, runs.state(client, run)
        rows, load = metrics.read(client, run, cursor)[0], _redis_s(client) - load
        runs.set_status(client, run, "stopped", "measured")
    told = json.loads(learner.communicate()[0].splitlines()[-1])
    audit = ledger.audit(client, run)
    steps = after.appended_steps - before.appended_steps
    fragments = after.appended_fragments - before.appended_fragments
    rates = [row["env_steps_per_s"] for row in rows]
    return {
        "workers": f"{num} in {arguments.processes} Celery processes; all played after {ready_s:.0f} s",
        "playing": f"{sum(playing) / len(playing):.1f} on average, at least {min(playing)}",
        "env steps/s": f"{steps / elapsed:,.0f}, "
        f"{100 * steps / elapsed * arguments.step / num:.0f} % of what sleep allows",
        "fragments/s": f"{fragments / elapsed:.0f}, in segments of {wanted.rollout.segment_s:g} s",
        "learner": f"{min(rates):,.0f} to {max(rates):,.0f} env steps/s from second to second, "
        f"{sum(rate == 0 for rate in rates)} of {len(rates)} seconds without any; "
        f"{(rows[-1]['updates'] - rows[0]['updates']) / (rows[-1]['time_s'] - rows[0]['time_s']):.0f} updates/s, "
        f"the pace of replay.samples_per_insert {wanted.replay.samples_per_insert:g}",
        "allowance": f"processes waited for it {100 * _share(before, after, 'allowance_wait_s'):.1f} % "
        f"of their time, for room {100 * _share(before, after, 'room_wait_s'):.1f} %",
        "dispatcher": f"{told['ticks_per_s']:.1f} ticks/s of {told['median_ms']:.2f} ms (99 %: "
        f"{told['p99_ms']:.1f} ms), {100 * told['processor']:.2f} % of a core, {told['messages']} messages",
        "server": f"{100 * load / elapsed:.0f} % of a core",
        "ledger": _ledger(audit),
    }


def _ledger(audit: Any) -> str:
    names = ("appended", "consumed", "waiting", "trimmed", "refused", "duplicates")
    total = {name: audit.total(name) for name in names}
    return (
        "{0}: {appended} appended = {consumed} consumed + {waiting} waiting + {trimmed} trimmed + {refused} refused, "
        "of {1} producers; {duplicates} duplicates dropped"
    ).format("exact" if audit.is_balanced else "NOT EXACT", len(audit.accounts), **total)


def _share(before: Any, after: Any, name: str) -> float:
    spent = after.process_s - before.process_s
    return (getattr(after, name) - getattr(before, name)) / spent if spent else 0.0


def _redis_s(client: Any) -> float:
    used = client.info("cpu")
    return float(used["used_cpu_sys"] + used["used_cpu_user"])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2, help="Celery workers that hold them as threads")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--step", type=float, default=0.1, help="of an environment, in seconds")
    parser.add_argument("--fragment", type=float, default=1.0, help="rollout.fragment_s")
    parser.add_argument("--segment", type=float, default=5.0, help="rollout.segment_s")
    parser.add_argument("--as-learner", metavar="RUN", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_learner:
        learn(arguments.as_learner)
        return
    print(heading(f"{arguments.workers} workers on one machine, environments that sleep") + "\n", flush=True)
    with server() as url, fresh_home() as environment:
        environment |= {"DDRL_REDIS_URL": url}
        os.environ["DDRL_REDIS_URL"] = url
        figures = measure(arguments, url, environment)
    print("| what | figure |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
