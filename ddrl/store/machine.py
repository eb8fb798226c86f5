"""The memory, cores and GPUs of this machine, or of the containers (cgroups) that this process is in."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

PROCESS_BYTES = 512 * 1024**2  # of one that plays, with torch


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory; 0 if the system does not say.

    Args:
        root: where /proc and /sys are.
    """
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (OSError, ValueError):
        return 0
    # The first is of version 1; a container sees its own there.
    files = [root / "sys/fs/cgroup/memory/memory.limit_in_bytes"]
    for file in [*files, *(group / "memory.max" for group in _groups(root))]:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(file.read_text()))
    return min(limits)


def cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, or as many as its share of their time is worth."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            quota, period = (group / "cpu.max").read_text().split()
            usable = min(usable, math.ceil(int(quota) / int(period)))
    return usable


def gpus() -> tuple[str, ...]:
    """Return the names of this machine's NVIDIA GPUs as its driver reports them; none without a driver."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = path.read_text().splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return tuple(found)


def processes(root: Path = Path("/")) -> int:
    """Return how many processes can play at once: one a core, as far as the memory suffices; at least 1."""
    memory = memory_bytes(root)
    return max(1, min(cores(root), memory // PROCESS_BYTES if memory else cores(root)))


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's groups of version 2; the limits of each hold for it."""
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                group = groups / line.removeprefix("0::/")
                return [group, *group.parents]
    return []
