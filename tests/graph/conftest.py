"""Every test of the graph starts with an empty default graph, and leaves no default session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainstep import graph


@pytest.fixture(autouse=True)
def empty_graph() -> Iterator[None]:
    """A default graph of the test's own."""
    graph.reset_default_graph()
    yield
    assert graph.get_default_session() is None, "a default session was left behind"
    graph.reset_default_graph()
