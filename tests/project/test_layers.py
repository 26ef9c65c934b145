"""Which file may import what, and how long files and functions may be; read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "trainstep"
FILES = sorted(SOURCE.rglob("*.py"))
ENGINES = {"jax", "jaxlib", "tensorflow", "torch"}
FILE_CAP = 500
FUNCTION_CAP = 80
pytestmark = pytest.mark.plain


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imported_roots(source: str) -> set[str]:
    """The first names of all modules that a source imports, by statement or by `import_module`."""
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                roots.add(str(node.args[0].value).split(".")[0])
    return roots


def long_functions(source: str, cap: int) -> list[str]:
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > cap
    ]


def test_there_are_files_to_check() -> None:
    assert len(FILES) > 10
    assert any(name(f).startswith("_engines/") for f in FILES)


def test_no_engine_is_imported_outside_its_folder() -> None:
    outside = [f for f in FILES if not name(f).startswith("_engines/")]

    assert not [name(f) for f in outside if imported_roots(f.read_text()) & ENGINES]


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_an_engines_files_import_no_other_engine(engine: str) -> None:
    files = [f for f in FILES if name(f).startswith(f"_engines/{engine}/")]

    assert files
    for path in files:
        assert not imported_roots(path.read_text()) & ENGINES - {
            engine,
            "jaxlib" if engine == "jax" else engine,
        }


def test_the_base_and_lookup_of_the_engines_import_no_engine() -> None:
    for file in ("_engines/__init__.py", "_engines/contract.py"):
        assert not imported_roots((SOURCE / file).read_text()) & ENGINES


def test_files_and_functions_are_short_enough_to_read_whole() -> None:
    sources = {name(f): f.read_text() for f in FILES}

    assert not [f for f, source in sources.items() if len(source.splitlines()) > FILE_CAP]
    assert not {f: found for f, s in sources.items() if (found := long_functions(s, FUNCTION_CAP))}


def test_every_module_has_a_docstring() -> None:
    assert not [name(f) for f in FILES if not ast.get_docstring(ast.parse(f.read_text()))]


def test_the_checks_can_fail() -> None:
    assert imported_roots("import jax.numpy as jnp") == {"jax"}
    assert imported_roots("def f():\n    from torch.fx import x") == {"torch"}
    assert imported_roots("import importlib\nimportlib.import_module('tensorflow.x')") == {
        "importlib",
        "tensorflow",
    }
    assert imported_roots("from . import jax") == set()
    assert long_functions("def f():\n" + "    pass\n" * 80, FUNCTION_CAP) == ["f: 81"]
