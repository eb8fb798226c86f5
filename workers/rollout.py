"""Starts a rollout worker: it plays segments of every run that this machine can play.

python workers/rollout.py [PROCESSES]        else $DDRL_PROCESSES, else what cores and memory allow
"""

from __future__ import annotations

import os
import sys

from ddrl.cli import main

if __name__ == "__main__":  # the processes of the pool import this file, too
    processes = sys.argv[1:2] or [os.environ.get("DDRL_PROCESSES", "")]
    given = ["--concurrency", *processes] if processes != [""] else []
    sys.exit(main(["worker", "--role", "rollout", *given]))
