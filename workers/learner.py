"""Starts a learner: it trains every run that waits for one, until it is stopped. It is no Celery worker.

python workers/learner.py [RUN] [--folder RUNS]
"""

from __future__ import annotations

import os
import sys

from ddrl.cli import main

if __name__ == "__main__":
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # `learner.num_threads` of the run's config raises it
    sys.exit(main(["learner", *sys.argv[1:]]))
