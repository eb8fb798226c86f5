"""Some of the bad inputs of `make fuzz`, in a process of their own, which must not crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.private_server import require_program

FUZZ = Path(__file__).with_name("fuzz.py")


def test_bad_inputs_are_taken_or_refused_in_one_line() -> None:
    require_program()
    done = subprocess.run([sys.executable, FUZZ, "2000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
