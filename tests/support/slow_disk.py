"""A disk whose syncs take long: a library that is loaded before the C library's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = """
#include <stdlib.h>
#include <unistd.h>
static int slow(void) { usleep(atoi(getenv("SYNC_MS")) * 1000); return 0; }
int fsync(int file) { (void)file; return slow(); }
int fdatasync(int file) { (void)file; return slow(); }
"""


def slow_disk(folder: Path, sync_ms: int) -> dict[str, str]:
    """Return the environment of a process whose syncs take `sync_ms`; skip the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "slow_disk.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SOURCE.encode(), check=True)
    return {"LD_PRELOAD": str(library), "SYNC_MS": str(sync_ms)}
