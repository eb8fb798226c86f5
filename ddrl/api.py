"""The Python API: runs in scripts and notebooks, in the words of the command line.

    import ddrl

    run = ddrl.submit("lunar", {"algorithm.gamma": 0.99}, seed=1)
    for figures in run.watch():
        print(figures.state.appended_steps, figures.row.get("return_mean"))
    print(run.evaluate(100)["return_mean"])
    action = run.policy().action(observation)

`DDRL_REDIS_URL` names the server; without it, ddrl starts one of its own, which this process keeps until it ends.
Errors are those of the command line, with one line that names the remedy: `ddrl.ConfigError`, `ddrl.EnvError`,
`ddrl.InputError` and `ddrl.StoreError` for what was asked, `ddrl.ServerError` where no server answers.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from pydantic import Field, ValidationError, validate_call

from ddrl import config as configs
from ddrl.cli import output, policies, settings, watcher
from ddrl.cli import runs as operator
from ddrl.cli import submit as submission
from ddrl.cli.output import InputError as InputError
from ddrl.cli.output import ServerError as ServerError
from ddrl.cli.watcher import Figures, Watcher
from ddrl.config import ConfigError as ConfigError
from ddrl.envs import EnvError as EnvError
from ddrl.runs import processes, records
from ddrl.runs.records import Records
from ddrl.store import connection, local_checkpoints
from ddrl.store import runs as store
from ddrl.store.connection import StoreError as StoreError

if TYPE_CHECKING:
    from ddrl.policy import LoadedPolicy
else:
    LoadedPolicy = Any  # which loads torch

Workers = Annotated[int | None, Field(ge=0, le=1024)]
Version = int | str | None
P = ParamSpec("P")
T = TypeVar("T")


def _checked(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments outside their types and limits with an InputError; an outage becomes a ServerError."""
    validated = functools.cache(lambda: validate_call(function))  # the first call finds all types defined

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            with _reached():
                return validated()(*args, **options)
        except ValidationError as error:
            item, names = error.errors()[0], [*inspect.signature(function).parameters]
            place = item["loc"][0]
            name = names[place] if isinstance(place, int) and place < len(names) else place
            reason = f"{item['input']!r:.200} cannot be used; {item['msg'][0].lower()}{item['msg'][1:]}"
            raise InputError(f"{function.__name__}: {name}: {reason}") from None

    return call


@contextmanager
def _reached() -> Iterator[None]:
    """Make an outage a ServerError."""
    try:
        yield
    except connection.OUTAGES as error:
        raise ServerError(connection.outage(error) or str(error)) from error


@_checked
def submit(
    config: str | Path | Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    workers: Workers = None,
    learner: bool | None = None,
    initial: str | Path | None = None,
) -> Run:
    """Start a run as `ddrl submit --detach` does: its processes go on when this one ends.

    They are processes of their own: an environment or a network of yours is named by its module, "my_pkg.module:make".

    Args:
        config: YAML file, name of a preset, or the settings themselves.
        options: overrides by dotted names, such as {"algorithm.gamma": 0.98}.
        seed: of the run.
        workers: rollout processes to start here; by default all cores but one with the embedded server, else none.
        learner: start a learner here; by default with the embedded server only.
        initial: policy file or RUN@VERSION whose weights the run starts from.

    Raises:
        ConfigError, EnvError, InputError, StoreError: the run cannot be started so; nothing of it is left.
        ServerError: no server answers.
    """
    given = {} if seed is None else {"seed": seed}
    source = config if isinstance(config, Mapping) else configs.find(str(config))
    resolved = configs.load(source, {**(options or {}), **given})
    starts_learner = submission.starts_learner(learner, [resolved])
    client, num_workers = _client(), submission.num_workers_here(workers)
    submission.check_here(num_workers, [resolved] if starts_learner else [])
    weights = None if initial is None else str(initial)
    [run] = submission.create_all(client, resolved, 1, weights, num_workers)
    submission.prune(client)
    processes.start_detached([run], num_workers, starts_learner)
    return Run(run)


@_checked
def run(name: str = "last") -> Run:
    """Return the run of an id, of the start of one, or the newest.

    Raises:
        UnknownRunError: there is none.
        ServerError: no server answers.
    """
    return Run(output.resolve(_client(), name))


@_checked
def all_runs() -> list[Run]:
    """Return the runs on the server, the newest last."""
    return [Run(run) for run in store.names(_client())]


