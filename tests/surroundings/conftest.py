"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainstep._surroundings import instructions
from trainstep._surroundings.bytecode import scan


@pytest.fixture
def unknown_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the bytecode of this Python be unknown, as that of a Python to come."""
    monkeypatch.setattr(instructions, "SUPPORTED", ())
    scan.cache_clear()
    yield
    scan.cache_clear()
