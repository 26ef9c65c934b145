"""Nested values: their children, their leaves, and copies with other leaves."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any


def structure(value: Any) -> list[tuple[str, Any]] | None:
    """The named children of a nested value; None for a leaf."""
    if isinstance(value, list) and not is_number_list(value):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return [(f".{names[i]}" if names else f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", value[key]) for key in ordered(value)]
    if is_record(value):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def like(value: Any, children: list[Any]) -> Any:
    """A structure of the same type with other children."""
    if isinstance(value, tuple):
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    if isinstance(value, list):
        return children
    if isinstance(value, dict):
        filled = copy.copy(value)
        for name, child in zip(ordered(value), children, strict=True):
            dict.__setitem__(filled, name, child)  # past the `update` of a subclass
        return filled
    filled = copy.copy(value)
    for f, child in zip(dataclasses.fields(value), children, strict=True):
        object.__setattr__(filled, f.name, child)
    return filled


def leaves(value: Any) -> list[Any]:
    """The leaves of a nested value, in order."""
    children = structure(value)
    return (
        [value] if children is None else [leaf for _, child in children for leaf in leaves(child)]
    )


def filled(value: Any, leaves: Iterator[Any]) -> Any:
    """A nested value with other leaves."""
    children = structure(value)
    if children is None:
        return next(leaves)
    return like(value, [filled(child, leaves) for _, child in children])


def ordered(names: dict[Any, Any]) -> list[Any]:
    """The keys of a dict, sorted if possible: insertion order must not matter."""
    try:
        return sorted(names)
    except TypeError:
        return list(names)


def is_number_list(x: list[Any]) -> bool:
    """Whether a list is a (nested) list of numbers, which NumPy would turn into an array."""
    return bool(x) and all(
        type(item) in (int, float, bool, complex)
        or (type(item) is list and is_number_list(item))
        or _is_numpy_number(item)
        for item in x
    )


def _is_numpy_number(x: Any) -> bool:
    """Whether a value is a NumPy number; never imports NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.generic)


def is_record(x: Any) -> bool:
    """Whether a value is a dataclass of values; one with compiled methods is an object."""
    return (
        dataclasses.is_dataclass(x)
        and not isinstance(x, type)
        and not any(hasattr(member, "warm_up") for member in vars(type(x)).values())
    )
