"""Public names are exact, sorted and documented; importing trainstep is light and silent."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainstep as ts

pytestmark = pytest.mark.plain

NAMES = [
    "ArgumentError",
    "CheckpointError",
    "Checkpoints",
    "ControlFlowError",
    "ForeignTraceError",
    "Function",
    "GradientError",
    "Inspection",
    "Ledger",
    "Logs",
    "Mirrored",
    "NonFiniteError",
    "ProcessLostError",
    "Processes",
    "RetraceLimitError",
    "Shapes",
    "Sharded",
    "SideEffectError",
    "SideEffectWarning",
    "Single",
    "SizesWarning",
    "Spec",
    "StaleCaptureError",
    "StaleCaptureWarning",
    "StateError",
    "Strategy",
    "StrategyError",
    "TraceEvent",
    "Trainer",
    "TrainstepError",
    "Verification",
    "accelerate",
    "callback",
    "clip_by_global_norm",
    "doctor",
    "function",
    "global_norm",
    "grad",
    "initialize",
    "ledger",
    "print",
    "restore",
    "set_cache",
    "value_and_grad",
]

# Imports Keras, then a module under watch, and prints what that import alone did.
PROBE = """
import json, logging, os, sys, tempfile, warnings
import keras
engines = {"jax", "jaxlib", "tensorflow", "torch"}
names = lambda: {m.split(".")[0] for m in sys.modules} & engines
loggers = lambda: [h for l in (logging.root, *logging.root.manager.loggerDict.values()) for h in getattr(l, "handlers", [])]
keras_parts = lambda: [dict(vars(c)) for c in (keras.Variable, keras.Layer, keras.Model, keras.optimizers.Optimizer, keras.StatelessScope)]
before = names(), loggers(), dict(os.environ), keras_parts(), list(warnings.filters), logging.root.level
with tempfile.TemporaryFile() as file:
    sys.stdout.flush(); sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(file.fileno(), 1); os.dup2(file.fileno(), 2)
    __import__(sys.argv[1])
    sys.stdout.flush(); sys.stderr.flush()
    os.dup2(kept[0], 1); os.dup2(kept[1], 2)
    file.seek(0)
    printed = file.read().decode()
print(json.dumps({
    "engines": sorted(names() - before[0]),
    "handlers": len(loggers()) - len(before[1]),
    "environment": sorted(k for k in {**before[2], **os.environ} if before[2].get(k) != os.environ.get(k)),
    "patched": keras_parts() != before[3],
    "filters": list(warnings.filters) != before[4],
    "level": logging.root.level != before[5],
    "printed": printed,
}))
"""
CLEAN = {
    "engines": [],
    "handlers": 0,
    "environment": [],
    "patched": False,
    "filters": False,
    "level": False,
    "printed": "",
}


def probe(module: str, path: Path | None = None) -> dict[str, object]:
    source = Path(ts.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in (source, path) if p)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_is_exact_and_sorted() -> None:
    assert ts.__all__ == NAMES
    assert sorted(ts.__all__) == ts.__all__


def test_no_other_public_name_is_exported() -> None:
    for name in NAMES:  # asked for once, a name is there
        getattr(ts, name)
    public = [n for n, o in vars(ts).items() if not n.startswith("_") and not inspect.ismodule(o)]

    assert sorted(public) == NAMES


def test_there_is_a_version() -> None:
    assert ts.__version__.count(".") >= 1


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(ts, name)

    assert inspect.getdoc(thing)
    assert not (thing.__doc__ or "").startswith(f"{name}("), "a dataclass's default docstring"
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_the_names_of_the_graph_are_exact_sorted_and_documented() -> None:
    graph = ts.graph
    public = [n for n in vars(graph) if not n.startswith("_")]

    assert sorted(graph.__all__) == graph.__all__ == sorted(public)
    for name in graph.__all__:
        thing = getattr(graph, name)
        assert inspect.getdoc(thing), name
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_") and inspect.isfunction(value):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("module", ["trainstep", "trainstep.graph"])
def test_importing_is_light_and_silent(module: str) -> None:
    assert probe(module) == CLEAN


@pytest.mark.slow
def test_the_check_of_the_import_can_fail(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import logging, os, sys, types, warnings, keras\n"
        "for name in ('jax', 'tensorflow', 'torch', 'jaxlib'):\n"
        "    sys.modules.setdefault(name, types.ModuleType(name))\n"
        "print('hello')\n"
        "logging.getLogger('noisy').addHandler(logging.StreamHandler())\n"
        "logging.root.setLevel(logging.CRITICAL)\n"
        "os.environ['NOISY'] = '1'\n"
        "keras.Variable.noisy = True\n"
        "warnings.simplefilter('ignore', RuntimeWarning)\n"
    )

    found = probe("noisy", tmp_path)

    assert {key for key, value in found.items() if value != CLEAN[key]} >= CLEAN.keys() - {
        "engines"
    }
    assert found["printed"] == "hello\n"


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse(Path(ts.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}

    assert homes.pop("graph") == "trainstep"
    assert homes == ts._HOME_OF


def test_asking_for_a_name_that_is_not_there_imports_nothing() -> None:
    probe = "import sys, trainstep; print(hasattr(trainstep, 'torch'), 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "False"]
