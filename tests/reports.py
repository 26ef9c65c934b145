"""What several test files share to hear warnings, to find lines and to write modules."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trainstep as ts


@contextmanager
def heard(category: type[Warning]) -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of one category that were given inside, each one, repeated or not."""
    found: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as everything:
        warnings.simplefilter("always")
        try:
            yield found
        finally:
            found.extend(w for w in everything if issubclass(w.category, category))


@contextmanager
def quiet() -> Iterator[None]:
    """Neither a side effect nor a stale value is reported inside."""
    with heard(Warning) as found:
        yield
    ours = (ts.SideEffectWarning, ts.StaleCaptureWarning)
    texts = [f"{w.filename}:{w.lineno}: {w.message}" for w in found if issubclass(w.category, ours)]
    assert not texts, "\n".join(texts)


def line_of(mark: str, file: str | Path) -> int:
    """The number of the one line of a file that ends with the comment `# mark`."""
    lines = Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return number


def places(found: list[warnings.WarningMessage]) -> list[tuple[str, int]]:
    """File and line of each warning, in the order of the lines."""
    return sorted((str(Path(w.filename).resolve()), w.lineno) for w in found)


def place(mark: str, file: str | Path) -> tuple[str, int]:
    """File and line of a mark, to be compared with `places`."""
    return str(Path(file).resolve()), line_of(mark, file)


class Modules:
    """Writes modules to a folder and imports them; `close` forgets them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self.names: list[str] = []

    def write(self, name: str, text: str, under: str = "project") -> Any:
        """The imported module; `under` is the folder that goes onto `sys.path`."""
        root = self.folder / under
        root.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.py").write_text(text)
        if str(root) not in sys.path:
            self.patch.syspath_prepend(str(root))
        importlib.invalidate_caches()
        assert name not in sys.modules
        self.names.append(name)
        return importlib.import_module(name)

    def close(self) -> None:
        """Forgets the modules."""
        for name in self.names:
            sys.modules.pop(name, None)
