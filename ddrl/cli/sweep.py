"""`ddrl sweep`: many runs of one config, for the best values of some of its options.

Optuna says what to try next; each trial is a run, so that all share the fleet, and each can be watched, compared and
resumed like any other. What a trial has reached is reported at its evaluations; one that lags behind is stopped. The
trials are kept in a file, from which an interrupted sweep goes on.

Population based training (Jaderberg et al. 2017, arXiv:1711.09846) is the same with trials that follow others: a run
among the worst is stopped, and a new one goes on from the checkpoint of one of the best, with its options perturbed.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
import yaml
from pydantic import Field, ValidationError, model_validator

from ddrl import config as configs
from ddrl.cli import output, settings, submit
from ddrl.cli.format import duration, number
from ddrl.cli.output import Client, InputError, Json, note
from ddrl.cli.runs import change_status
from ddrl.config import ConfigError, RunConfig, Section
from ddrl.runs import processes as local
from ddrl.store import checkpoints, connection, evaluations
from ddrl.store import runs as store
from ddrl.store.connection import StoreError
from ddrl.store.runs import UnknownRunError

if TYPE_CHECKING:
    import optuna

    from ddrl.runs.initial_weights import LearnerState

POLL_S = 0.5
FOLDER = Path("sweeps")
STUDY_HELP = "YAML file: config, search, trials, parallel; see the guide."
RUN, SEARCH = "run", "search"  # attributes of a trial, and of the study
# Attributes of a trial that follows another: its run; what was spent before, by the names of `stop`.
PARENT, SPENT = "parent", "spent"
QUARTER = 0.25  # of the population is replaced, by a quarter
FACTORS = (0.8, 1.25)  # by which options are perturbed


class Range(Section):
    """Numbers from `low` to `high`, whole ones if both are whole."""

    low: int | float
    high: int | float
    log: bool = False
    """Try small and large orders of magnitude alike."""

    @model_validator(mode="after")
    def _consistent(self) -> Range:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low {self.low}, high {self.high}: low is below high, and with log above 0")
        return self


class Study(Section):
    """A study: a config, the options to vary, and how."""

    name: str = Field("sweep", pattern=r"^[a-z0-9][a-z0-9-]{0,29}$")
    config: str | dict[str, Any]
    """A preset, a YAML file, or the settings."""
    options: dict[str, Any] = {}
    """Settings of all trials, by dotted names."""
    search: dict[str, Range | list[Any]] = Field(min_length=1)
    """Option -> {low, high, log}, or a list of choices."""
    trials: int = Field(16, ge=1)
    parallel: int = Field(2, ge=1, le=256)
    """Runs at a time."""
    method: Literal["trials", "population"] = "trials"
    """Each by itself, or a population whose worst members go on from the best ones, with perturbed live options."""
    compare_every: int = Field(5, ge=1)
    """Evaluations of a member between two comparisons in a population; their mean counts."""
    metric: Literal["return", "time"] = "return"
    """The best evaluation's mean return, or the seconds of training until the target is confirmed."""
    sampler: Literal["tpe", "random"] = "tpe"
    prune: bool = True
    """With metric return: stop a trial whose evaluation is below the median of the others at as many steps."""
    storage: str | None = None
    """Optuna's, such as postgresql://...; null: a file in sweeps/NAME."""
    seed: int = 1

    @model_validator(mode="after")
    def _fits_the_method(self) -> Study:
        given = self.model_fields_set
        if self.method == "trials" and "compare_every" in given:
            raise ValueError("compare_every: is for a population; set method to population, or remove it")
        is_fit = self.metric == "return" and "prune" not in given and 1 < self.parallel < self.trials
        if self.method == "population" and not is_fit:
            needs = "metric return, no prune, 2 or more in parallel, and more trials than that"
            raise ValueError(f"method population: needs {needs}")
        return self

    def base(self, options: Mapping[str, Any]) -> RunConfig:
        """Return the config of a trial with these values.

        Raises:
            ConfigError: an option or a value cannot be used.
        """
        source = configs.find(self.config) if isinstance(self.config, str) else self.config
        return configs.load(source, {**self.options, **options})


