"""Distributed deep reinforcement learning on Celery and Redis.

Importing this package is cheap on purpose: `celery -A ddrl worker` and `ddrl --help` start with it. What a script uses,
see `ddrl.api`, is loaded when it is first named.
"""

from importlib import import_module as _import
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddrl import policy
    from ddrl.api import (
        ConfigError,
        EnvError,
        InputError,
        Run,
        ServerError,
        StoreError,
        all_runs,
        run,
        submit,
    )

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "EnvError",
    "InputError",
    "Run",
    "ServerError",
    "StoreError",
    "all_runs",
    "policy",
    "run",
    "submit",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # a type checker then finds misspelt names

    def __getattr__(name: str) -> object:
        if name == "policy":
            return _import("ddrl.policy")
        if name in __all__:
            return getattr(_import("ddrl.api"), name)
        raise AttributeError(f"module 'ddrl' has no attribute {name!r}")