@dataclass(frozen=True)
class Run:
    """A run on the server that `DDRL_REDIS_URL` names.

    Attributes:
        id: by which all commands know it.
    """

    id: str

    @property
    @_checked
    def status(self) -> str:
        """Such as active, paused, solved, time, stopped or failed."""
        state = store.state(_client(), self.id)
        return state.outcome or state.status

    # --- watch ---------------------------------------------------------------------------------------------

    @_checked
    def summary(self) -> dict[str, Any]:
        """Return the results so far: what `ddrl submit --json` prints in the end."""
        return records.summary(_client(), self.id)

    @_checked
    def records(self) -> Records:
        """Return the history: figures of the learner, training episodes, evaluations, journal."""
        return records.read(_client(), self.id)

    @_checked
    def watch(self, every_s: Annotated[float, Field(gt=0)] = 1.0) -> Iterator[Figures]:
        """Yield the state of the run now and then, the last time when it has ended.

        Its lists are those of the state before, with what has been added. A server that is away is waited for;
        `Figures.hint` says so, or why nothing happens.

        Raises:
            UnknownRunError, ServerError: there is no such run, or it or the server has been away for five minutes.
        """
        polled = watcher.polls([Watcher(_client(), self.id)])

        def states() -> Iterator[Figures]:
            is_active = True
            while is_active:
                with _reached():
                    [figures] = next(polled)
                yield replace(figures)
                if is_active := not figures.state.ended:
                    time.sleep(every_s)

        return states()

    @_checked
    def wait(self, timeout_s: Annotated[float, Field(gt=0)] | None = None) -> dict[str, Any]:
        """Wait until the run has ended, and return its summary; why nothing happens goes to stderr.

        Raises:
            TimeoutError: it has not ended within `timeout_s`; it goes on.
        """
        deadline, said = None if timeout_s is None else time.monotonic() + timeout_s, ""
        for figures in self.watch():
            if figures.hint not in (said, "starting"):
                output.note(f"{self.id}: {figures.hint or 'goes on'}")
                said = figures.hint
            if deadline is not None and time.monotonic() > deadline and not figures.state.ended:
                raise TimeoutError(f"{self.id}: has not ended within {timeout_s:g} s; it goes on")
        return self.summary()

    # --- change --------------------------------------------------------------------------------------------

    @_checked
    def set(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings while the run goes on, all or none; return what has changed, as `ddrl set --json` prints it.

        Raises:
            InputError, ConfigError, StoreError: the run has ended, or an option or a value cannot be used.
        """
        wanted = {str(name): configs.plain(str(name), value) for name, value in options.items()}
        return settings.apply(_client(), self.id, wanted)

    @_checked
    def pause(self) -> None:
        """Pause the run until `resume`; nothing is lost. InputError: it is paused or has ended."""
        operator.change_status(_client(), self.id, "paused")

    @_checked
    def resume(
        self, *, workers: Workers = None, learner: bool | None = None, time: float | str | None = None
    ) -> None:
        """Go on from the newest checkpoint, of a run that the server has lost from the one in its folder.

        Args:
            workers, learner: to start here, as of `submit`; by default nothing where a learner holds the run.
            time: more of it, in seconds, or such as "15m".
        """
        more_s = None if time is None else configs.duration(str(time), "time")
        client = _client()
        run = local_checkpoints.find_or_restore(client, self.id, Path("runs"))
        num_workers, starts_learner = submission.reactivate(client, [run], workers, learner, more_s)
        processes.start_detached([run], num_workers, starts_learner)

    @_checked
    def stop(self) -> dict[str, Any]:
        """End the run, and return its summary once all is saved. InputError: it has ended."""
        operator.change_status(_client(), self.id, "stopped")
        processes.finish(_client(), self.id)
        return self.summary()

    # --- results -------------------------------------------------------------------------------------------

    @_checked
    def policy(self, version: Version = None) -> LoadedPolicy:
        """Return a policy that acts.

        Args:
            version: a number, "best" or "latest"; by default the best, and the latest before there is one.
        """
        from ddrl.policy import from_run

        return from_run(_client(), self.id, self._version(version))

    @_checked
    def export(
        self, path: str | Path = ".", version: Version = None, *, onnx: bool = False, force: bool = False
    ) -> Path:
        """Write a policy to a file, which `ddrl.policy.load` reads anywhere; return the file.

        Args:
            path: of the file, or a folder for RUN-vVERSION.safetensors, or .onnx.
            version: as of `policy`.
            onnx: write ONNX, which onnxruntime plays in any language.
            force: replace the file if there is one.
        """
        if onnx:
            return policies.write_onnx(self.policy(version), Path(path), force)
        return policies.write(_client(), self.id, self._version(version), Path(path), force)

    @_checked
    def evaluate(
        self,
        episodes: Annotated[int, Field(ge=1)] = 100,
        version: Version = None,
        *,
        seed: Annotated[int, Field(ge=0)] | None = None,
        num_envs: Annotated[int, Field(ge=1, le=4096)] = 20,
        local: bool = False,
        on_progress: Callable[[int, int], None] = lambda played, of: None,
    ) -> dict[str, Any]:
        """Play a policy, on the run's fleet if there is one; return what `ddrl evaluate --json` prints.

        Args:
            episodes: to play.
            version: as of `policy`.
            seed: of the first episode; by default that of confirmations.
            num_envs: episodes side by side.
            local: play here, even if there is a fleet.
            on_progress: called with the number of episodes that have ended, and of all.
        """
        from ddrl.cli.evaluate import Scoring, episodes_of

        loaded = self.policy(version)
        scoring = Scoring(loaded, episodes_of(loaded, episodes, seed, num_envs=num_envs), on_progress)
        scoring.play(None if local else _client())
        return {**scoring.report(), **scoring.each()}

    def _version(self, version: Version) -> int:
        store.state(_client(), self.id)  # UnknownRunError, if it was deleted
        return policies.choose(_client(), self.id, None if version is None else str(version))


_connections, _lock = ExitStack(), threading.Lock()
atexit.register(_connections.close)


def _client() -> output.Client:
    """Return the connection to the server of now; each stays open until this process ends."""
    with _lock:
        return _connected(connection.url())


@functools.cache
def _connected(url: str) -> output.Client:
    return _connections.enter_context(output.server())
