"""The layers and walls between modules, and what no source may contain; each rule is seen to fail on a bad source."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    "types config returns",
    "codec envs networks store",
    "algorithms replay celery",
    "policy",
    "onnx runs",
    "trackers",
    "worker learner",
    "cli",
    "api",
    "web",
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
LIGHT = ("importlib", "typing")  # what ddrl/__init__.py may import
ABOVE_ALL = ("__main__", "workers")  # start what is there

WALLS = {  # library -> the units of ddrl that may import it
    "redis": {"store"},
    "celery": {"celery", "worker"},
    "kombu": {"celery", "worker"},
    "billiard": {"celery", "worker"},
    "gymnasium": {"envs"},
}
WITHOUT_TORCH = ("types", "config", "store", "runs.submit", "cli", "celery")
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN = {
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "torch.load", "torch.save"),
    *("yaml.unsafe_load_all", "yaml.full_load_all", "blosc2.pack", "blosc2.unpack", "blosc2.open"),
    *("pandas.read_pickle", "torch.jit.load", "torch.hub.load"),
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pty.spawn"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
}
PICKLING = {f"{verb}_{noun}" for verb in ("pack", "unpack") for noun in ("array", "array2", "tensor")}


parsed = cache(ast.parse)


LAST = {name.rpartition(".")[2] for name in FORBIDDEN | PICKLING}


class Import(NamedTuple):
    module: str  # dotted; "ddrl.store" for `from ddrl import store`
    line: int
    for_types: bool  # under `if TYPE_CHECKING`


def unit_of(path: str) -> str:
    """The ranked name of a file: "ddrl/store/runs.py" -> "store", "workers/rollout.py" -> "workers"."""
    parts = Path(path).with_suffix("").parts
    return parts[1] if parts[0] == "ddrl" else parts[0]


def imports(source: str, path: str) -> Iterator[Import]:
    """Every import statement of a file, relative ones resolved."""
    package, tree = Path(path).parent.parts, parsed(source)
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    for_types = {node for guard in guards for child in guard.body for node in ast.walk(child)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" if module == "ddrl" else module for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, node in for_types)


def broken_layers(source: str, path: str) -> list[str]:
    """Imports of a unit that does not stand in a lower layer; imports within a folder are free."""
    unit = unit_of(path)
    if unit == "__init__":
        found = [i for i in imports(source, path) if not i.for_types and i.module not in LIGHT]
        return [f"{path}:{i.line}: ddrl/__init__.py imports {i.module}" for i in found]
    if unit in ABOVE_ALL:
        return []
    if unit not in LAYER:
        return [f"{path}: {unit} has no layer; give it one here and in CONTRIBUTING.md"]
    broken = []
    for found in imports(source, path):
        parts = found.module.split(".")
        if parts[0] != "ddrl" or len(parts) < 2 or parts[1] in ("__version__", unit):
            continue
        if LAYER.get(parts[1], len(LAYERS)) >= LAYER[unit]:
            broken.append(f"{path}:{found.line}: {found.module} is not in a layer below that of {unit}")
    return broken


def broken_walls(source: str, path: str) -> list[str]:
    """Libraries imported outside the units that own them; type-only imports bind nothing and pass."""
    return [
        f"{path}:{found.line}: {found.module} belongs to {', '.join(sorted(allowed))}"
        for found in imports(source, path)
        if not found.for_types
        and (allowed := WALLS.get(found.module.split(".")[0])) is not None
        and unit_of(path) not in allowed
    ]


def spelled_keys(source: str, path: str) -> list[str]:
    """Redis keys spelled outside keys.py, docstrings included. "ddrl: error" and "ddrl:*" are not keys."""
    if path == "ddrl/store/keys.py":
        return []
    return [
        f"{path}:{node.lineno}: {node.value[:40]!r} spells a key; use ddrl.store.keys"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"\bddrl:(?![\s*])", node.value)
    ]


def dangerous(source: str, path: str) -> list[str]:
    """Whatever unpickles, evaluates text or runs a shell."""
    modules = [found for found in imports(source, path) if found.module.split(".")[0] in PICKLES]
    found = [f"{path}:{one.line}: {one.module} pickles" for one in modules]
    for node in ast.walk(parsed(source)):
        last = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        names = [ast.unparse(node)] if last in LAST else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            names = [] if ast.unparse(node.value) == "False" else [f"{node.arg}="]
        for name in names:
            if name in FORBIDDEN or name.endswith("=") or name.rpartition(".")[2] in PICKLING:
                found.append(f"{path}:{node.lineno}: {name}")
    return found


def imported_tests(source: str, path: str) -> list[str]:
    """Tests that a test imports."""
    return [
        f"{path}:{found.line}: {found.module}; helpers of several tests go to tests/support"
        for found in imports(source, path)
        if found.module.rpartition(".")[2].startswith("test_")
    ]


def shared_code(source: str, path: str) -> list[str]:
    """Imports of the checker that are ddrl's, or that others of its tests share with it."""
    shared = ("ddrl", "support")
    return [
        f"{path}:{found.line}: {found.module}; the checker shares no code with ddrl"
        for found in imports(source, path)
        if found.module.split(".")[0] in shared
    ]