def sweep(
    study: Annotated[Path, typer.Argument(help=STUDY_HELP)],
    workers: submit.Workers = None,
    with_learner: submit.WithLearner = None,
    json_output: Json = False,
) -> None:
    """Try values of a config's options, each as a run of its own; print the best, and keep it as YAML."""
    wanted = read(study)
    try:
        import optuna
    except ImportError:
        raise InputError("ddrl sweep: optuna is not installed; pip install 'ddrl[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with output.server() as client:
        base, folder = wanted.base({}), FOLDER / wanted.name
        num_workers = submit.num_workers_here(workers, min(wanted.parallel, wanted.trials))
        learns = submit.starts_learner(with_learner, [base])
        submit.check_here(num_workers, [base] if learns else [])
        local.check_folder(folder)
        searched = _open(wanted, folder)
        with local.Processes(folder) as processes:
            if num_workers:
                processes.start_workers(num_workers)
            search = _Search(client, wanted, searched, processes if learns else None)
            try:
                for line in search.run():
                    if line and not json_output:
                        note(line)
                    try:
                        local.keep_running(client, processes, search.runs, note)
                    except local.ProcessError as error:
                        if error.run is None:
                            raise
                        note(str(error))  # of one trial; it has failed
            except KeyboardInterrupt:
                note(f"interrupted; `ddrl sweep {study}` goes on")
                raise
    rows = _rows(searched)
    best = next((row for row in rows if row["value"] is not None), None)
    if best:
        _keep(best, wanted, searched, folder)
    if json_output:
        output.emit({"study": wanted.name, "trials": rows, "best": best, "folder": str(folder.resolve())})
        return
    columns = ("trial", "status", wanted.metric, *wanted.search, "run")
    cells = [(str(row["trial"]), row["status"], row["value"], *map(_short, row["options"].values()), row["run"])
             for row in rows]  # fmt: skip
    output.table(columns, cells, left=[name for name in columns if name != wanted.metric])
    files = f"the best is in {folder / 'best.yaml'}, a plot in {folder / 'sweep.png'}"
    note(files if best else "no trial has a result")


def read(path: Path) -> Study:
    """Return the study of a YAML file, each of whose values can be used.

    Raises:
        ConfigError: names the option, the value and the remedy.
    """
    try:
        tree = configs.parse_yaml(path.read_text("utf-8"))
        study = Study.model_validate({"name": path.stem.lower(), **tree} if isinstance(tree, dict) else tree)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else configs.first_line(error)
        if isinstance(error, ValidationError):
            item = error.errors()[0]
            reason = f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}"
        raise ConfigError(f"{path}: {reason}; see `ddrl sweep` in the guide") from None
    from ddrl import envs
    from ddrl.runs import submit as submission

    base = study.base({})
    spaces = envs.describe(base.env)
    for option, values in study.search.items():
        for value in (values.low, values.high) if isinstance(values, Range) else values:
            try:
                if study.method == "population":
                    settings.change(base, spaces, {option: value})
                config = study.base({option: value})
                submission.prepare(config, spaces if config.env == base.env else None)
            except (ConfigError, InputError) as error:
                raise ConfigError(f"{path}: search: {error}") from None
    if study.metric == "time" and base.stop.return_ is None:
        raise ConfigError(f"{path}: metric time: the config has no target; set stop.return")
    return study


