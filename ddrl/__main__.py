"""`python -m ddrl`, the same as the command `ddrl`."""

from __future__ import annotations

import sys

from ddrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
