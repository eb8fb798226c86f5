"""`ddrl export --folder`: what it holds, and what is refused; nothing half-made is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from redis import Redis
from support import commands
from support.runs import publish_initial, start, target_config
from support.store import take

from ddrl import policy
from ddrl.cli import model_card
from ddrl.config import RunConfig, load, validate
from ddrl.runs.evaluation import score
from ddrl.store.evaluations import Evaluation, OpenEvaluations
from ddrl.types import EvaluationResult

CARTPOLE = validate(
    {
        "env": {"id": "CartPole-v1", "metrics": ["is_success"]},
        "algorithm": {"name": "ppo", "hidden_sizes": [8]},
    }
)


def published(client: Redis, config: RunConfig) -> tuple[str, int]:
    """A run with a first version of real weights, and its learner's token."""
    run = start(client, config)
    token = take(client, run)
    publish_initial(client, run, token)
    return run, token


def evaluate(client: Redis, run: str, token: int, purpose: str, num: int, mean: float) -> None:
    done = Evaluation(version=0, first_seed=num, num_episodes=num, purpose=purpose)
    returns = tuple([mean - 1.0, mean + 1.0] * (num // 2))
    OpenEvaluations(client, run, send=lambda _: None, timeout_s=60, token=token).store(
        done, EvaluationResult(returns, (10,) * num, {"is_success": [0.25] * num})
    )


# imageio's writer leaves pipes open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_folder_has_all_that_others_need(client: Redis, tmp_path: Path) -> None:
    run, token = published(client, CARTPOLE)
    evaluate(client, run, token, "watch", 200, 300.0)
    evaluate(client, run, token, "confirm", 100, 250.0)
    folder = tmp_path / "deep" / "card"
    report = commands.call_json("export", run, "--folder", str(folder))
    assert report["path"] == str(folder / "policy.safetensors")
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "config.yaml", "curve.png", "episode.mp4", "policy.safetensors"}
    assert [path.name for path in folder.parent.iterdir()] == ["card"]
    assert load(folder / "config.yaml").env.id == "CartPole-v1"
    assert score(policy.load(folder / "policy.safetensors"), [1]).returns[0] > 0
    _, facts, text = (folder / "README.md").read_text().split("---\n", 2)
    [model] = yaml.safe_load(facts)["model-index"]
    assert model["results"][0]["metrics"][0]["value"] == "250.00 +/- 1.00"  # the confirmation
    assert "| return | info/is_success | episodes | seeds from | purpose |\n|---|---|---|---|---|\n" in text
    assert "| 250.0 ± 1.0 | 0.25 | 100 | 100 | confirm |" in text and run in text
    assert "| 300.0 ± 1.0 | 0.25 | 200 |" in text


def test_what_is_there_is_replaced_only_by_force(client: Redis, tmp_path: Path) -> None:
    run, _ = published(client, CARTPOLE)
    folder = tmp_path / "card"
    folder.mkdir()
    (folder / "mine").write_text("x")
    assert "add --force" in commands.refused("export", run, "--folder", str(folder))
    assert (folder / "mine").exists()
    commands.call("export", run, "--folder", str(folder), "--force")
    assert not (folder / "mine").exists() and "was not evaluated" in (folder / "README.md").read_text()
    line = commands.refused("export", run, "--folder", str(folder), "--output", "x")
    assert "not together" in line


def test_an_environment_that_draws_nothing_has_no_video(client: Redis, tmp_path: Path) -> None:
    run, _ = published(client, target_config())
    printed = commands.run("export", run, "--folder", str(tmp_path / "card"))
    assert printed.code == 0 and "no video" in printed.err
    assert "An episode" not in (tmp_path / "card" / "README.md").read_text()


def test_nothing_half_made_is_left(client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = published(client, CARTPOLE)
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in commands.refused("export", run, "--folder", str(tmp_path / "file" / "card"))

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_card, "card", full)
    assert "No space left" in commands.refused("export", run, "--folder", str(tmp_path / "card"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
