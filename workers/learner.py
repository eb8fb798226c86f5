"""Starts a learner: trains every run that waits for one, until it is stopped. No Celery worker.

python workers/learner.py [RUN] [--folder RUNS]
"""

from __future__ import annotations

import os
import sys

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # `learner.num_threads` of the run's config raises it


def main() -> int:
    from ddrl.cli import main as ddrl

    return ddrl(["learner", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
