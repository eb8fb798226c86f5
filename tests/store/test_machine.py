"""What a machine has, and what the limits of its containers leave of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddrl.celery import app
from ddrl.store import machine


def write(folder: Path, groups: str, limits: dict[str, str]) -> None:
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{k}": v for k, v in limits.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "limits", "least"),
    [
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {"memory.max": "1000000\n"}, 1_000_000),
        ("0::/a/b\n", {"a/memory.max": "2000000\n", "a/b/memory.max": "max\n"}, 2_000_000),
        ("4:memory:/x\n0::/\n", {"memory/memory.limit_in_bytes": "3000000\n"}, 3_000_000),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("", {}, None),
    ],
)
def test_the_memory_of_a_machine_is_the_least_limit_of_its_containers(
    tmp_path: Path, groups: str, limits: dict[str, str], least: int | None
) -> None:
    write(tmp_path, groups, limits)
    physical = machine.memory_bytes(tmp_path / "nothing")
    assert physical > 10**8
    assert machine.memory_bytes(tmp_path) == (physical if least is None else least)


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        ({"a/b/cpu.max": "5000 100000\n"}, 1),
        ({"a/b/cpu.max": "6400000 100000\n"}, None),
        ({"a/b/cpu.max": "nonsense\n"}, None),
        ({"a/b/memory.max": f"{600 * 1024**2}\n"}, 1),
        ({"a/b/memory.max": "1000\n"}, 1),
    ],
)
def test_as_many_processes_play_as_the_container_may_use_cores_and_memory(
    tmp_path: Path, limits: dict[str, str], most: int | None
) -> None:
    write(tmp_path, "0::/a/b\n", limits)
    usable = len(os.sched_getaffinity(0))
    assert machine.processes(tmp_path) == (usable if most is None else min(most, usable))


def test_a_worker_has_as_many_processes_as_can_play() -> None:
    assert app.conf.worker_concurrency == machine.processes()