CODE, TESTS = ("ddrl/**/*.py", "workers/*.py"), ("tests/**/*.py",)
RULES = [(rule, CODE) for rule in (broken_layers, broken_walls, spelled_keys, dangerous)]
RULES += [(dangerous, (*TESTS, "benchmarks/*.py", "docs/**/*.py")), (imported_tests, TESTS)]
RULES += [(shared_code, ("tests/checker/*.py",))]


@pytest.mark.parametrize(("rule", "patterns"), RULES)
def test_no_file_breaks(rule: Callable[[str, str], list[str]], patterns: tuple[str, ...]) -> None:
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    assert len(files) > (30 if rule is not shared_code else 4)
    sources = {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in files}
    assert [line for path, source in sources.items() for line in rule(source, path)] == []


BREAKING = [
    (broken_layers, "ddrl/config.py", "from ddrl.store import runs"),
    (broken_layers, "ddrl/config.py", "from ddrl import store"),
    (broken_layers, "ddrl/config.py", "import ddrl.store.runs"),
    (broken_layers, "ddrl/config.py", "from . import store"),
    (broken_layers, "ddrl/store/runs.py", "from ..replay import replay"),
    (broken_layers, "ddrl/config.py", "def f():\n    from ddrl.learner.loop import Learner"),
    (broken_layers, "ddrl/worker/collector.py", "from ddrl import learner"),
    (broken_layers, "ddrl/runs/submit.py", "from ddrl.nowhere import thing"),
    (broken_layers, "ddrl/elsewhere.py", ""),
    (broken_layers, "ddrl/__init__.py", "import numpy"),
    (broken_walls, "ddrl/learner/loop.py", "import redis"),
    (broken_walls, "ddrl/learner/loop.py", "from redis.exceptions import RedisError"),
    (broken_walls, "ddrl/learner/dispatcher.py", "def f():\n    import celery"),
    (broken_walls, "workers/rollout.py", "from celery import Celery"),
    (broken_walls, "ddrl/learner/run.py", "from kombu import Queue"),
    (spelled_keys, "ddrl/store/runs.py", 'KEY = "ddrl:runs"'),
    (spelled_keys, "ddrl/store/runs.py", 'def f(run):\n    return f"ddrl:{run}:spec"'),
    (dangerous, "ddrl/codec.py", "import pickle"),
    (dangerous, "ddrl/codec.py", "from cloudpickle import dumps"),
    (dangerous, "ddrl/config.py", "yaml.load(text)"),
    (dangerous, "ddrl/config.py", "from yaml import unsafe_load"),
    (dangerous, "ddrl/policy.py", "eval(text)"),
    (dangerous, "workers/rollout.py", "subprocess.run(line, shell=True)"),
    (dangerous, "ddrl/codec.py", "np.load(path, allow_pickle=True)"),
    (dangerous, "ddrl/config.py", "__import__(name)"),
    (dangerous, "ddrl/codec.py", "blosc2.pack_array(a)"),
    (dangerous, "ddrl/codec.py", "from blosc2 import unpack_array2"),
    (imported_tests, "tests/store/test_acl.py", "from test_stream import append"),
    (shared_code, "tests/checker/verdict.py", "def f():\n    from ddrl.store import ledger"),
    (shared_code, "tests/checker/verdict.py", "from support.runs import start"),
]
HARMLESS = [
    (broken_layers, "ddrl/store/runs.py", "from ddrl.store.leases import fenced\nfrom ddrl import config"),
    (broken_layers, "ddrl/cli/doctor.py", "import ddrl\nfrom ddrl import __version__, policy"),
    (broken_layers, "workers/learner.py", "from ddrl.cli import main"),
    (broken_walls, "ddrl/learner/loop.py", "if TYPE_CHECKING:\n    from redis import Redis"),
    (broken_walls, "ddrl/store/runs.py", "import redis"),
    (broken_walls, "ddrl/learner/run.py", "from ddrl.celery import app"),
    (spelled_keys, "ddrl/cli/output.py", 'print("ddrl: error: no")'),
    (spelled_keys, "ddrl/store/keys.py", 'RUNS = "ddrl:runs"'),
    (shared_code, "tests/checker/verdict.py", "import redis\nfrom checker.raw import Raw"),
    (dangerous, "ddrl/codec.py", "network.eval()\nyaml.safe_load(t)\nrun(shell=False)\nnp.load(p)"),
]
CASES = [*((*case, 1) for case in BREAKING), *((*case, 0) for case in HARMLESS)]


