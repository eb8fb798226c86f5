"""Every shipped config can be submitted as it is, with nothing that only repeats a default."""

from __future__ import annotations

import importlib.util
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddrl import config
from ddrl.algorithms import base
from ddrl.runs import submit

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_can_be_submitted(path: Path) -> None:
    loaded = config.load(path)
    assert loaded.name == path.stem
    submit.prepare(loaded)
    assert config.validate(loaded.model_dump(mode="json", by_alias=True)) == loaded  # as a run stores it


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_holds_only_what_differs_from_the_defaults(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    loaded = config.load(path)
    own = base.resolve(loaded, submit.prepare(loaded)).config
    for section, values in tree.items():
        model = own if section == "algorithm" else getattr(loaded, section)
        for name, value in values.items():
            field = next((f for key, f in type(model).model_fields.items() if name in (key, f.alias)), None)
            assert field is None or field.default != value, f"{path}: {section}.{name} repeats the default"


@pytest.mark.parametrize(
    ("algorithm", "given", "scale"),
    [("sac", None, 0.1), ("sac", 1.0, 1.0), ("ppo", None, 1.0), ("td3", 2, 2.0)],
)
def test_rewards_are_scaled_for_sac_unless_a_scale_is_given(
    algorithm: str, given: float | None, scale: float
) -> None:
    """Studied in docs/defaults.md."""
    loaded = config.validate(
        {"env": {"id": "CartPole-v1", "reward_scale": given}, "algorithm": {"name": algorithm}}
    )
    assert loaded.env.reward_scale == scale
    assert config.validate(loaded.model_dump(mode="json", by_alias=True)) == loaded


def test_a_limit_on_signs_is_refused() -> None:
    with pytest.raises(
        config.ConfigError, match="env.reward_clip: 5 has no effect with env.reward_sign; remove one"
    ):
        config.load(CONFIGS[0], ["env.reward_sign=true", "env.reward_clip=5"])


def test_overrides_are_yaml_and_sections_stay_sections() -> None:
    loaded = config.load(CONFIGS[0], ["env.num_envs=3", "stop.time=2m", "algorithm.hidden_sizes=[8, 8]"])
    assert (loaded.env.num_envs, loaded.stop.time) == (3, 120.0)
    assert loaded.algorithm["hidden_sizes"] == [8, 8]
    with pytest.raises(config.ConfigError, match="seed is a value, not a section"):
        config.load(CONFIGS[0], ["seed=1", "seed.x=2"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0), ("500ms", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert config.duration(text, "--time") == seconds


def test_the_generated_pages_are_current() -> None:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert specification is not None and specification.loader is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    assert (ROOT / "docs" / "configuration.md").read_text("utf-8") == generate.page(), "run `make docs`"
    assert (ROOT / "docs" / "commands.md").read_text("utf-8") == generate.commands(), "run `make docs`"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe\x00", "not valid YAML ('utf-8' codec can't decode"),
        (b"[" * 20_000, "not valid YAML (maximum recursion depth exceeded"),
        (b"a: " + b"{a: " * 3_000 + b"1" + b"}" * 3_000, "not valid YAML (maximum recursion depth exceeded"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "aliases are not taken; write the values out"),
        (b"seed: " + b"9" * 5_000, "not valid YAML (Exceeds the limit"),
        (b"stop: !!timestamp x", "not valid YAML ("),
        (b"stop: !!bool x", "not valid YAML ("),
        (b'env: {id: x, "a\\nb": 1}', "env.a b: unknown option"),
        (b"#" * 1_000_001, "is larger than 1,000,000 bytes; name a YAML file"),
    ],
    ids=["binary", "lists", "mappings", "aliases", "digits", "timestamp", "bool", "name", "size"],
)
def test_a_file_that_cannot_be_settings_is_refused_in_one_line(
    text: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(config.ConfigError) as caught:
        config.load(tmp_path / "run.yaml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"learner": {"stall_s": math.inf}}, "learner.stall_s: inf cannot be used; input should be a finite number"),
        ({"evaluation": {"every_s": math.nan}}, "evaluation.every_s: nan cannot be used"),
        ({"stop": {"time": math.inf}}, "stop.time: inf cannot be used"),
        ({"env": {"id": "x", "kwargs": {"n": math.inf}}}, "env.kwargs: {'n': inf} cannot be used; a run is stored"),
        ({"env": {"id": "x", "wrappers": [{"id": "x:y", "kwargs": {"on": date(2020, 1, 1)}}]}}, "env.wrappers: "),
        ({"evaluation": {"seed": 2**60}}, "evaluation.seed: 1152921504606846976 cannot be used"),
        ({"env": {"id": "x", "kwargs": {"table": {1: 0.5}}}}, "env.kwargs: {'table': {1: 0.5}} cannot be used"),
    ],
)  # fmt: skip
def test_what_a_stored_run_cannot_hold_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.validate({"env": {"id": "x"}, "algorithm": {"name": "sac"}} | tree)
    assert message in str(caught.value)


def test_many_or_large_wrong_values_make_a_short_message() -> None:
    tree = {"env": {"id": "x" * 10_000}, "algorithm": {"name": "sac"}, "stop": {"updates": "y" * 10_000}}
    with pytest.raises(config.ConfigError) as caught:
        config.validate(tree | {"learner": {str(number): 1 for number in range(1000)}})
    assert len(str(caught.value)) < 5_000
