"""Distributed deep reinforcement learning on Celery and Redis.

Importing this package is cheap on purpose: `celery -A ddrl worker` and `ddrl --help` start with it. What a script uses,
see `ddrl.api`, is loaded when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddrl import policy
    from ddrl.api import Run, all_runs, run, submit

__version__ = "0.1.0"
__all__ = ["Run", "all_runs", "policy", "run", "submit"]


def __getattr__(name: str) -> object:
    if name == "policy":
        return import_module("ddrl.policy")
    if name in __all__:
        return getattr(import_module("ddrl.api"), name)
    raise AttributeError(f"module 'ddrl' has no attribute {name!r}")
