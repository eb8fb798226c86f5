"""Trackio: project `TRACKIO_PROJECT`, or ddrl, in its folder on this machine; `trackio show` shows it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import trackio

from ddrl.runs.records import Records
from ddrl.trackers import Row, results


class Tracker:
    """A run of Trackio with ddrl's id."""

    place = ""

    def __init__(self, found: Records, folder: Path) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "ddrl"),
            name=found.state.run,
            config=found.config.model_dump(mode="json", by_alias=True),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, rows: Iterable[Row]) -> None:
        """Tell it of rows."""
        for steps, _, figures in rows:
            self._run.log({"env_steps": steps, **figures}, step=steps)

    def finish(self, found: Records, folder: Path) -> None:
        """Give it the curve, and end."""
        for path in results(folder):
            if path.suffix == ".png":
                self._run.log({"curve": trackio.Image(str(path))}, step=found.state.appended_steps)
        self._run.finish()
