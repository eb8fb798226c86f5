"""What `import ddrl` offers: runs, from Python scripts and notebooks, in the words of the command line.

    import ddrl

    run = ddrl.submit("lunar", {"algorithm.gamma": 0.99}, seed=1)
    for figures in run.watch():
        print(figures.state.appended_steps, figures.row.get("return_mean"))
    print(run.evaluate(100)["return_mean"])
    action = run.policy().action(observation)

`DDRL_REDIS_URL` names the server; without it, ddrl starts one of its own, which this process keeps until it ends.
Errors are those of the command line, whose messages are one line with the remedy: ConfigError, InputError, StoreError
and EnvError for what was asked, ServerError where no server can be reached.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddrl import config as configs
from ddrl.cli import output, policies, settings, watcher
from ddrl.cli import runs as operator
from ddrl.cli import submit as submission
from ddrl.cli.watcher import Figures
from ddrl.runs import processes, records
from ddrl.runs.prune import prune_embedded
from ddrl.runs.records import Records
from ddrl.store import connection
from ddrl.store import runs as store

if TYPE_CHECKING:
    from ddrl.policy import LoadedPolicy

_connections = ExitStack()
atexit.register(_connections.close)


def submit(
    config: str | Path | Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    workers: int | None = None,
    learner: bool | None = None,
    initial: str | None = None,
) -> Run:
    """Start a run as `ddrl submit --detach` does: its processes go on when this one ends.

    Args:
        config: YAML file, name of a preset, or the settings themselves.
        options: overrides, such as {"algorithm.gamma": 0.98}.
        seed: of the run.
        workers: rollout processes to start here; by default all cores but one with the embedded server, else none.
        learner: start a learner here; by default with the embedded server only.
        initial: policy file or RUN@VERSION whose weights the run starts from.

    Raises:
        ConfigError, EnvError, InputError, StoreError: the run cannot be started so; nothing of it is left.
        ServerError: no server can be reached.
    """
    given = {} if seed is None else {"seed": seed}
    source = config if isinstance(config, Mapping) else configs.find(str(config))
    resolved = configs.load(source, {**(options or {}), **given})
    starts_learner = submission.starts_learner(learner, [resolved])
    client, num_workers = _client(), submission.num_workers_here(workers)
    [run] = submission.create_all(client, resolved, 1, initial, num_workers)
    prune_embedded(client)
    processes.start_detached([run], num_workers, starts_learner)
    return Run(run)


def run(name: str = "last") -> Run:
    """Return the run of an id, of the start of one, or the newest.

    Raises:
        UnknownRunError: there is none.
        ServerError: no server can be reached.
    """
    return Run(store.resolve(_client(), name))


def all_runs() -> list[Run]:
    """Return the runs on the server, the newest last."""
    return [Run(run) for run in store.names(_client())]


class Run:
    """A run on the server.

    Attributes:
        id: by which all commands know it.
    """

    def __init__(self, run: str) -> None:
        self.id = run

    def __repr__(self) -> str:
        return f"<ddrl run {self.id}>"

    @property
    def status(self) -> str:
        """Such as active, paused, solved, time, stopped or failed."""
        state = store.state(_client(), self.id)
        return state.outcome or state.status

    # --- watch ---------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the results so far: what `ddrl submit --json` prints in the end."""
        return records.summary(_client(), self.id)

    def records(self) -> Records:
        """Return the history: figures of the learner, training episodes, evaluations, journal."""
        return records.read(_client(), self.id)

    def watch(self, every_s: float = 1.0) -> Iterator[Figures]:
        """Yield the state of the run now and then, the last time when it has ended.

        A server that is away is waited for; `Figures.hint` says so, or why nothing happens.
        """
        for [figures] in watcher.polls(_client(), [self.id]):
            yield figures
            if not figures.state.ended:
                time.sleep(every_s)

    def wait(self) -> dict[str, Any]:
        """Wait until the run has ended, and return its summary."""
        for _ in self.watch():
            pass
        return self.summary()

    # --- change --------------------------------------------------------------------------------------------

    def set(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings while the run goes on, all or none; return what has changed, as `ddrl set --json` prints it.

        Raises:
            InputError, ConfigError, StoreError: the run has ended, or an option or a value cannot be used.
        """
        return settings.apply(_client(), self.id, options)

    def pause(self) -> None:
        """Pause the run until `resume`; nothing is lost. InputError: it is paused or has ended."""
        operator.change_status(_client(), self.id, "paused")

    def resume(self, *, workers: int | None = None, learner: bool | None = None, time: str = "") -> None:
        """Go on from the newest checkpoint; what the run lacks is started here, as by `submit`.

        Args:
            workers, learner: as of `submit`; by default nothing where a learner holds the run.
            time: more of it, such as "15m".
        """
        more_s = configs.duration(time, "time") if time else None
        lacks = submission.reactivate(_client(), [self.id], workers, learner, more_s)
        processes.start_detached([self.id], *lacks)

    def stop(self) -> dict[str, Any]:
        """End the run, and return its summary once all is saved. InputError: it has ended."""
        operator.change_status(_client(), self.id, "stopped")
        processes.finish(_client(), self.id)
        return self.summary()

    # --- results -------------------------------------------------------------------------------------------

    def policy(self, version: int | str | None = None) -> LoadedPolicy:
        """Return a policy that acts.

        Args:
            version: a number, "best" or "latest"; by default the best, and the latest before there is one.
        """
        from ddrl.policy import from_run

        return from_run(_client(), self.id, self._version(version))

    def export(self, path: str | Path, version: int | str | None = None) -> None:
        """Write a policy to a file, which `ddrl.policy.load` reads anywhere."""
        from ddrl.policy import save

        save(_client(), self.id, self._version(version), Path(path))

    def evaluate(
        self,
        episodes: int = 100,
        version: int | str | None = None,
        *,
        seed: int | None = None,
        num_envs: int = 20,
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

    def _version(self, version: int | str | None) -> int:
        return policies.choose(_client(), self.id, None if version is None else str(version))


def _client() -> output.Client:
    """Return the connection to the server of now; each stays open until this process ends."""
    return _connected(connection.url())


@cache
def _connected(url: str) -> output.Client:
    return _connections.enter_context(output.server())
