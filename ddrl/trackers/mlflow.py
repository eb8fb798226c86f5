"""MLflow: the server that `MLFLOW_TRACKING_URI` names; experiment `MLFLOW_EXPERIMENT_NAME`, or ddrl."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from ddrl.config import flat
from ddrl.runs.records import Records
from ddrl.trackers import Row, results

TAG = "ddrl.run"
BATCH = 900  # figures of one request; the server takes 1,000
STATUSES = {"failed": "FAILED", "stopped": "KILLED", "": "SCHEDULED"}  # by outcome; others are FINISHED


class Tracker:
    """A run of MLflow whose tag is ddrl's id."""

    def __init__(self, found: Records, folder: Path) -> None:
        self._client, state = MlflowClient(), found.state
        is_far = urlsplit(uri := self._client.tracking_uri).scheme in ("http", "https", "databricks")
        self.place = uri if is_far else ""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ddrl")
        there = self._client.get_experiment_by_name(name)
        experiment = there.experiment_id if there else self._client.create_experiment(name)
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{state.run}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, run_name=state.run, tags={TAG: state.run})
            self._id = made.info.run_id
        tree = flat(found.config.model_dump(mode="json", by_alias=True))
        known = runs[0].data.params if runs else {}  # it refuses another value
        params = [Param(key, str(value)[:500]) for key, value in tree.items() if key not in known]
        self._client.log_batch(self._id, params=params)

    def log(self, rows: Iterable[Row]) -> None:
        """Tell it of rows."""
        figures = []
        for steps, at_s, named in rows:
            figures += [Metric(name, value, round(1e3 * at_s), steps) for name, value in named.items()]
        for begin in range(0, len(figures), BATCH):
            self._client.log_batch(self._id, metrics=figures[begin : begin + BATCH])

    def finish(self, found: Records, folder: Path) -> None:
        """Give it curve and policy, and the end."""
        for path in results(folder):
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, STATUSES.get(found.state.outcome, "FINISHED"))
