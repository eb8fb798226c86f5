"""A disk whose syncs take long, while a file says how long: a library that is loaded before the C library's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int slow(void) {
  int ms = 0;
  FILE *file = fopen(getenv("SYNC_FILE"), "r");
  if (file) { if (fscanf(file, "%d", &ms) != 1) ms = 0; fclose(file); }
  usleep(ms * 1000);
  return 0;
}
int fsync(int file) { (void)file; return slow(); }
int fdatasync(int file) { (void)file; return slow(); }
"""


def slow_disk(folder: Path, sync_ms: int) -> dict[str, str]:
    """Return the environment of a process whose syncs take `sync_ms`; skip the test where there is no C compiler.

    The time may be changed while the process runs: it is the text of `folder / "sync_ms"`.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "slow_disk.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SOURCE.encode(), check=True)
    (folder / "sync_ms").write_text(str(sync_ms))
    return {"LD_PRELOAD": str(library), "SYNC_FILE": str(folder / "sync_ms")}
