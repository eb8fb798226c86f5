"""Starts an evaluation worker: it plays the episodes that score a version of the weights.

python workers/evaluation.py [PROCESSES]     else $DDRL_PROCESSES, else one process
"""

from __future__ import annotations

import os
import sys

from ddrl.cli import main

if __name__ == "__main__":  # the processes of the pool import this file, too
    processes = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DDRL_PROCESSES") or "1"
    sys.exit(main(["worker", "--role", "evaluate", "--concurrency", processes]))