@pytest.mark.parametrize(("rule", "path", "source", "num_found"), CASES)
def test_each_rule_can_fail(
    rule: Callable[[str, str], list[str]], path: str, source: str, num_found: int
) -> None:
    assert len(rule(source, path)) == num_found


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def loaded_by(module: str, libraries: set[str]) -> set[str]:
    """Return those of `libraries` that a fresh interpreter has loaded after importing `module`."""
    code = f"import sys, {module}; print(*(name for name in {sorted(libraries)!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "loaded"),
    [
        ("ddrl", set()),
        ("ddrl.cli", set()),
        ("ddrl.cli.runs", {"redis"}),
        ("ddrl.envs", {"ddrl.config", "numpy"}),
        ("ddrl.networks.mlp", {"torch", "numpy"}),
    ],
)
def test_commands_start_light(module: str, loaded: set[str]) -> None:
    heavy = {"torch", "gymnasium", "matplotlib", "celery", "blosc2", "tensorboard", "rich.live"}
    heavy |= {"ddrl.config", "numpy", "redis"}
    assert loaded_by(module, heavy) == loaded


def test_the_processes_of_a_workers_pool_do_not_load_the_command_line() -> None:
    """They import the main module, too."""
    assert loaded_by("ddrl.__main__", {"typer"}) == set()


def test_units_without_torch_import_none_by_way_of_others_either() -> None:
    units = [ROOT / "ddrl" / unit.replace(".", "/") for unit in WITHOUT_TORCH]
    files = [file for unit in units for file in (unit.with_suffix(".py"), *unit.glob("**/*.py"))]
    files = [file for file in files if file.exists()]
    assert len(files) > 25
    assert loaded_by(", ".join(map(module_of, files)), {"torch"}) == set()


def test_no_circle_within_a_folder() -> None:
    """Only imports when a module is loaded count: not those for types, not those inside functions."""
    names = {module_of(path): path for path in ROOT.glob("ddrl/**/*.py")}
    graph = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module in names:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} & set(names) or {node.module}
        graph[name] = {other for other in found if other.split(".")[:2] == name.split(".")[:2]} - {name}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_scripts_spell_no_keys() -> None:
    scripts = sorted(ROOT.glob("ddrl/store/scripts/*.lua"))
    assert not [path.name for path in scripts if re.search(r"['\"]ddrl:", path.read_text("utf-8"))]


def test_layers_in_contributing_are_these() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for number, names in enumerate(LAYERS):
        row = re.search(rf"^\| {number} \| (.+) \|$", text, re.MULTILINE)
        assert row is not None, f"layer {number} is missing"
        written = {re.split(r"[/.]", name)[0] for name in re.findall(r"`([a-z_/*.]+)`", row[1])}
        assert written == set(names.split())
