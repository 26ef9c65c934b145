"""Programs on disk: a second process reads what the first compiled, with the same numbers.

Each case is a process of its own, because the cache is looked for once; they are few.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts

SOURCE = Path(ts.__file__).parents[1]

TRAINS = """
import json, os, sys
from pathlib import Path

def files():
    return sorted(str(p) for folder in sys.argv[1:] for p in Path(folder).rglob("*")
                  if p.is_file() and ".keras" not in p.parts)  # Keras writes its own settings

report = {}
import trainstep as ts
report["after import"] = files()

import keras, numpy as np
from keras import layers
from trainstep.testing import wait_for_compilation

def run(width, sizes=(8, 5, 8)):
    keras.utils.set_random_seed(1)
    # Large enough to compile for a while: what is compiled at once is not worth a file.
    hidden = [layers.Dense(8, "gelu"), layers.LayerNormalization(), layers.Dense(8, "relu")]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(width, "tanh")])
    trainer = ts.Trainer(model, keras.optimizers.Adam(0.1), "mse")
    rng = np.random.default_rng(0)
    losses = []
    for n in sizes:
        x, y = rng.normal(size=(n, 4)).astype("float32"), rng.normal(size=(n, width)).astype("float32")
        losses.append(float(trainer.train_on_batch(x, y)["loss"]))
    wait_for_compilation()
    entries = [(e.kind, e.from_disk, e.compile_seconds > 0) for e in trainer.ledger]
    return {"losses": losses, "entries": entries, "files": files()}
"""

ONCE = TRAINS + 'report["run"] = run(3)\nprint("REPORT" + json.dumps(report))\n'

SWITCHED = (
    TRAINS
    + """
report["default"] = run(3, (8, 5))
ts.set_cache(None)
report["off"] = run(4, (8, 5))
ts.set_cache(Path(sys.argv[2]))
report["moved"] = run(5, (8, 5))
print("REPORT" + json.dumps(report))
"""
)


def start(script: str, *folders: Path, **environment: str) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "TRAINSTEP_CACHE"}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, folders)],
        env={**inherited, "PYTHONPATH": str(SOURCE), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    (line,) = [x for x in output.splitlines() if x.startswith("REPORT")]
    return json.loads(line.removeprefix("REPORT"))


def compiled(entries: list[Any]) -> list[bool]:
    """Of each program that was made, whether it came from the disk."""
    return [disk for kind, disk, seconds in entries if kind in ("trace", "bucket") and seconds]


@pytest.mark.slow
def test_programs_are_kept_on_disk_between_processes(tmp_path: Path, backend: str) -> None:
    if backend != "jax":
        pytest.skip("only JAX keeps programs on disk")
    kept, none = tmp_path / "kept", tmp_path / "none"
    none.mkdir()
    first_process = start(ONCE, kept, TRAINSTEP_CACHE=str(kept))
    # Off: neither there nor in the user's own folder.
    without = start(ONCE, none, TRAINSTEP_CACHE="off", XDG_CACHE_HOME=str(none), HOME=str(none))

    first = report(first_process)
    assert first["after import"] == []
    assert first["run"]["files"]
    assert compiled(first["run"]["entries"]) == [False, False]

    second = report(start(ONCE, kept, TRAINSTEP_CACHE=str(kept)))
    assert compiled(second["run"]["entries"]) == [True, True]
    assert second["run"]["losses"] == first["run"]["losses"]

    off = report(without)
    assert [f for f in off["run"]["files"] if "trainstep" in f or "jax" in f] == []
    assert compiled(off["run"]["entries"]) == [False, False]
    np.testing.assert_allclose(off["run"]["losses"], first["run"]["losses"], rtol=1e-6)


@pytest.mark.slow
def test_the_cache_is_the_users_by_default_and_can_be_switched(
    tmp_path: Path, backend: str
) -> None:
    if backend != "jax":
        pytest.skip("only JAX keeps programs on disk")
    users, other = tmp_path / "users", tmp_path / "other"
    users.mkdir()
    found = report(start(SWITCHED, users, other, XDG_CACHE_HOME=str(users), HOME=str(users)))
    assert found["after import"] == []
    default, off, moved = (set(found[k]["files"]) for k in ("default", "off", "moved"))
    assert default
    assert all(f.startswith(str(users)) for f in default)
    assert any("trainstep" in f for f in default)
    assert {f for f in off - default if "atime" not in f} == set()
    assert compiled(found["off"]["entries"]) == [False, False]
    new = {f for f in moved - off if "atime" not in f}
    assert new
    assert all(f.startswith(str(other)) for f in new)


def test_a_cache_may_be_set_on_every_engine(tmp_path: Path) -> None:
    try:
        ts.set_cache(tmp_path / "cache")
        assert not (tmp_path / "cache").exists() or keras.backend.backend() == "jax"
        total = ts.function(lambda x: keras.ops.sum(x) * 1.25)
        for n in (3, 4, 2):
            assert float(total(np.ones((n, 2), "float32"))) == 2.5 * n
    finally:
        ts.set_cache(None)


def test_a_cache_that_is_no_folder_is_an_error() -> None:
    try:
        with pytest.raises((ts.ArgumentError, TypeError)):
            ts.set_cache(3)  # type: ignore[arg-type]
    finally:
        ts.set_cache(None)


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    place = tmp_path / "file"
    place.write_text("mine")
    try:
        try:
            ts.set_cache(place / "below")
        except (ts.ArgumentError, OSError):
            return
        total = ts.function(lambda x: keras.ops.sum(x) * 1.75)
        for n in (3, 4):
            assert float(total(np.ones((n, 2), "float32"))) == 3.5 * n
    finally:
        ts.set_cache(None)
    assert place.read_text() == "mine"
