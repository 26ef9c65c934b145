"""Every example is run: those in docstrings, and the Python blocks of README.md and docs/."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

import keras
import pytest

import trainstep as ts
import trainstep._doctor
import trainstep.graph

for _name in ts.__all__:  # a name is imported when it is first used
    getattr(ts, _name)

ROOT = Path(__file__).parents[2]
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if p.exists()]
BLOCK = re.compile(
    r"(?P<skip><!--\s*not run\s*-->\s*\n)?^(?P<indent>[ ]*)```python[ ]*\n(?P<code>.*?)^(?P=indent)```",
    re.M | re.S,
)


def docstring_examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "trainstep"]
    found = {t.name: t for module in modules for t in finder.find(module, module.__name__)}
    return [t for t in found.values() if t.examples]


def blocks(text: str) -> list[tuple[int, str]]:
    """Line and source of each Python block that is to be run."""
    return [
        (text[: m.start("code")].count("\n") + 1, re.sub(rf"(?m)^{m['indent']}", "", m["code"]))
        for m in BLOCK.finditer(text)
        if not m["skip"]
    ]


@pytest.mark.parametrize("example", docstring_examples(), ids=lambda t: t.name)
def test_docstring_example_runs(example: doctest.DocTest) -> None:
    report: list[str] = []

    failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        example, out=report.append
    )

    assert not failures.failed, "".join(report)


def test_the_public_functions_have_examples() -> None:
    names = {t.name.rpartition(".")[2] for t in docstring_examples()}

    assert {n for n in (*ts.__all__, *ts.graph.__all__) if n.islower() and n != "train"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.sampled(1 if keras.backend.backend() == "jax" else len(PAGES))  # the first is README
def test_a_documentation_page_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"page_{page.stem}"}
    for number, code in blocks(page.read_text()):
        # The padding makes a traceback show the page's own line numbers.
        exec(compile("\n" * (number - 1) + code, str(page), "exec"), namespace)


def test_blocks_are_found_and_marked_ones_are_left_out() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run -->\n```python\ny\n```\n```bash\nls\n```\n- b\n  ```python\n  z = 2\n  ```\n"

    assert blocks(text) == [(3, "x = 1\n"), (14, "z = 2\n")]
