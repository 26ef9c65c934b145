"""Runs scripts under doctor and without: in processes of their own, or here.

The environment of a child is set here: the paths of trainstep and the witness, and no cache on disk.
Running here saves a process and the import of an engine, which cost more than most scripts do.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import keras

import trainstep
from trainstep._common.run_script import run_script

ENGINE = keras.backend.backend()
HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
SOURCE = HERE.parents[1] / "src"
SECONDS = 240  # more than any script needs on a busy machine
Completed = subprocess.CompletedProcess[str]


def environment(**more: str) -> dict[str, str]:
    """The environment of a child."""
    path = [str(SOURCE), str(HERE / "site-packages"), os.environ.get("PYTHONPATH", "")]
    fixed = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRAINSTEP_CACHE": "off",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **fixed, **more}


def python(*argv: str | Path, cwd: Path | None = None, **env: str) -> Completed:
    """Runs the interpreter with these arguments; what it prints is kept as text."""
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def doctor(
    *argv: str | Path, options: Sequence[str | Path] = (), cwd: Path | None = None, **env: str
) -> Completed:
    """Runs a script, or whatever `argv` says, under doctor."""
    return python("-m", "trainstep", "doctor", *options, *argv, cwd=cwd, **env)


def examined(
    folder: Path,
    *argv: str | Path,
    options: Sequence[str | Path] = (),
    cwd: Path | None = None,
    **env: str,
) -> tuple[Completed, dict[str, Any]]:
    """Runs a script under doctor and reads the report that it leaves in `folder`."""
    file = folder / "report.json"
    done = doctor(*argv, options=["--json", file, *options], cwd=cwd, **env)
    assert file.exists(), f"no report; exit code {done.returncode}\n{done.stderr[-4000:]}"
    return done, json.loads(file.read_text())


def examined_here(script: Path, *, small: bool = False) -> tuple[str, dict[str, Any]]:
    """Runs a script under doctor in this process; returns its output and the report.

    `small`: whether the programs of single operations matter, which earlier scripts have compiled.
    """
    if ENGINE == "torch":
        importlib.import_module("torch._dynamo").reset()
    elif ENGINE == "jax" and small:
        importlib.import_module("jax").clear_caches()
    printed = io.StringIO()
    with _as_main(), contextlib.redirect_stdout(printed), _fresh_witness():
        with trainstep.doctor() as found:
            run_script(str(script), [])
        # The script's module is still alive here, as it is at the exit of a process.
        return printed.getvalue(), found.report.to_dict()


@contextlib.contextmanager
def _as_main() -> Iterator[None]:
    """Restores the parts of `sys` that running a script replaces."""
    main, argv, path = sys.modules["__main__"], list(sys.argv), list(sys.path)
    interval = sys.getswitchinterval()
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv[:], sys.path[:] = main, argv, path
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def _fresh_witness() -> Iterator[ModuleType]:
    """Imports a witness that has counted nothing yet, and removes its listeners afterwards."""
    sys.path.insert(1, str(HERE / "site-packages"))  # a script's folder replaces the first entry
    witness = importlib.import_module("witness")
    try:
        yield witness
    finally:
        del sys.modules["witness"]
        witness.stop()


def written(folder: Path, text: str, name: str = "script.py") -> Path:
    """A script with this text."""
    file = folder / name
    file.write_text(text)
    return file
