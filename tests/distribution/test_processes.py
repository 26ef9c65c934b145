"""Jobs of two processes, in a network namespace that has the loopback device only."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

HERE = Path(__file__).parent
JAX = keras.backend.backend() == "jax"
pytestmark = pytest.mark.slow  # each test starts processes of its own


def run(directory: Path, script: str = "training.py", **plan: Any) -> dict[str, Any]:
    given = {"script": str(HERE / script), "directory": str(directory), "count": 2, **plan}
    source = str(HERE.parents[1] / "src")
    env = {**os.environ, "PYTHONPATH": source, "TRAINSTEP_CACHE": "off", "OMP_NUM_THREADS": "1"}
    env["XDG_STATE_HOME"] = str(directory / "state")  # for the key of the job, which nothing sets
    done = subprocess.run(
        [sys.executable, str(HERE / "namespace.py"), json.dumps(given)],
        env=env,
        stdout=subprocess.PIPE,
        check=True,
        timeout=500,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    if "refused" in found:
        pytest.skip(found["refused"])
    return found


def hashes(found: dict[str, Any]) -> set[str]:
    return set(re.findall(r"state of \d: (\w+)", "".join(found["text"].values())))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the state of a run that nothing happened to."""
    found = run(tmp_path_factory.mktemp("undisturbed"))
    assert found["codes"] == [0, 0], found["text"]
    assert "epoch 4/4" in found["text"]["out.0"]  # one of them draws progress
    assert "epoch" not in found["text"]["out.1"]
    (only,) = hashes(found)
    return only


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The numbers of a script in one process, which is run once."""

    @functools.cache
    def numbers(script: str) -> Any:
        directory = tmp_path_factory.mktemp("one")
        found = run(directory, script, count=1, args=["Single"])
        assert found["codes"] == [0], found["text"]
        return np.load(directory / "state.npy")

    return numbers


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("equality.py", "Mirrored"),
        *([("equality.py", "Sharded")] if JAX else []),
        ("zoo.py", "Mirrored"),
    ],
)
def test_two_processes_give_the_numbers_of_one(
    tmp_path: Path, one_process: Callable[[str], Any], script: str, kind: str
) -> None:
    """TOLERANCE: as in `test_devices`; two devices in each process."""
    found = run(tmp_path, script, args=[kind])
    assert found["codes"] == [0, 0], found["text"]
    several = np.load(tmp_path / "state.npy")
    np.testing.assert_allclose(several, one_process(script), rtol=0, atol=1e-10)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the others wait for a second size")
def test_a_refusal_is_told_at_the_second_size(tmp_path: Path) -> None:
    found = run(tmp_path, "refused.py")
    assert found["codes"] == [0, 0], found["text"]
    assert (tmp_path / "told.0").read_text() == str([0, 0, 1, 0, 0])


def test_a_job_listens_on_its_address_only(tmp_path: Path) -> None:
    """On TensorFlow, that holds for the port of the job, not for those of TensorFlow's runtime."""
    found = run(tmp_path, "listening.py")
    assert found["codes"] == [0, 0], found["text"]
    assert int((tmp_path / "ports.0").read_text()) > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_process_ends_the_other(tmp_path: Path, rank: int) -> None:
    found = run(tmp_path, kill={"rank": rank, "signal": int(signal.SIGSTOP), "after": 5})
    text = found["text"][f"out.{1 - rank}"]
    assert found["codes"] == [75], text
    assert f"process {rank} of 2 sent no heartbeat for 4 s" in text
    assert found["seconds"][0] < 30  # a heartbeat of 4 s


def test_a_killed_process_ends_the_other(undisturbed: str, tmp_path: Path) -> None:
    """Also the first, which JAX notices itself, with a message of its own."""
    found = run(tmp_path, kill={"rank": 1, "signal": int(signal.SIGKILL), "after": 5})
    assert found["codes"] == [75], found["text"]
    assert re.search("process 1 of 2 sent no heartbeat|is gone", found["text"]["out.0"])
    assert "During handling" not in found["text"]["out.0"]  # and nothing else failed after it
    found = run(tmp_path, kill={"rank": 0, "signal": int(signal.SIGKILL), "after": 14})
    assert found["codes"][0] != 0
    assert re.search("another task died|sent no heartbeat|is gone", found["text"]["out.1"])
    again = run(tmp_path)
    assert again["codes"] == [0, 0], again["text"]
    assert hashes(again) == {undisturbed}


@pytest.mark.parametrize("attempt", range(int(os.environ.get("TRAINSTEP_KILLS", "1"))))
def test_torchrun_restarts_a_run(undisturbed: str, tmp_path: Path, attempt: int) -> None:
    """Any rank, killed or frozen, at any moment; `TRAINSTEP_KILLS=10` does it so often."""
    pytest.importorskip("torch")
    chosen = random.Random(attempt)
    kill = {
        "rank": chosen.randrange(2),
        "signal": int(chosen.choice([signal.SIGKILL, signal.SIGSTOP])),
        "after": chosen.randrange(1, 36),
        "within": 0.2,
    }
    found = run(tmp_path, torchrun=2, kill=kill)
    assert found["killed"], kill
    assert found["codes"] == [0], (kill, found["text"])
    assert hashes(found) == {undisturbed}, kill


def test_sigterm_saves_and_stops(undisturbed: str, tmp_path: Path) -> None:
    found = run(tmp_path, kill={"rank": 1, "signal": int(signal.SIGTERM), "after": 14})
    assert found["codes"] == [143], found["text"]
    assert hashes(run(tmp_path)) == {undisturbed}
