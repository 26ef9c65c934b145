"""The examples of launchers, as a user starts them: two processes, on a loopback device of their own."""

from __future__ import annotations

import importlib.util
import re
import secrets
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distribution.test_processes import HERE, run

pytestmark = pytest.mark.slow
EXAMPLES = HERE.parents[1] / "examples"


def outcome(found: dict[str, Any]) -> tuple[float, str]:
    """The accuracy and the hash of the state that an example has printed, once."""
    assert found["codes"] == [0], found["text"]
    ((accuracy, state),) = re.findall(r"digits ([\d.]+); state (\w+)", found["text"]["out"])
    return float(accuracy), state


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("torchrun")
    return run(directory, str(EXAMPLES / "torchrun_train.py"), torchrun=3)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of its own, which leaves nothing behind; the names of its sockets have to be short."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra `ray`")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        yield


def test_torchrun_trains_the_digits(undisturbed: dict[str, Any]) -> None:
    accuracy, _ = outcome(undisturbed)

    assert accuracy > 0.94
    assert undisturbed["text"]["out"].count("epoch 8/8") == 1  # one of them draws progress
    assert undisturbed["left"] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_ray_goes_on_after_a_kill(
    undisturbed: dict[str, Any], ray: None, tmp_path: Path, rank: int
) -> None:
    kill = {"rank": rank, "signal": int(signal.SIGKILL), "saved": 60}

    found = run(tmp_path, str(EXAMPLES / "ray_train.py"), ray=True, kill=kill, timeout=400)

    text = found["text"]["out"]
    assert found["killed"], text
    assert outcome(found) == outcome(undisturbed), text
    assert len(set(re.findall(r"pid=(\d+)\) world_rank=", text))) == 4, text  # two, and two anew
    assert found["left"] == []