def _open(wanted: Study, folder: Path) -> optuna.Study:
    """Return the study as the storage has it, or a new one.

    Raises:
        InputError: the storage cannot be used, or has another study of this name.
    """
    import optuna

    storage = wanted.storage or f"sqlite:///{(folder / 'trials.db').resolve()}"
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    search = json.loads(wanted.model_dump_json(include={"config", "options", "search", "metric", "method"}))
    try:
        found = optuna.create_study(
            study_name=wanted.name,
            storage=storage,
            direction="maximize" if wanted.metric == "return" else "minimize",
            sampler=samplers[wanted.sampler](seed=wanted.seed),
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=1),  # `_lags` asks it, if at all
            load_if_exists=True,
        )
        known = found.user_attrs.get(SEARCH)
        if known is None:
            found.set_user_attr(SEARCH, search)
    except Exception as error:  # of SQLAlchemy, a driver, or Optuna
        reason = configs.first_line(error)
        raise InputError(f"storage {storage}: cannot be used ({reason}); name another") from None
    if known not in (None, search):
        remedy = "give this one another name"
        raise InputError(f"storage {storage}: has another study named {wanted.name}; {remedy}")
    return found


class _Search:
    """Runs trials until there are enough.

    Args:
        client: connection to the server.
        wanted: the study.
        searched: what Optuna keeps of it.
        processes: start the runs' learners here; None: the fleet's learn them.
    """

    def __init__(
        self, client: Client, wanted: Study, searched: optuna.Study, processes: local.Processes | None
    ) -> None:
        self._client, self._wanted, self._searched, self._processes = client, wanted, searched, processes
        self._going: dict[str, optuna.Trial] = {}
        self._cursors: dict[str, bytes] = {}
        self._best: dict[str, float] = {}
        self._lagging: set[str] = set()
        self._recent: dict[str, deque[float]] = {}  # returns of a run's last evaluations
        self._due: Counter[str] = Counter()  # evaluations since a run was compared

    @property
    def runs(self) -> list[str]:
        """The trials' runs that go on."""
        return [*self._going]

    def run(self) -> Iterator[str]:
        """Yield a line for each trial that begins or ends, and an empty one at each look at a trial that goes on."""
        import optuna

        for frozen in self._searched.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            yield self._go_on(optuna.trial.Trial(self._searched, frozen._trial_id))
        while True:
            connection.retry(self._client.ping)
            for _ in range(min(self._wanted.parallel - len(self._going), self._left())):
                yield self._begin()
            if not self._going:
                return
            # All runs are read before any are compared.
            news = {run: connection.retry(partial(self._read, run)) for run in self._going}
            for run, is_new in news.items():
                yield self._look(run, is_new)
            time.sleep(POLL_S)

    def _left(self) -> int:
        """Return how many trials may begin; of a population the first members, and those that follow others."""
        names = [trial.state.name for trial in self._searched.get_trials(deepcopy=False)]
        waiting, left = names.count("WAITING"), self._wanted.trials - len(names)
        if self._wanted.method == "population":
            num_first = len(names) - waiting - names.count("FAIL")
            return waiting + max(0, min(left, self._wanted.parallel - num_first))
        return waiting + left

    def _begin(self) -> str:
        import optuna

        trial = self._searched.ask()
        parent = trial.user_attrs.get(PARENT)
        options = {option: _suggest(trial, option, values) for option, values in self._wanted.search.items()}
        shown = ", ".join(f"{name} {_short(value)}" for name, value in options.items())
        config = self._wanted.base(options).model_copy(update={"name": f"{self._wanted.name}-{trial.number}"})
        try:
            config, state = self._following(config, trial, parent) if parent else (config, None)
            [run] = submit.create_all(self._client, config, 1, None, 0, state=state)
        except (ConfigError, StoreError) as error:  # values that cannot go together; the parent is gone
            self._searched.tell(trial, state=optuna.trial.TrialState.FAIL)
            return f"trial {trial.number}: {shown}: {error}"
        trial.set_user_attr(RUN, run)
        self._follow(trial, run)
        return f"trial {trial.number}: {run}: {shown}" + (f", from {parent}" if parent else "")

    def _following(
        self, config: RunConfig, trial: optuna.Trial, parent: str
    ) -> tuple[RunConfig, LearnerState]:
        """Return the config of a trial that goes on from a run, where all that came before counts, and its state."""
        from ddrl.algorithms import base
        from ddrl.runs.initial_weights import learner_state

        if (state := learner_state(self._client, parent, begins_anew=False)) is None:
            raise ConfigError(f"{parent}: has no checkpoint any more")
        before = trial.user_attrs[SPENT]
        spent = {name: used + before.get(name, 0) for name, used in state.spent.items()}
        trial.set_user_attr(SPENT, spent)
        left = {name: max(1, total - spent[name]) for name, total in config.stop if name in spent and total}
        algorithm = dict(config.algorithm)
        own = base.config_class(algorithm["name"]).model_fields
        if "critic_warmup_updates" in own and algorithm.get("form") != "sqn":
            algorithm["critic_warmup_updates"] = 0  # they are not fresh
        stop = config.stop.model_copy(update=left)
        return config.model_copy(update={"stop": stop, "algorithm": algorithm}), state

    def _go_on(self, trial: optuna.Trial) -> str:
        """Go on with a trial of an earlier command, or end it if its run is gone."""
        import optuna

        run = trial.user_attrs.get(RUN)
        try:
            state = store.state(self._client, run or "")
        except UnknownRunError:
            self._searched.tell(trial, state=optuna.trial.TrialState.FAIL)
            return f"trial {trial.number}: its run is gone"
        if state.status == "paused":
            store.reactivate(self._client, state.run)
        self._follow(trial, state.run)
        return f"trial {trial.number}: {state.run} goes on"

    def _follow(self, trial: optuna.Trial, run: str) -> None:
        self._going[run], self._cursors[run], self._best[run] = trial, b"0-0", -math.inf
        if self._processes and not store.state(self._client, run).ended:
            local.start(self._client, self._processes, [run], 0, with_learner=True)

    def _read(self, run: str) -> bool:
        """Report the new evaluations of a run; return whether there are any."""
        trial = self._going[run]
        results, self._cursors[run] = evaluations.results(self._client, run, self._cursors[run])
        for row in results:
            mean = row["return_mean"]
            self._best[run] = max(self._best[run], mean)
            if row["purpose"] == "watch" and self._wanted.metric == "return":
                trial.report(mean, row["env_steps"])
                self._recent.setdefault(run, deque(maxlen=self._wanted.compare_every)).append(mean)
                self._due[run] += 1
        return bool(results)

    def _look(self, run: str, is_new: bool) -> str:
        """Stop a run that lags; return a line if its trial has ended, else an empty one."""
        import optuna

        trial, states, state = self._going[run], optuna.trial.TrialState, self._state(run)
        if is_new and not state.outcome and self._lags(run, trial):
            self._lagging.add(run)
            with contextlib.suppress(InputError):  # it has ended, or the answer to the first try was lost
                connection.retry(partial(change_status, self._client, run, "stopped"))
        if not state.ended:
            return ""
        del self._going[run]
        value = self._value(state)
        kind = states.FAIL if value is None else states.COMPLETE
        if run in self._lagging and state.outcome == "stopped":
            kind = states.PRUNED
        self._searched.tell(trial, value if kind == states.COMPLETE else None, kind)
        shown = "-" if value is None else duration(value) if self._wanted.metric == "time" else number(value)
        return f"trial {trial.number}: {kind.name.lower()}, {shown} ({run}, {state.outcome})"

    def _state(self, run: str) -> store.RunState:
        return connection.retry(partial(store.state, self._client, run))

    def _lags(self, run: str, trial: optuna.Trial) -> bool:
        """Return whether a run is to be stopped; of a population, enqueue the one that takes its place."""
        if self._wanted.method == "population":
            has_room = len(self._searched.get_trials(deepcopy=False)) < self._wanted.trials
            return has_room and self._due[run] >= self._wanted.compare_every and self._is_replaced(run)
        return self._wanted.prune and self._wanted.metric == "return" and bool(trial.should_prune())

    def _is_replaced(self, run: str) -> bool:
        """Compare a run with the others; if it is among the worst, enqueue a trial that follows one of the best."""
        self._due[run] = 0
        evaluated = [one for one in self._going if one in self._recent]
        compared = [one for one in evaluated if not self._state(one).outcome]
        means = {one: statistics.fmean(self._recent[one]) for one in compared}
        order = sorted(means, key=means.__getitem__)
        num = max(1, round(QUARTER * len(order)))
        if run not in order[:num] or means[order[-num]] <= means[run]:
            return False
        draw = random.Random(f"{self._wanted.seed} {run}")
        parent = draw.choice(order[-num:])
        if connection.retry(partial(checkpoints.newest_pointer, self._client, parent)) is None:
            return False
        followed, search = self._going[parent], self._wanted.search
        params = {name: _perturbed(followed.params[name], search[name], draw) for name in search}
        spent = followed.user_attrs.get(SPENT, {})
        self._searched.enqueue_trial(params, user_attrs={PARENT: parent, SPENT: spent})
        return True

    def _value(self, state: store.RunState) -> float | None:
        """Return what the trial has reached, if it has a result."""
        if self._wanted.metric == "time":
            return state.train_s(state.ended_s) if state.outcome == "solved" else None
        best = state.evaluation["return_mean"] if state.evaluation else self._best[state.run]
        return float(best) if math.isfinite(best) and state.outcome != "failed" else None


