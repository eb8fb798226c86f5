"""Starts an evaluation worker: plays the episodes that score a version of the weights.

python workers/evaluation.py [PROCESSES]     else $DDRL_PROCESSES, else one process
"""

from __future__ import annotations

import os
import sys

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # a process plays on one core; more threads only take others'


def main() -> int:
    from ddrl.cli import main as ddrl

    processes = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DDRL_PROCESSES") or "1"
    return ddrl(["worker", "--role", "evaluate", "--concurrency", processes])


if __name__ == "__main__":  # the pool spawns: its children import this file again
    sys.exit(main())
