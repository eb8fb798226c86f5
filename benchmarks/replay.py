"""Sampling from the learner's replay, its memory, and the sum tree: each row in a fresh process on one core.

    python benchmarks/replay.py

A row fills a replay of `--capacity` transitions, then draws batches of 256: uniform positions as a learner draws them,
3 steps, for Atari 4 stacked frames of s_t and of s_{t+3}. Atari's frames are real, 84x84 after the standard protocol,
played by the random policy: `--steps` of each game, admitted again and again under other ids, compressed anew each
time, until the replay is full. The learner's memory is the anonymous memory after less before; it includes the
interpreter and all of the replay, but not the frames, which are mapped from a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, cores, heading

sys.path.insert(0, str(ROOT))

from ddrl.replay.prioritized import stratified, uniform
from ddrl.replay.rate_limiter import RateLimiter
from ddrl.replay.replay import Replay
from ddrl.replay.sum_tree import SumTree
from ddrl.replay.transitions import TransitionItems
from ddrl.types import Fragment

GAMES = {"asterix": "Asterix", "zaxxon": "Zaxxon", "wizard_of_wor": "WizardOfWor"}
BATCH, N_STEP, STACK = 256, 3, 4
NUM_STEPS, NUM_ENVS = 64, 8  # of a fragment


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=50_000, help="real ones, of each game")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of three measurements of a row")
    parser.add_argument("--quick", action="store_true", help="50,000 transitions, 5,000 real steps, 1 s")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--frames", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.capacity, arguments.steps, arguments.seconds = 50_000, 5_000, 1.0
    if arguments.row:
        print(json.dumps(ROWS[arguments.row](arguments)))
        return
    print(heading("The learner's replay"))
    print(
        f"{arguments.capacity:,} transitions; Atari: {arguments.steps:,} real steps of each game, repeated; "
        f"fragments of {NUM_STEPS} x {NUM_ENVS}; batches of {BATCH}, n = {N_STEP}, stacks of {STACK}\n"
    )
    with tempfile.TemporaryDirectory(prefix="ddrl-bench-") as folder:
        frames = {game: record(game, Path(folder), arguments.steps) for game in GAMES}
        print("| what | median | range | floor | goal |\n|---|---|---|---|---|")
        for title, row, game, floor, goal in (
            ("dense, Atari, batches/s", "dense", "asterix", 600, 1_200),
            ("dense, vectors of 8, batches/s", "vectors", "asterix", 5_000, 12_000),
            *(
                (f"compressed, {name}, batches/s", "compressed", game, 60, 250)
                for game, name in GAMES.items()
            ),
        ):
            found = measure(row, frames[game], arguments)
            figures = found["batches"]
            print(
                f"| {title} | {statistics.median(figures):,.0f} | {min(figures):,.0f} to {max(figures):,.0f} "
                f"| {floor:,} | {goal:,} |",
                flush=True,
            )
            if row != "vectors":
                floor_gb, goal_gb = ("0.6", "0.3") if row == "compressed" else ("", "")
                print(
                    f"| learner memory of it, GB | {found['resident_gb']:.3f} | {found['frame_bytes']:.0f} B a frame "
                    f"stored, filled in {found['fill_s']:.0f} s | {floor_gb} | {goal_gb} |",
                    flush=True,
                )
        figures = measure("tree", frames["asterix"], arguments)["ms"]
        print(
            f"| sum tree of 2^20, draw {BATCH} and update {BATCH}, ms | {statistics.median(figures):.3f} "
            f"| {min(figures):.3f} to {max(figures):.3f} | 1 | 0.3 |"
        )


def measure(row: str, frames: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a row's function, run in a process of its own on one core."""
    done = subprocess.run(
        [
            *(sys.executable, __file__, "--row", row, "--frames", str(frames)),
            *("--capacity", str(arguments.capacity), "--seconds", str(arguments.seconds)),
        ],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {cores()[1]}),
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def record(game: str, folder: Path, num_steps: int) -> Path:
    """Play `num_steps` with the random policy: frames [time, N, 84, 84] in a file, the ends of episodes beside it."""
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    env = AtariVectorEnv(
        game,
        num_envs=NUM_ENVS,
        stack_num=1,
        noop_max=30,
        reward_clipping=False,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    env.action_space.seed(0)
    observation, _ = env.reset(seed=1)
    frames, ended = [observation[:, 0].copy()], []
    for _ in range(num_steps // NUM_ENVS):
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        frames.append(observation[:, 0].copy())
        ended.append(terminated | truncated)
    env.close()
    np.save(folder / f"{game}.npy", np.stack(frames))
    np.save(folder / f"{game}-ended.npy", np.stack(ended))
    return folder / f"{game}.npy"


def dense(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure stacks from dense rows."""
    return atari(arguments, compressed=False)


def compressed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure stacks from compressed rows."""
    return atari(arguments, compressed=True)


def atari(arguments: argparse.Namespace, *, compressed: bool) -> dict[str, Any]:
    """Real frames."""
    frames = np.load(arguments.frames, mmap_mode="r")
    ended = np.load(str(arguments.frames).replace(".npy", "-ended.npy"))
    before, started = anonymous_bytes(), time.perf_counter()
    replay = empty_replay(arguments.capacity, frame_stack=STACK, compressed=compressed)
    starts = range(0, len(ended) - NUM_STEPS - STACK + 1, NUM_STEPS)
    seq = 0
    while len(replay) <= arguments.capacity - NUM_STEPS * NUM_ENVS:
        start = starts[seq % len(starts)]
        played = slice(start, start + NUM_STEPS + STACK - 1)
        # Lane by lane, as the codec gives them.
        lanes = np.ascontiguousarray(frames[start : played.stop + 1].swapaxes(0, 1))
        played_fragment = fragment(seq, lanes.swapaxes(0, 1), ended[played], context=STACK - 1)
        replay.admit(replay.pack(played_fragment), b"%d-0" % seq, version=0)
        seq += 1
    filled, grown = time.perf_counter() - started, anonymous_bytes() - before
    return {
        "resident_gb": grown / 1e9,
        "frame_bytes": replay.rows.num_bytes / len(replay.rows.ring),
        "fill_s": filled,
        "batches": rates(replay, arguments.seconds),
    }


def vectors(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure vectors of 8 numbers from dense rows."""
    rng = np.random.default_rng(0)
    capacity = arguments.capacity
    replay = empty_replay(capacity)
    seq = 0
    while len(replay) <= capacity - NUM_STEPS * NUM_ENVS:
        observation = rng.normal(size=(NUM_STEPS + 1, NUM_ENVS, 8)).astype(np.float32)
        ended = rng.random((NUM_STEPS, NUM_ENVS)) < 0.005
        replay.admit(replay.pack(fragment(seq, observation, ended)), b"%d-0" % seq, version=0)
        seq += 1
    return {"batches": rates(replay, arguments.seconds)}


def tree(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the milliseconds of a draw from the sum tree and an update of the drawn items."""
    made, rng = SumTree(2**20), np.random.default_rng(0)
    made.set(np.arange(2**20), rng.random(2**20))
    priority = rng.random(BATCH)
    draw, figures = 0, []
    for _ in range(3):
        first, started = draw, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < arguments.seconds:
            slots = made.sample(stratified(made.total, BATCH, seed=1, draw=draw))
            made.set(slots, priority)
            draw += 1
        figures.append(1e3 * elapsed / (draw - first))
    return {"ms": figures}


ROWS = {"dense": dense, "compressed": compressed, "vectors": vectors, "tree": tree}


def empty_replay(capacity: int, *, frame_stack: int = 1, compressed: bool = False) -> Replay:
    """Return a replay without a pace."""
    limiter = RateLimiter(samples_per_insert=1.0, warmup_steps=0, slack_steps=BATCH, batch_size=BATCH)
    items = TransitionItems(gamma=0.99, n_step=N_STEP, frame_stack=frame_stack)
    return Replay(items, limiter, capacity=capacity, batch_size=BATCH, seed=1, compressed=compressed)


def rates(replay: Replay, seconds: float) -> list[float]:
    """Return batches per second, measured three times."""
    draw, figures = 0, []
    for _ in range(3):
        first, started = draw, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            replay.plan(uniform(len(replay), BATCH, seed=1, draw=draw))()
            draw += 1
        figures.append((draw - first) / elapsed)
    return figures


def fragment(seq: int, observation: np.ndarray, terminated: np.ndarray, *, context: int = 0) -> Fragment:
    """Return a fragment without truncations; its actions and rewards do not matter here."""
    shape = terminated.shape
    return Fragment(
        run="run",
        producer=1,
        incarnation=1,
        seq=seq,
        policy_version=0,
        context=context,
        observation=observation,
        action=np.zeros(shape, np.int64),
        reward=np.zeros(shape, np.float32),
        terminated=terminated,
        truncated=np.zeros(shape, np.bool_),
        final_index=np.zeros((0, 2), np.int32),
        final_observation=np.zeros((0, *observation.shape[2:]), observation.dtype),
        episode_return=np.zeros(0, np.float32),
        episode_length=np.zeros(0, np.int32),
    )


def anonymous_bytes() -> int:
    """Return the resident memory of this process that is backed by no file (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
