"""Starts a rollout worker: it plays segments of every run that this machine can play.

python workers/rollout.py [PROCESSES]        else $DDRL_PROCESSES, else one process per core
"""

from __future__ import annotations

import os
import sys

from ddrl.cli import main

if __name__ == "__main__":  # the processes of the pool import this file, too
    processes = (
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DDRL_PROCESSES") or str(os.cpu_count() or 1)
    )
    sys.exit(main(["worker", "--role", "rollout", "--concurrency", processes]))
