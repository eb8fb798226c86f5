"""Memory over a long run: the learner's is flat, the stream's within `replay.max_bytes`.

    python benchmarks/memory.py --minutes 10

`configs/lunar.yaml` without its target and with a byte budget that is used up many times over. Prints a row every
half minute, and what the learner's memory grew by after the view had filled.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from machine import CONFIG, child, fresh_home, heading

MEBI = 1024**2


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--max-bytes", default="4MiB", help="replay.max_bytes")
    parser.add_argument("--capacity", type=int, default=50_000, help="replay.capacity")
    arguments = parser.parse_args()
    print(heading("Memory of learner and stream over a long run"))
    overrides = [
        "stop.return=1000000",
        "stop.time=10h",
        f"replay.max_bytes={arguments.max_bytes}",
        f"replay.capacity={arguments.capacity}",
    ]
    print(f"config configs/lunar.yaml {' '.join(overrides)}\n")
    with fresh_home() as environment:
        os.environ.update({name: environment[name] for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")})
        os.environ.pop("DDRL_REDIS_URL", None)
        from ddrl import config
        from ddrl.runs import submit
        from ddrl.store import connection, keys, runs
        from ddrl.store import server as embedded

        settings = config.load(CONFIG, overrides)
        with embedded.use() as url:
            client = connection.connect(url)
            run = submit.create(client, settings, submit.prepare(settings))
            play = ["-m", "ddrl", "worker", "--concurrency", "1", "--role"]
            with (
                child([*play, "rollout"], environment),
                child([*play, "evaluate"], environment),
                child(["-m", "ddrl", "learner", run], environment) as learner,
            ):
                print(
                    "| s | learner MB | stream MB (MEMORY USAGE) | budget MB | env steps | appended MB | full |"
                )
                print("|---|---|---|---|---|---|---|", flush=True)
                sizes, largest = [], 0.0
                started = time.monotonic()
                while time.monotonic() - started < 60 * arguments.minutes:
                    for _ in range(60):  # the stream's peak, looked at twice a second
                        time.sleep(0.5)
                        usage = client.memory_usage(keys.experience(run), samples=0) or 0
                        largest = max(largest, usage / MEBI)
                    state = runs.state(client, run)
                    sizes.append(resident_mb(learner.pid))
                    print(
                        f"| {time.monotonic() - started:.0f} | {sizes[-1]:.1f} | {usage / MEBI:.2f} "
                        f"| {settings.replay.max_bytes / MEBI:.2f} | {state.appended_steps} "
                        f"| {state.appended_bytes / MEBI:.1f} | {state.full} |",
                        flush=True,
                    )
                runs.set_status(client, run, "stopped", "measured")
            client.close()
    settled = sizes[len(sizes) // 4 :]
    print(
        f"\nlearner: {settled[0]:.1f} MB after a quarter of the time, {settled[-1]:.1f} MB at the end, "
        f"largest {max(settled):.1f}; stream: largest {largest:.2f} MB of {settings.replay.max_bytes / MEBI:.2f}"
    )


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MiB (Linux)."""
    line = next(
        line for line in Path("/proc", str(pid), "status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
