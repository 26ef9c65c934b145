"""Runs scripts in processes of their own, with doctor and without.

Everything that a child sees of this machine is set here: where trainstep and the witness are
found, and that nothing is kept on disk between runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def written(folder: Path, text: str, name: str = "script.py") -> Path:
    """A script with this text."""
    file = folder / name
    file.write_text(text)
    return file
