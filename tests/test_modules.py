"""Callables by "module:callable": loaded from allowed modules only, refused with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddrl.config import ModuleError, allowed_modules, is_allowed, load_callable


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allowed package `own_package` on the path, not yet imported."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("number = 3\ndef make(): return 7\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "own_package")
    return folder


def refusal(name: str) -> str:
    with pytest.raises(ModuleError) as refused:
        load_callable(name)
    message = str(refused.value)
    assert message.startswith(f"{name}: ")
    assert "\n" not in message
    return message


def test_allowed_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "b.c, a,,")
    assert allowed_modules() == ["b.c", "a"]
    assert [is_allowed(name) for name in ("a", "a.x", "b.c", "b.c.d")] == [True] * 4
    assert [is_allowed(name) for name in ("", "ab", "b", "b.cd", "x.a")] == [False] * 5
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    assert allowed_modules() == []
    assert not is_allowed("a")


def test_loads_from_a_package_and_its_modules(package: Path) -> None:
    (package / "inner.py").write_text("class Thing: pass\n")
    assert load_callable("own_package:make")() == 7
    assert load_callable("own_package.inner:Thing").__name__ == "Thing"


def test_the_current_folder_comes_last_on_the_path(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console script `ddrl` does not have it there."""
    here = package.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "own_package,only_here")
    for name in ("own_package", "only_here"):
        (here / f"{name}.py").write_text("def make(): return 8\n")
    assert (load_callable("only_here:make")(), load_callable("own_package:make")()) == (8, 7)
    del sys.modules["only_here"]


def test_nothing_is_imported_that_is_not_allowed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "own_packag,own_package.inner")
    assert refusal("own_package:make") == (
        "own_package:make: module own_package may not be imported here; "
        "set DDRL_ALLOW_MODULES=own_package on every machine that uses it"
    )
    assert "set DDRL_ALLOW_MODULES=own_package on" in refusal("own_package.other:make")


@pytest.mark.parametrize(
    "name",
    ["own_package", "own_package:", ":make", "", "..own_package:make", "own_package:make:x", "a b:make"],
)
def test_other_forms_are_refused(name: str, package: Path) -> None:
    assert refusal(name).endswith('is not of the form "module:callable"; write it like my_pkg.module:make')


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1", "module own_package.inner has no 'make'; name a callable of it"),
        ("make = 3", "is int, which cannot be called; name a callable of it"),
        (
            "import nowhere",
            "No module named 'nowhere'; on every machine that uses it, start ddrl",
        ),
        ("from math import nothing", "cannot import name 'nothing' from 'math'"),
        ("1 / 0", "importing own_package.inner raised ZeroDivisionError (division by zero); make the module"),
        ("import math; math.nothing", "own_package.inner raised AttributeError (module 'math' has no"),
        ("raise ValueError('first\\nsecond')", "raised ValueError (first);"),
        ("def", "importing own_package.inner raised SyntaxError (invalid syntax"),
        ("raise KeyError", "raised KeyError (KeyError);"),
        (None, "No module named 'own_package.inner'; on every machine"),
    ],
)
def test_modules_that_cannot_be_used_are_refused(source: str | None, expected: str, package: Path) -> None:
    if source is not None:
        (package / "inner.py").write_text(source)
    assert expected in refusal("own_package.inner:make")
