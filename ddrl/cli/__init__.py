"""The command `ddrl`: the list of commands, and the exit codes of errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

import ddrl
from ddrl.cli.audit import audit
from ddrl.cli.compare import compare
from ddrl.cli.doctor import doctor
from ddrl.cli.evaluate import evaluate
from ddrl.cli.fleet import fleet
from ddrl.cli.live import watch
from ddrl.cli.logs import journal, logs
from ddrl.cli.maintenance import prune, schema
from ddrl.cli.policies import export
from ddrl.cli.roles import learner, up, worker
from ddrl.cli.runs import delete, pause, runs, stop
from ddrl.cli.settings import set_
from ddrl.cli.status import status
from ddrl.cli.submit import detached, resume, submit

DONE, FAILED, BAD_INPUT, NO_SERVER, INTERRUPTED = 0, 1, 2, 3, 130

COMMANDS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("Train", submit),
    ("Train", resume),
    ("Train", stop),
    ("Train", pause),
    ("Train", set_),
    ("Watch", runs),
    ("Watch", status),
    ("Watch", watch),
    ("Watch", logs),
    ("Watch", journal),
    ("Fleet", fleet),
    ("Fleet", worker),
    ("Fleet", learner),
    ("Fleet", up),
    ("Fleet", doctor),
    ("Results", compare),
    ("Results", evaluate),
    ("Results", export),
    ("Maintenance", audit),
    ("Maintenance", delete),
    ("Maintenance", prune),
    ("Maintenance", schema),
)

# Errors whose message is enough for the user, most specific first. They are named, not imported, so that `ddrl --help`
# does not import blosc2 or gymnasium: an error whose module was never imported cannot have been raised.
_EXPLAINED: tuple[tuple[str, str, int], ...] = (
    ("ddrl.cli.output", "InputError", BAD_INPUT),
    ("ddrl.cli.output", "ServerError", NO_SERVER),
    ("ddrl.config", "ConfigError", BAD_INPUT),
    ("ddrl.envs", "EnvError", BAD_INPUT),
    ("ddrl.codec", "CodecError", BAD_INPUT),
    ("ddrl.store.weights", "WeightsError", BAD_INPUT),
    ("ddrl.policy", "PolicyFileError", BAD_INPUT),
    ("ddrl.store.leases", "LeaseLostError", FAILED),
    ("ddrl.runs.processes", "ProcessError", FAILED),
    (
        "ddrl.store.connection",
        "StoreError",
        BAD_INPUT,
    ),  # a fault of the server itself is a ServerError
    ("redis.exceptions", "RedisError", NO_SERVER),
)

app = typer.Typer(
    name="ddrl",
    add_completion=False,
    rich_markup_mode="rich",
    epilog=(
        "Exit codes: 0 done, 1 the run failed, 2 bad input, 3 server not reachable or not fit, "
        "130 interrupted. DDRL_REDIS_URL names the server; without it, ddrl starts one of its own."
    ),
)
for _panel, _command in COMMANDS:
    app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)
app.command(hidden=True)(detached)  # started by `--detach`


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Distributed deep reinforcement learning on Celery and Redis streams."""
    if version:
        print(f"ddrl {ddrl.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, given without the program's name, and return its exit code."""
    if arguments is None:
        _end_in_order()
    try:
        code = app(sys.argv[1:] if arguments is None else list(arguments), "ddrl", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except TyperException as error:
        return _refuse(getattr(error, "format_message", error.__str__)(), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        return _refuse(str(error), code)


def _end_in_order() -> None:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a command as an exit does: it leaves the embedded server."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(signum, lambda number, _: sys.exit(128 + number))


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error in _EXPLAINED; None for any other, which keeps its traceback."""
    for module, name, code in _EXPLAINED:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return code
    return None


def _refuse(message: str, code: int) -> int:
    print(f"ddrl: error: {' '.join(message.split())}", file=sys.stderr)
    return code
