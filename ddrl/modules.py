"""From "module:callable" to the callable: a user's own environment or network, from allowed modules only.

What a run names is imported and run on every machine that plays or learns it. So each machine lists the modules
that it trusts, in DDRL_ALLOW_MODULES; the default is none.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import Any

ALLOW_VARIABLE = "DDRL_ALLOW_MODULES"  # comma-separated modules whose code may be imported and run


class ModuleError(ValueError):
    """A "module:callable" that cannot be had here; the message names it and the remedy in one line."""


def allowed_modules() -> list[str]:
    """The modules named in DDRL_ALLOW_MODULES, in its order."""
    return [name.strip() for name in os.environ.get(ALLOW_VARIABLE, "").split(",") if name.strip()]


def is_allowed(module: str) -> bool:
    """Whether `module` or one of its parent packages is named in DDRL_ALLOW_MODULES."""
    return any(module == name or module.startswith(name + ".") for name in allowed_modules())


def load_callable(name: str) -> Callable[..., Any]:
    """The callable that `name`, "module:callable", stands for; imports the module.

    Raises:
        ModuleError: another form, a module that is not allowed or cannot be imported, no such callable in it.
    """
    found = re.fullmatch(r"(\w+(?:\.\w+)*):(\w+)", name)
    if found is None:
        raise ModuleError(f'{name}: is not of the form "module:callable"; write it like my_pkg.module:make')
    module_name, attribute = found.groups()
    if not is_allowed(module_name):
        raise ModuleError(
            f"{name}: module {module_name} may not be imported here; "
            f"set {ALLOW_VARIABLE}={module_name.partition('.')[0]} on every machine that uses it"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModuleError(
            f"{name}: {first_line(error)}; install what is missing on every machine that uses it"
        ) from None
    except Exception as error:
        raise ModuleError(
            f"{name}: importing {module_name} raised {type(error).__name__} ({first_line(error)}); "
            "make the module importable"
        ) from None
    try:
        loaded = getattr(module, attribute)
    except AttributeError:
        raise ModuleError(
            f"{name}: module {module_name} has no {attribute!r}; name a callable of it"
        ) from None
    if not callable(loaded):
        raise ModuleError(
            f"{name}: is {type(loaded).__name__}, which cannot be called; name a callable of it"
        )
    made: Callable[..., Any] = loaded
    return made


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
