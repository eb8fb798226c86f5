"""An algorithm of the user's: what its module must have, and that nothing else imports it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.algorithms import CPU, DISCRETE
from support.commands import call
from support.store import make_run

from ddrl.algorithms import base
from ddrl.config import ConfigError, validate
from ddrl.runs import submit

OPTIONS = {"env": {"id": "Toy-v0"}, "algorithm": {"name": "mine.algorithm"}}
HEAD = "from docs.own_algorithm import Config, Policy, make_learner\n"
BARE = HEAD + "from ddrl.algorithms.options import AlgorithmConfig\n"


def resolved(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> base.Resolved:
    (folder / "mine").mkdir()
    (folder / "mine/algorithm.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "mine,docs")
    for name in ("mine", "mine.algorithm"):
        sys.modules.pop(name, None)
    return base.resolve(validate(OPTIONS), DISCRETE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "mine.algorithm: has no class Config of ddrl.algorithms.options.AlgorithmConfig; add it"),
        ("Config = dict", "mine.algorithm: has no class Config of "),
        (HEAD + "del Policy", "mine.algorithm: has no Policy; add it as the guide shows"),
        (HEAD + "make_learner = 3", "mine.algorithm: has no make_learner; add it as the guide shows"),
        (BARE + "class Config(AlgorithmConfig): pass", "mine.algorithm: its Config has no check; add it"),
        (
            BARE + "class Config(AlgorithmConfig):\n    def check(self, spec): pass",
            "mine.algorithm: its Config has no n_step; add it",
        ),
        ("import nothing_like_it", "mine.algorithm:config: No module named 'nothing_like_it'"),
        ("1 / 0", "mine.algorithm:config: importing mine.algorithm raised ZeroDivisionError"),
    ],
)
def test_a_module_that_lacks_a_part_is_refused(
    tmp_path: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"^algorithm.name: {words}") as refused:
        resolved(tmp_path, text, monkeypatch)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            HEAD + "class Policy(Policy):\n    evaluation_epsilon = property()",
            "its Policy has no evaluation_epsilon",
        ),
        (
            HEAD + "def make_learner(*a, **b): return 3",
            "its int has no apply_options; add it as the guide shows",
        ),
    ],
)
def test_a_policy_or_a_learner_that_lacks_a_method_is_refused(
    tmp_path: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolved(tmp_path, text, monkeypatch)
    with pytest.raises(ConfigError, match=f"^algorithm.name: mine.algorithm: {words}"):
        submit.check(validate(OPTIONS), DISCRETE), found.learner(device=CPU, seed=1)


def test_a_name_that_is_not_allowed_is_refused_and_status_needs_none(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(client, algorithm={"name": "docs.own_algorithm"})
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    with pytest.raises(
        ConfigError, match="module docs.own_algorithm may not be imported here; set DDRL_ALLOW"
    ):
        base.config_class("docs.own_algorithm")
    assert " with docs.own_algorithm, seed" in call("status", run)
