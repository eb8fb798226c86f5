"""Weights & Biases: project `WANDB_PROJECT`, or ddrl. `WANDB_MODE=offline` keeps it in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import wandb

from ddrl.runs.records import Records
from ddrl.trackers import Row, results


class Tracker:
    """A run of W&B with ddrl's id."""

    def __init__(self, found: Records, folder: Path) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ddrl"),
            id=found.state.run,
            name=found.state.run,
            config=found.config.model_dump(mode="json", by_alias=True),
            dir=folder,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", disable_git=True, silent=True),
        )
        self.place = "" if self._run.offline else str(self._run.path)
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, rows: Iterable[Row]) -> None:
        """Tell it of rows."""
        for steps, at_s, figures in rows:
            self._run.log({"env_steps": steps, "at_s": at_s, **figures})

    def finish(self, found: Records, folder: Path) -> None:
        """Give it curve and policy."""
        for path in results(folder):
            if path.suffix == ".png":
                self._run.log({"curve": wandb.Image(str(path))})
            elif path.suffix == ".mp4":
                self._run.log({path.stem: wandb.Video(str(path), format="mp4")})
            elif path.suffix == ".safetensors":
                self._run.log_artifact(str(path), name=f"{found.state.run}-policy", type="model")
        self._run.summary["status"] = found.state.outcome or found.state.status
        self._run.finish(exit_code=int(found.state.outcome == "failed"))
