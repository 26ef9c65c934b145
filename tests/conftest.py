"""Fixtures for all tests: seeds, the engine's name, and police for what a test leaves behind."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

keras.utils.set_random_seed(0)
os.environ["TRAINSTEP_CACHE"] = "off"  # what is tested is compiled
# A shell that starts the tests in the background turns Ctrl-C off, and some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


ENGINE = keras.backend.backend()
SLOW_PARTS = 6  # CI runs another one for each commit


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the folders of the other engines."""
    parents = collection_path.relative_to(Path(__file__).parent).parts[:2]
    return True if parents[:1] == ("engines",) and parents[1:] not in ((), (ENGINE,)) else None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs no engine where another engine's process runs it.

    With `TRAINSTEP_SLOW_PART`, all other parts of the slow tests are left out, too.
    """
    seen: Counter[object] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            function = getattr(item, "function", None)
            if seen[function] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[function] += 1
    part = os.environ.get("TRAINSTEP_SLOW_PART")

    def is_left_out(item: pytest.Item) -> bool:
        if ENGINE != "jax" and item.get_closest_marker("plain"):
            return True
        number = zlib.crc32(f"{ENGINE} {item.nodeid}".encode()) % SLOW_PARTS
        slow = item.get_closest_marker("slow") is not None
        return part is not None and slow and number != int(part)

    left = {item for item in items if is_left_out(item)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.fixture
def backend() -> str:
    """The Keras backend of this process: jax, tensorflow or torch."""
    return ENGINE


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same seeds."""
    keras.utils.set_random_seed(1234)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, an environment variable or a dtype policy behind."""
    threads = set(threading.enumerate())
    environment = dict(os.environ)
    policy = keras.config.dtype_policy().name, keras.config.floatx()
    yield
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    if ENGINE == "torch":  # inductor keeps a pool for its compilations
        left = [t for t in left if not t.name.startswith("ThreadPoolExecutor")]
    for thread in left:
        thread.join(timeout=10)  # one that is about to end has not been left behind
    left = [t.name for t in left if t.is_alive()]
    assert not left, f"threads left: {left}"
    if ENGINE == "torch":
        import torch

        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert enabled, "gradients were left turned off"
    pytest_own = {"PYTEST_CURRENT_TEST"}
    changed = set(environment.keys() ^ os.environ.keys()) - pytest_own
    assert not {k for k in changed if k.startswith(("KERAS", "JAX", "TRAINSTEP"))}, changed
    assert (keras.config.dtype_policy().name, keras.config.floatx()) == policy
