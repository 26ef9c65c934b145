"""What a function on the host returns to a step, against the specs that say so.

    returns --> specs, in order
    found   --> arrays that fit them, or an ArgumentError that names the one that does not
    tensors --> the structure of `returns`, with these in place of specs

`None` in place of a structure: nothing is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainstep._common.errors import ArgumentError
from trainstep._common.structure import like, structure
from trainstep._explain.signature import array_text
from trainstep._function.spec import Spec

_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}  # what each can stand for, and all below


def specs_in(function: str, returns: Any) -> list[Spec]:
    """The specs in a structure, each with a size on every axis.

    Raises:
        ArgumentError: If there is anything else.
    """
    return [] if returns is None else list(_specs(function, "returns", returns))


def fitting(function: str, returns: Any, found: Any) -> list[Any]:
    """The results of a call as arrays that fit their specs.

    Raises:
        ArgumentError: If one does not.
    """
    return [] if returns is None else list(_fitting(function, "returns", returns, found))


def filled(returns: Any, tensors: Sequence[Any]) -> Any:
    """The structure of `returns`, with tensors in place of specs."""
    return None if returns is None else _filled(returns, iter(tensors))


def _specs(function: str, label: str, returns: Any) -> Iterator[Spec]:
    children = _children(returns)
    if children is not None:
        for suffix, child in children:
            yield from _specs(function, f"{label}{suffix}", child)
        return
    if not isinstance(returns, Spec):
        came = f"a {type(returns).__name__}"
    elif not all(isinstance(size, int) for size in returns.shape):
        came, label = str(returns), returns.name or label
    else:
        yield returns
        return
    expected = "a Spec with a size on every axis, or a structure of them"
    raise ArgumentError(function, label, expected, came, "pass ts.Spec(shape, dtype)")


def _fitting(function: str, label: str, returns: Any, found: Any) -> Iterator[Any]:
    wanted = _children(returns)
    if wanted is None:
        yield _fitted(function, label, returns, found)
        return
    came = structure(found)
    if came is None and isinstance(found, list):  # of numbers
        came = [(f"[{i}]", x) for i, x in enumerate(found)]
    if [suffix for suffix, _ in came or ()] != [suffix for suffix, _ in wanted]:
        expected = f"a {type(returns).__name__} of {', '.join(s for s, _ in wanted)}"
        came_text = f"a {type(found).__name__}: {found!r}"
        cure = "return the structure that `returns` has"
        raise ArgumentError(function, label, expected, came_text, cure)
    for (suffix, spec), (_, child) in zip(wanted, came or (), strict=True):
        yield from _fitting(function, f"{label}{suffix}", spec, child)


def _fitted(function: str, label: str, spec: Spec, found: Any) -> Any:
    cure = "return what `returns` says, or change it"
    try:
        array = np.asarray(found)
    except ValueError as error:
        raise ArgumentError(function, spec.name or label, str(spec), str(error), cure) from error
    dtype = np.dtype(spec.dtype)
    if array.shape != spec.sizes() or not _fits(array, dtype):
        came = array_text(array.shape, array.dtype.name)
        raise ArgumentError(function, spec.name or label, str(spec), came, cure)
    return array.astype(dtype)


def _fits(array: Any, dtype: Any) -> bool:
    """Whether an array can have a dtype and mean the same numbers, rounded if they are floats."""
    came, wanted = _KINDS.get(_kind(array.dtype)), _KINDS.get(_kind(dtype))
    if came is None or wanted is None or came > wanted:
        return False
    if came == wanted == _KINDS["i"] and array.size:
        limits = np.iinfo(dtype)
        return bool(limits.min <= array.min() and array.max() <= limits.max)
    return True


def _kind(dtype: Any) -> str:
    return "f" if dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") else str(dtype.kind)


def _filled(returns: Any, tensors: Iterator[Any]) -> Any:
    children = _children(returns)
    if children is None:
        return next(tensors)
    return like(returns, [_filled(child, tensors) for _, child in children])


def _children(returns: Any) -> list[tuple[str, Any]] | None:
    return None if isinstance(returns, Spec) else structure(returns)  # a Spec is a dataclass
