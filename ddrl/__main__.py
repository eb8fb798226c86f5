"""`python -m ddrl`, the same as the command `ddrl`."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # the processes of a worker's pool import this file, too
    from ddrl.cli import main

    sys.exit(main())
