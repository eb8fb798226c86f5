"""A folder to share: a policy, its config, curve and video, and a card that says what it is and what it scores."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from ddrl.cli.evaluate import check_video, video_writer
from ddrl.cli.format import counted, duration, score
from ddrl.cli.output import Client, InputError, note
from ddrl.envs import EnvError
from ddrl.runs import records
from ddrl.runs.curves import plot_run
from ddrl.runs.records import Records
from ddrl.store.evaluations import INFO

POLICY, VIDEO = "policy.safetensors", "episode.mp4"


def write(client: Client, run: str, version: int, folder: Path, *, force: bool = False) -> None:
    """Write the folder, whole or not at all.

    Args:
        client: connection to the server.
        run: its id.
        version: of the weights.
        folder: made; one that is there is replaced, if `force` says so.
        force: replace it.

    Raises:
        InputError: it is there, or cannot be written.
        NoWeightsError: the version is not kept.
    """
    if folder.exists() and not force:
        raise InputError(f"{folder}: exists already; name another folder, or add --force")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
            made = Path(draft) / folder.name
            made.mkdir()
            _fill(client, run, version, made)
            if folder.exists():
                folder.rename(Path(draft) / "replaced")
            made.rename(folder)
    except (OSError, shutil.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: cannot be written ({reason})") from None


def _fill(client: Client, run: str, version: int, folder: Path) -> None:
    from ddrl import policy

    found, totals = records.read(client, run), records.summary(client, run)
    policy.save(client, run, version, folder / POLICY)
    tree = found.config.model_dump(mode="json", by_alias=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    (folder / "curve.png").write_bytes(plot_run(found))
    seed = found.config.evaluation.seed + found.config.evaluation.num_episodes  # as confirmations
    text = card(found, version, totals["train_s"], has_video=_film(folder, seed))
    (folder / "README.md").write_text(text, encoding="utf-8")


def _film(folder: Path, seed: int) -> bool:
    """Film an episode; return False, and say why, where that is not possible."""
    from ddrl import policy
    from ddrl.runs import evaluation

    try:
        check_video(folder / VIDEO)
        with video_writer(folder / VIDEO) as on_frame:
            evaluation.score(policy.load(folder / POLICY), [seed], num_envs=1, on_frame=on_frame)
    except (InputError, EnvError) as error:
        note(f"no video: {str(error).removeprefix(f'--video {folder / VIDEO}: ')}")
    return (folder / VIDEO).exists()


def scores(found: Records, version: int) -> list[dict[str, Any]]:
    """Return the evaluations of a version, those that confirm it first, each by more episodes before fewer."""
    rows = [row for row in found.evaluated if row["version"] == version]
    return sorted(rows, key=lambda row: (row["purpose"] != "confirm", -row["num_episodes"]))


def card(found: Records, version: int, train_s: float, *, has_video: bool) -> str:
    """Return README.md: facts that hubs read, and text for people."""
    config, state = found.config, found.state
    env, algorithm = config.env.id, str(config.algorithm["name"])
    evaluated, results, names = scores(found, version), [], [INFO + name for name in config.env.metrics]
    for row in evaluated[:1]:
        value = f"{row['return_mean']:.2f} +/- {row['return_std']:.2f}"
        metric = {"type": "mean_reward", "name": "mean_reward", "value": value, "verified": False}
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        results.append({"task": task, "dataset": {"name": env, "type": env}, "metrics": [metric]})
    facts = {
        "library_name": "ddrl",
        "tags": ["ddrl", "reinforcement-learning", "deep-reinforcement-learning", env, algorithm],
        "model-index": [{"name": f"{algorithm}-{env}", "results": results}],
    }
    lines = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False)}---\n",
        f"# {env} by {algorithm.upper()}\n",
        f"Version {version} of the run `{state.run}`, trained with ddrl {state.versions.get('ddrl', '')}:"
        f" {counted(state.appended_steps, 'env step')}, {counted(state.updates, 'update')}, {duration(train_s)}.\n",
        " | ".join(("| return", *names, "episodes", "seeds from", "purpose |")),
        "|---" * (4 + len(names)) + "|",
        *(
            " | ".join((f"| {score(row)}", *(f"{row[name]:.4g}" if name in row else "-" for name in names)))
            + f" | {row['num_episodes']} | {row['first_seed']} | {row['purpose']} |"
            for row in evaluated
        ),
        "" if evaluated else f"\nThis version was not evaluated; `ddrl evaluate {POLICY}` does it.",
        "![Curve](curve.png)\n",
        f"[An episode]({VIDEO})\n" if has_video else "",
        "```python\nfrom ddrl.policy import load\n",
        f'player = load("{POLICY}")\nenv = player.make_env()\nobservation, _ = env.reset(seed=1)',
        "action = player.action(observation)\n```\n",
        f"`ddrl evaluate {POLICY} --episodes 100` scores it; `ddrl submit config.yaml` trains it anew.",
    ]
    return "\n".join(line for line in lines if line) + "\n"
