"""Checkpoints on disk, each complete or absent.

    directory/step-120/state.safetensors   every array
                       manifest.json       dtypes, the position in the data, a checksum
              step-120.1/                  a second checkpoint at the same step

A checkpoint is written to a temporary directory, synced to the disk, and then renamed, so a reader
sees all of it or nothing. No checkpoint is overwritten. Readers use the newest one whose checksum
is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

FORMAT = 1
_STATE, _MANIFEST = "state.safetensors", "manifest.json"
_PREFIX = "step-"
_NUMPY_CODES = "?bhilqBHILQefdFD"  # NumPy's own dtypes; others are stored as unsigned integers


def write(
    directory: Path, step: int, arrays: Mapping[str, Any], manifest: dict[str, Any], keep: int
) -> None:
    """Writes a checkpoint, and deletes all but the newest `keep`."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f".{_PREFIX}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    same_step = [key for key in _list(directory) if key[0] == step]
    path = directory / (f"{_PREFIX}{step}" + (f".{max(same_step)[1] + 1}" if same_step else ""))
    temporary = directory / f".{path.name}-{os.getpid()}"
    temporary.mkdir()
    dtypes = {name: np.asarray(x).dtype.name for name, x in arrays.items()}
    data = save({name: _to_stored(np.asarray(x)) for name, x in arrays.items()})
    full_manifest = {**manifest, "format": FORMAT, "step": step, "dtypes": dtypes}
    full_manifest["sha256"] = hashlib.sha256(data).hexdigest()
    _write_synced(temporary / _STATE, data)
    _write_synced(temporary / _MANIFEST, json.dumps(full_manifest, indent=1).encode())
    _sync_directory(temporary)
    temporary.rename(path)
    _sync_directory(directory)
    paths = _list(directory)
    new_key = next(key for key, each in paths.items() if each == path)
    # Checkpoints of later steps are broken, or this run would have resumed from them. They do not
    # count towards `keep`.
    for key in sorted(key for key in paths if key <= new_key)[:-keep]:
        shutil.rmtree(paths[key], ignore_errors=True)


def newest(directory: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the manifest and the arrays of the newest complete checkpoint."""
    paths = _list(directory)
    for key in sorted(paths, reverse=True):
        checkpoint = _read(paths[key])
        if checkpoint is not None:
            return checkpoint
    return None


def _list(directory: Path) -> dict[tuple[int, int], Path]:
    """Returns all checkpoints by their step and their number at that step."""
    found = {}
    for each in directory.glob(f"{_PREFIX}*"):
        step, _, number = each.name.removeprefix(_PREFIX).partition(".")
        if step.isdecimal() and (number or "0").isdecimal():
            found[int(step), int(number or 0)] = each
    return found


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        manifest = json.loads((path / _MANIFEST).read_bytes())
        data = (path / _STATE).read_bytes()
        if manifest["format"] == FORMAT and manifest["sha256"] == hashlib.sha256(data).hexdigest():
            dtypes = manifest["dtypes"]
            arrays = {name: _from_stored(x, dtypes[name]) for name, x in load(data).items()}
            return manifest, arrays
    return None


def _to_stored(x: Any) -> Any:
    x = np.ascontiguousarray(x).reshape(x.shape)
    return x if x.dtype.char in _NUMPY_CODES else x.view(f"u{x.dtype.itemsize}")


def _from_stored(x: Any, dtype: str) -> Any:
    if x.dtype.name == dtype:
        return x
    import ml_dtypes  # NumPy has no bfloat16 and no float8

    return x.view(getattr(ml_dtypes, dtype))


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    # Without this, a crash of the machine may lose the rename. Windows cannot open a directory.
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
