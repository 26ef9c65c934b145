"""Checkpoints as files: complete, or not there.

    directory/step-120/state.safetensors   every array
                       manifest.json       what they are, where the data was, a checksum
              step-120.1/                  a second one at the same step

A checkpoint is written beside its place, forced to the disk, and then renamed: whoever reads finds
it whole, or not at all. None is ever written over. The newest that is whole counts.
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
_KNOWN = "?bhilqBHILQefdFD"  # codes of NumPy's own dtypes; others are stored as bytes


def write(
    directory: Path, step: int, arrays: Mapping[str, Any], manifest: dict[str, Any], keep: int
) -> None:
    """Writes a checkpoint, and drops those that are older than the last `keep`."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f".{_PREFIX}*"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    there = [at for at in _all(directory) if at[0] == step]
    place = directory / (f"{_PREFIX}{step}" + (f".{max(there)[1] + 1}" if there else ""))
    new = directory / f".{place.name}-{os.getpid()}"
    new.mkdir()
    dtypes = {name: np.asarray(x).dtype.name for name, x in arrays.items()}
    data = save({name: _as_stored(np.asarray(x)) for name, x in arrays.items()})
    told = {**manifest, "format": FORMAT, "step": step, "dtypes": dtypes}
    told["sha256"] = hashlib.sha256(data).hexdigest()
    _put(new / _STATE, data)
    _put(new / _MANIFEST, json.dumps(told, indent=1).encode())
    _sync(new)
    new.rename(place)
    _sync(directory)
    found = _all(directory)
    new_at = next(at for at, each in found.items() if each == place)
    # Those of later steps are broken, or this run would have gone on from them.
    for at in sorted(at for at in found if at <= new_at)[:-keep]:
        shutil.rmtree(found[at], ignore_errors=True)


def newest(directory: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The manifest and the arrays of the newest checkpoint that is whole."""
    places = _all(directory)
    for at in sorted(places, reverse=True):
        found = _read(places[at])
        if found is not None:
            return found
    return None


def _all(directory: Path) -> dict[tuple[int, int], Path]:
    """All checkpoints, by their step and their number at that step."""
    found = {}
    for each in directory.glob(f"{_PREFIX}*"):
        step, _, number = each.name.removeprefix(_PREFIX).partition(".")
        if step.isdecimal() and (number or "0").isdecimal():
            found[int(step), int(number or 0)] = each
    return found


def _read(place: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        manifest = json.loads((place / _MANIFEST).read_bytes())
        data = (place / _STATE).read_bytes()
        if manifest["format"] == FORMAT and manifest["sha256"] == hashlib.sha256(data).hexdigest():
            dtypes = manifest["dtypes"]
            arrays = {name: _restored(x, dtypes[name]) for name, x in load(data).items()}
            return manifest, arrays
    return None


def _as_stored(x: Any) -> Any:
    x = np.ascontiguousarray(x).reshape(x.shape)
    return x if x.dtype.char in _KNOWN else x.view(f"u{x.dtype.itemsize}")


def _restored(x: Any, dtype: str) -> Any:
    if x.dtype.name == dtype:
        return x
    import ml_dtypes  # NumPy does not know bfloat16 and the like

    return x.view(getattr(ml_dtypes, dtype))


def _put(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
