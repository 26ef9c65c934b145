"""Checks the results of a host call against the declared specs.

    returns --> specs, in order
    found   --> arrays that fit them, or an ArgumentError that names the one that does not
    tensors --> the structure of `returns`, with tensors in the places of specs

`returns=None` declares no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainstep._common.errors import ArgumentError
from trainstep._common.structure import like, structure
from trainstep._explain.signature import array_text
from trainstep._function.spec import Spec

_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}  # a kind can represent those of lower numbers


def specs_in(function: str, returns: Any) -> list[Spec]:
    """Returns the specs in a structure, each with a size on every axis.

    Raises:
        ArgumentError: If the structure has another leaf, or a spec without a size.
    """
    return [] if returns is None else list(_specs(function, "returns", returns))


def fitting(function: str, returns: Any, found: Any) -> list[Any]:
    """Converts the results of a call to arrays that fit their specs.

    Raises:
        ArgumentError: If a result does not fit.
    """
    return [] if returns is None else list(_convert_all(function, "returns", returns, found))


def filled(returns: Any, tensors: Sequence[Any]) -> Any:
    """Returns the structure of `returns`, with tensors in the places of specs."""
    return None if returns is None else _filled(returns, iter(tensors))


def _specs(function: str, label: str, returns: Any) -> Iterator[Spec]:
    children = _children(returns)
    if children is not None:
        for suffix, child in children:
            yield from _specs(function, f"{label}{suffix}", child)
        return
    if not isinstance(returns, Spec):
        got = f"a {type(returns).__name__}"
    elif not all(isinstance(size, int) for size in returns.shape):
        got, label = str(returns), returns.name or label
    else:
        yield returns
        return
    expected = "a Spec with a size on every axis, or a structure of them"
    raise ArgumentError(function, label, expected, got, "pass ts.Spec(shape, dtype)")


def _convert_all(function: str, label: str, returns: Any, found: Any) -> Iterator[Any]:
    wanted = _children(returns)
    if wanted is None:
        yield _convert(function, label, returns, found)
        return
    got = structure(found)
    if got is None and isinstance(found, list):  # a list of numbers
        got = [(f"[{i}]", x) for i, x in enumerate(found)]
    if [suffix for suffix, _ in got or ()] != [suffix for suffix, _ in wanted]:
        expected = f"a {type(returns).__name__} of {', '.join(s for s, _ in wanted)}"
        got_text = f"a {type(found).__name__}: {found!r}"
        cure = "return the structure of `returns`"
        raise ArgumentError(function, label, expected, got_text, cure)
    for (suffix, spec), (_, child) in zip(wanted, got or (), strict=True):
        yield from _convert_all(function, f"{label}{suffix}", spec, child)


def _convert(function: str, label: str, spec: Spec, found: Any) -> Any:
    cure = "return an array that fits `returns`, or change `returns`"
    try:
        array = np.asarray(found)
    except ValueError as error:
        raise ArgumentError(function, spec.name or label, str(spec), str(error), cure) from error
    dtype = np.dtype(spec.dtype)
    if array.shape != spec.sizes() or not _fits(array, dtype):
        got = array_text(array.shape, array.dtype.name)
        raise ArgumentError(function, spec.name or label, str(spec), got, cure)
    return array.astype(dtype)


def _fits(array: Any, dtype: Any) -> bool:
    """Whether a dtype can represent the values of an array, rounded if they are floats."""
    got, wanted = _KINDS.get(_kind(array.dtype)), _KINDS.get(_kind(dtype))
    if got is None or wanted is None or got > wanted:
        return False
    if got == wanted == _KINDS["i"] and array.size:
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
