"""The command `ddrl`: the list of commands, and the exit codes of errors."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command_from_info
from typer.models import CommandInfo

import ddrl

DONE, FAILED, BAD_INPUT, NO_SERVER, INTERRUPTED = 0, 1, 2, 3, 130

# Command -> (group in `ddrl --help`, module: of ddrl.cli if it has no dot, what it does). A module is imported when its
# command runs.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "submit": ("Train", "submit", "Start a run, and the server and processes that it lacks."),
    "presets": ("Train", "presets", "List the presets that ddrl ships, and what each reaches in what time."),
    "sweep": ("Train", "sweep", "Try values of a config's options, each as a run, and keep the best."),
    "branch": ("Train", "submit", "Start a run that goes on from a version of another."),
    "resume": ("Train", "submit", "Continue paused, stopped or interrupted runs."),
    "stop": ("Train", "runs", "End a run: its learner saves everything, its workers play other runs."),
    "pause": ("Train", "runs", "Pause a run until `ddrl resume`; nothing is lost."),
    "set": ("Train", "settings", "Change settings of a run while it goes on, or list them."),
    "rollback": ("Train", "versions", "Have a run go on from an earlier version of its weights."),
    "quarantine": ("Train", "quarantine", "Leave fragments out of what a run learns from."),
    "runs": ("Watch", "runs", "List the runs on the server, the newest last."),
    "status": ("Watch", "status", "Show the state of a run."),
    "watch": ("Watch", "live", "Follow a run until it ends; exit code 1 if it failed."),
    "logs": ("Watch", "logs", "Print the log lines of a run from all machines."),
    "journal": ("Watch", "logs", "Show the changes of a run's state and settings."),
    "web": ("Watch", "ddrl.web.command", "Show runs and fleet in a browser."),
    "fleet": ("Fleet", "fleet", "List the workers, what they play, and each run's share."),
    "worker": ("Fleet", "roles", "Play and evaluate: a Celery worker of one role."),
    "learner": ("Fleet", "roles", "Learn one run, or whatever run waits for a learner."),
    "up": ("Fleet", "roles", "Keep the embedded server running until Ctrl-C."),
    "doctor": ("Fleet", "doctor", "Check whether this machine can train, and name remedies."),
    "compare": ("Results", "compare", "Compare runs: their results, times and different settings."),
    "evaluate": ("Results", "evaluate", "Play a policy, here or on the run's fleet, and print its score."),
    "export": ("Results", "policies", "Write a policy to one file that plays anywhere."),
    "versions": ("Results", "versions", "List the versions that a run keeps, with their scores."),
    "episodes": ("Results", "episodes", "List training episodes that the stream holds."),
    "replay": ("Results", "episodes", "Play training episodes again and compare them bit for bit."),
    "record": ("Results", "recording", "Write a run's experience to a folder, to learn from it elsewhere."),
    "rerun": ("Results", "recording", "Learn a run again from its recorded stream, and compare the weights."),
    "backfill": ("Results", "versions", "Evaluate versions that a run has kept, on its fleet."),
    "audit": ("Maintenance", "audit", "Check for each producer that every fragment is accounted for."),
    "delete": ("Maintenance", "runs", "Delete an ended run from the server."),
    "prune": ("Maintenance", "maintenance", "Delete ended runs by age or size, oldest first."),
    "schema": ("Maintenance", "maintenance", "Print the JSON schema of the configuration."),
}
HIDDEN = "detached"  # command that `ddrl submit --detach` starts

# Errors of ddrl and redis whose message is enough for the user. They are named, not imported, so that `ddrl --help`
# does not import blosc2 or gymnasium. A fault of the server itself is a ServerError, not a StoreError.
_EXPLAINED = {
    **dict.fromkeys(("InputError", "ConfigError", "EnvError", "CodecError", "WeightsError"), BAD_INPUT),
    **dict.fromkeys(("OnnxError", "PolicyFileError", "StoreError", "UnfitError"), BAD_INPUT),
    **dict.fromkeys(("LeaseLostError", "NotFiniteError", "ProcessError"), FAILED),
    **dict.fromkeys(("ServerError", "RedisError"), NO_SERVER),
}


class _Commands(TyperGroup):
    """Lists commands without importing their modules."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name, loaded, and its arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        module = "submit" if name == HIDDEN else COMMANDS[str(name)][1]
        functions = importlib.import_module(module if "." in module else f"ddrl.cli.{module}")
        info = CommandInfo(name=name, callback=getattr(functions, "set_" if name == "set" else str(name)))
        return name, get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich"), rest


app = typer.Typer(
    name="ddrl",
    cls=_Commands,
    add_completion=False,
    rich_markup_mode="rich",
    epilog=(
        "Exit codes: 0 done, 1 the run failed, 2 bad input, 3 server not reachable or not fit, "
        "130 interrupted. DDRL_REDIS_URL names the server; without it, ddrl starts one of its own."
    ),
)
for _name, (_group, _, _help) in COMMANDS.items():
    app.command(_name, help=_help, rich_help_panel=_group)(lambda: None)
app.command(HIDDEN, hidden=True)(lambda: None)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Distributed deep reinforcement learning on Celery and Redis streams."""
    if version or context.invoked_subcommand is None:
        print(f"ddrl {ddrl.__version__}" if version else context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, given without the program's name, and return its exit code."""
    if arguments is None:
        _end_in_order()
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may lack characters
    try:
        code = app(sys.argv[1:] if arguments is None else list(arguments), "ddrl", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except TyperException as error:
        text = getattr(error, "format_message", error.__str__)()
        return _refuse(text.replace("Value error, ", ""), BAD_INPUT)  # as typer begins some messages
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        if not any(isinstance(each, BrokenPipeError) for each in (error, error.__context__)):
            raise
        # The reader of the pipe has ended, as `head` does; typer makes that an exit with code 1.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        if _ended_by:  # while a library was imported, which made another error of the exit
            return 128 + _ended_by[0]
        if (code := exit_code(error)) is None:
            raise
        message = str(error)
        if code == NO_SERVER:
            from ddrl.store import connection

            message = connection.outage(error) or message
        if type(error).__name__ == "NoPermissionError":
            message += "; DDRL_REDIS_URL must name a user with the rights for this (workers/acl)"
        return _refuse(message, code)
    finally:
        if _ended_by:
            signal.setitimer(signal.ITIMER_REAL, 0)


_ended_by: list[int] = []  # signals
_AGAIN_S = 0.1


def _end_in_order() -> None:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a command as an exit does: it leaves the embedded server."""

    def end(number: int, _: object) -> None:
        _ended_by.append(number)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        sys.exit(128 + number)

    def again(*_: object) -> None:
        """Exit once more where the exit came in a destructor or a library's callback, which dropped it."""
        handled = sys.exc_info()[1]
        while handled is not None and not isinstance(handled, SystemExit):
            handled = handled.__context__
        if handled is None:
            sys.exit(128 + _ended_by[0])

    def ignored(error: Any) -> None:
        if not (isinstance(error.exc_value, SystemExit) and _ended_by):
            sys.__unraisablehook__(error)

    sys.unraisablehook = ignored
    signal.signal(signal.SIGALRM, again)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(signum, end)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error in _EXPLAINED, or of its base; None for any other, which keeps its traceback."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__.startswith(("ddrl.", "redis.")))
    return next((_EXPLAINED[kind.__name__] for kind in kinds if kind.__name__ in _EXPLAINED), None)


def _refuse(message: str, code: int) -> int:
    print(f"ddrl: error: {' '.join(message.split())}", file=sys.stderr)
    return code