def _suggest(trial: optuna.Trial, option: str, values: Range | list[Any]) -> Any:
    if isinstance(values, list):  # as Optuna keeps no lists
        return json.loads(str(trial.suggest_categorical(option, [json.dumps(value) for value in values])))
    bounds: Any = (values.low, values.high)
    suggest: Any = trial.suggest_int if set(map(type, bounds)) == {int} else trial.suggest_float
    return suggest(option, *bounds, log=values.log)


def _perturbed(value: Any, values: Range | list[Any], draw: random.Random) -> Any:
    """Return a value near that of a trial's parameter; of a list one beside it."""
    if isinstance(values, list):
        texts = [json.dumps(one) for one in values]
        place = texts.index(value) + draw.choice((-1, 1))
        return texts[min(max(place, 0), len(texts) - 1)]
    factor = draw.choice(FACTORS)
    changed = value * factor
    if isinstance(value, int):  # by one at least
        changed = min(math.floor(changed), value - 1) if factor < 1 else max(math.ceil(changed), value + 1)
    return min(max(changed, values.low), values.high)


def _rows(searched: optuna.Study) -> list[dict[str, Any]]:
    """Return a row for each trial, the best first."""
    rows = []
    for trial in searched.get_trials():
        status, params = trial.state.name.lower(), trial.params.items()
        value = trial.value if status == "complete" else None
        options = {name: json.loads(one) if isinstance(one, str) else one for name, one in params}
        row = {"trial": trial.number, "run": trial.user_attrs.get(RUN), "status": status}
        rows.append(row | {"from": trial.user_attrs.get(PARENT), "value": value, "options": options})
    sign = -1 if searched.direction.name == "MAXIMIZE" else 1
    return sorted(rows, key=lambda row: (row["value"] is None, sign * (row["value"] or 0.0)))


def _keep(best: dict[str, Any], wanted: Study, searched: optuna.Study, folder: Path) -> None:
    """Write the config of the best row, and a plot of all trials."""
    tree = wanted.base(best["options"]).model_dump(mode="json", by_alias=True)
    value, trial, run = best["value"], best["trial"], best["run"]
    first = f"# {wanted.metric} {value:.6g}: trial {trial} of {wanted.name}, run {run}\n"
    (folder / "best.yaml").write_text(first + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    _plot(wanted, searched, folder / "sweep.png")


def _plot(wanted: Study, searched: optuna.Study, path: Path) -> None:
    """Plot the results against each option."""
    import matplotlib
    from optuna.visualization.matplotlib import plot_slice

    matplotlib.use("Agg")
    warnings.simplefilter("ignore")  # it calls itself experimental
    panels = np.ravel(plot_slice(searched, [*wanted.search], target_name=wanted.metric))
    panels[0].figure.set_size_inches(4 * len(panels), 3.8)
    panels[0].figure.savefig(path, dpi=110, bbox_inches="tight")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{value:.4g}" if isinstance(value, float) else text
