"""Fixtures for all tests: seeds, the engine's name, and police for what a test leaves behind."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

keras.utils.set_random_seed(0)
os.environ["TRAINSTEP_CACHE"] = "off"  # what is tested is compiled
# A shell that starts the tests in the background turns Ctrl-C off, and some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Of the tests that are the same on each engine, which sixths run on which if they are shared out: half
# of them on torch, which compiles nothing for most, and the fewest on JAX, which takes longest to.
SHARES = {"jax": {0}, "torch": {1, 2, 3}, "tensorflow": {4, 5}}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shares tests out between engines, where there is little time: `TRAINSTEP_TESTS=shared`."""
    if os.environ.get("TRAINSTEP_TESTS") != "shared":
        return
    share = SHARES[keras.backend.backend()]
    left = [i for i in items if _is_common(i) and zlib.crc32(i.nodeid.encode()) % 6 not in share]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


def _is_common(item: pytest.Item) -> bool:
    """Whether a test is about no engine in particular."""
    if item.path.parent.name == "doctor":  # the others' scripts are of one engine
        return item.path.name == "test_untouched_training.py"
    if item.path.parent == Path(__file__).parent:
        return item.name.startswith(("test_a_documentation_page_runs", "test_importing_is_light"))
    own = (
        "sizes",
        "masking",
        "rewrites",
        "native",
        "host",
        "parts",
        "norms",
        "replay",
        "modules",
        "threads",
        "feeds",
        "small",
        "signals",
        "straight",
        "libraries",
        "unread",
        "devices",
        "equality",
    )
    return item.path.parent.name in ("backend", "graph", "distribution") and not any(
        word in f"{item.path.name} {item.name}" for word in own
    )


@pytest.fixture
def backend() -> str:
    """The Keras backend of this process: jax, tensorflow or torch."""
    return keras.backend.backend()


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
    if keras.backend.backend() == "torch":  # inductor keeps a pool for its compilations
        left = [t for t in left if not t.name.startswith("ThreadPoolExecutor")]
    for thread in left:
        thread.join(timeout=10)  # one that is about to end has not been left behind
    left = [t.name for t in left if t.is_alive()]
    assert not left, f"threads left: {left}"
    if keras.backend.backend() == "torch":
        import torch

        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert enabled, "gradients were left turned off"
    pytest_own = {"PYTEST_CURRENT_TEST"}
    changed = set(environment.keys() ^ os.environ.keys()) - pytest_own
    assert not {k for k in changed if k.startswith(("KERAS", "JAX", "TRAINSTEP"))}, changed
    assert (keras.config.dtype_policy().name, keras.config.floatx()) == policy
