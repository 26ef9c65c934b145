"""Patterns: the shapes of a call, with names in the places of dynamic sizes.

    (32, 20), (32,)  then  (17, 20), (17,)   ->   (batch, 20), (batch,)

A pattern is the closest common description of two calls: sizes that change together have one name.
Only axes that may be dynamic have one: the first axis of every array as long as the first array,
and declared axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from trainstep._explain.signature import Part, array_text
from trainstep._function.sizes.policy import BATCH

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """The shapes of the arrays of a call; a name is any size."""

    shapes: tuple[tuple[int | str, ...], ...]

    @property
    def names(self) -> list[str]:
        """The names of the dynamic sizes, in order of appearance."""
        found = {size: None for shape in self.shapes for size in shape if isinstance(size, str)}
        return list(found)

    @property
    def axes(self) -> list[tuple[str | None, ...]]:
        """The name of a dynamic size, or None, by array and axis."""
        return [
            tuple(size if isinstance(size, str) else None for size in shape)
            for shape in self.shapes
        ]

    def sizes(self, shapes: Sequence[Shape]) -> dict[str, int] | None:
        """Returns the sizes in these shapes, by name; None if they do not fit."""
        found: dict[str, int] = {}
        for pattern, shape in zip(self.shapes, shapes, strict=True):
            if len(pattern) != len(shape):
                return None
            for want, size in zip(pattern, shape, strict=True):
                if (found.setdefault(want, size) if isinstance(want, str) else want) != size:
                    return None
        return found

    def __str__(self) -> str:
        return ", ".join(f"[{','.join(map(str, shape))}]" for shape in self.shapes)


def dynamic_axes(
    before: Sequence[Sequence[int | str]],
    shapes: Sequence[Shape],
    declared: Sequence[dict[int, str | None]],
) -> list[dict[int, str | None]]:
    """Returns the axes that may be dynamic, by array, with their declared names."""
    lead = next((i for i, shape in enumerate(shapes) if shape), None)
    found = []
    for old, new, axes in zip(before, shapes, declared, strict=True):
        mine = dict(axes)
        if lead is not None and new and (old[0], new[0]) == (before[lead][0], shapes[lead][0]):
            mine.setdefault(0, None)
        # A size that was always 1 stays fixed: with 1, broadcasting gives other programs.
        found.append({a: name for a, name in mine.items() if (old[a], new[a]) != (1, 1)})
    return found


def common(
    before: Sequence[Sequence[int | str]],
    shapes: Sequence[Shape],
    declared: Sequence[dict[int, str | None]],
) -> Pattern | None:
    """Returns the closest common pattern of an earlier call or pattern and this call, if any."""
    if [len(old) for old in before] != [len(new) for new in shapes]:
        return None
    may = dynamic_axes(before, shapes, declared)
    names: dict[tuple[int | str, int], str] = {}
    lead = next((i for i, shape in enumerate(shapes) if shape), None)
    if lead is not None and 0 in may[lead]:
        names[before[lead][0], shapes[lead][0]] = may[lead][0] or BATCH
    pattern = []
    for old, new, axes in zip(before, shapes, may, strict=True):
        entry: list[int | str] = []
        for axis, pair in enumerate(zip(old, new, strict=True)):
            if axis in axes:
                if pair not in names or axes[axis] is not None:
                    names[pair] = axes[axis] or _unused(names)
                entry.append(names[pair])
            elif pair[0] == pair[1]:
                entry.append(pair[1])
            else:
                return None
        pattern.append(tuple(entry))
    made = Pattern(tuple(pattern))
    # If one name was declared for sizes that differ, no pattern fits.
    return made if made.names and made.sizes(shapes) is not None else None


def _unused(names: dict[tuple[int | str, int], str]) -> str:
    used = {*names.values(), BATCH}
    return next(n for n in ("time", *(f"size{i}" for i in range(2, 99))) if n not in used)


def with_sizes(parts: Sequence[Part], pattern: Pattern) -> list[Part]:
    """Returns the parts of a call with names in the places of dynamic sizes."""
    shapes = iter(pattern.shapes)
    found = []
    for part in parts:
        shape = next(shapes) if part.kind in ("array", "number") else ()
        if part.kind != "array":
            found.append(part)
            continue
        dtype = part.token[1]  # type: ignore[index]
        found.append(replace(part, text=array_text(shape, dtype), token=(shape, dtype)))
    return found


def enlarged(leaves: Sequence[Any], pattern: Pattern, first: Mapping[str, int]) -> list[Any]:
    """Returns stand-ins for the arrays of a call, at least as large as those of the first call.

    A branch on a size (`if n >= 8`) is traced for their sizes: a short last batch must not decide.
    """
    found = []
    for leaf, shape in zip(leaves, pattern.shapes, strict=True):
        pairs = zip(leaf.shape, shape, strict=True)
        sizes = tuple(max(size, first.get(str(name), 0)) for size, name in pairs)
        same = sizes == tuple(leaf.shape)
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        found.append(leaf if same else np.zeros(sizes, dtype))
    return found
