"""`Shapes`, the policy for dynamic sizes, and `DynamicAxes`, the axes that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep._common.errors import ArgumentError
from trainstep._engines import Engine

_POLICIES = ("auto", "exact", "dynamic", "bucket")


@dataclass(frozen=True)
class Shapes:
    """The policy for dynamic sizes: which program serves which shapes.

    Under every policy the results are those of the exact shapes: where positions mix, the program
    masks padding.

    Args:
        policy: `"exact"`: a program for every shape. `"bucket"`: one trace for all sizes; on JAX,
            programs for a few sizes, with smaller arrays padded; elsewhere one program for all
            sizes. `"dynamic"`: one program for all sizes; not on JAX. `"auto"`: the first size is
            compiled exactly; from the second on, as `"bucket"`.
        grid: The sizes of buckets, or a dict of them by the name of the size. By default,
            multiples of `multiple`, in steps of `ratio`, around the first size.
        ratio: The ratio of a bucket to the next smaller one; by default 2 for the batch and 1.5 for
            other sizes.
        multiple: Sizes of buckets are rounded up to a multiple of this.
        patience: A closer bucket is compiled once the padding of the larger one has cost as much as
            this many steps of the mean size.
        buckets: The largest number of buckets per dynamic size.
        max_programs: The largest number of programs in a function's cache; beyond it, the least
            recently used one is dropped.
        background: Whether a closer bucket is compiled in a thread while the larger one serves.
            Turn it off for runs that have to be bitwise reproducible: the step from which the
            smaller program serves, and thus the rounding, depends on timing.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> shapes = ts.Shapes("bucket", grid=(4, 8))
        >>> total = ts.function(lambda x: keras.ops.sum(x), shapes=shapes)
        >>> [float(total(np.ones(n))) for n in (3, 2, 7)], total.trace_count
        ([3.0, 2.0, 7.0], 1)
    """

    policy: str = "auto"
    grid: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    ratio: float | None = None
    multiple: int = 8
    patience: int = 500
    buckets: int = 8
    max_programs: int = 64
    background: bool = True

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise ArgumentError(
                "Shapes",
                "policy",
                " or ".join(map(repr, _POLICIES)),
                repr(self.policy),
                "pass one of them",
            )
        for name in ("multiple", "patience", "buckets", "max_programs"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise ArgumentError(
                    "Shapes", name, "a whole number, 1 or more", repr(number), "pass such a number"
                )
        if self.ratio is not None and not (isinstance(self.ratio, (int, float)) and self.ratio > 1):
            raise ArgumentError(
                "Shapes", "ratio", "more than 1", repr(self.ratio), "pass such a number"
            )
        for sizes in self._grids():
            if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
                raise ArgumentError(
                    "Shapes", "grid", "sizes of 1 or more", repr(sizes), "pass such sizes"
                )

    def _grids(self) -> list[Sequence[int]]:
        if self.grid is None:
            return []
        return list(self.grid.values()) if isinstance(self.grid, Mapping) else [self.grid]

    def grid_of(self, name: str) -> Sequence[int] | None:
        """Returns the grid of one size, ascending, if the user has passed one."""
        given = self.grid.get(name) if isinstance(self.grid, Mapping) else self.grid
        return None if given is None else sorted(given)

    def ratio_of(self, name: str) -> float:
        """Returns the ratio between the buckets of one size."""
        return self.ratio or (2.0 if name == BATCH else 1.5)


BATCH = "batch"  # the name of the first array's first axis


def policy(shapes: Any, engine: Engine) -> Shapes:
    """Converts the argument `shapes` to a `Shapes`, and checks it against the engine."""
    made = shapes if isinstance(shapes, Shapes) else Shapes(shapes)
    if made.policy == "dynamic" and engine.sizes == "bucket":
        raise ArgumentError(
            "trainstep.function",
            "shapes",
            f"'auto', 'bucket' or 'exact' on {engine.name}, which compiles for fixed sizes",
            "'dynamic'",
            "pass 'bucket': one trace, and a few programs for all sizes",
        )
    return made


def check_dynamic(function: str, dynamic: Any, names: Sequence[str]) -> None:
    """Raises an `ArgumentError` unless `dynamic` has axes by parameter."""
    if dynamic is None:
        return
    given = list(dynamic) if isinstance(dynamic, Mapping) else [dynamic]
    for name in given:
        if not isinstance(dynamic, Mapping) or name not in names:
            raise ArgumentError(
                function,
                "dynamic",
                f"a dict of axes by parameter: {', '.join(names)}",
                repr(name),
                "for example dynamic={'x': 1}",
            )


class DynamicAxes:
    """The axes that were declared as dynamic, by the label of the argument."""

    def __init__(self, dynamic: Mapping[str, Any] | None, names: Sequence[str]) -> None:
        self._axes: dict[str, dict[int, str | None]] = {}
        check_dynamic("trainstep.function", dynamic, names)
        for name, axes in (dynamic or {}).items():
            self._add(name, axes)

    def _add(self, label: str, axes: Any) -> None:
        if isinstance(axes, Mapping):
            for key, inner in axes.items():
                self._add(f"{label}[{key!r}]", inner)
        elif isinstance(axes, int):
            self._axes[label] = {axes: None}
        elif isinstance(axes, Sequence) and all(isinstance(axis, int) for axis in axes):
            self._axes[label] = dict.fromkeys(axes)
        else:
            raise ArgumentError(
                "trainstep.function",
                "dynamic",
                "an axis, axes, or a dict of them for the arrays of a structure, by parameter",
                f"{label}: {axes!r}",
                "for example dynamic={'x': 1} or dynamic={'batch': {'tokens': (0, 1)}}",
            )

    def declare(self, label: str, shape: Sequence[Any]) -> None:
        """Adds the axes of a `Spec` without a fixed size, with their names."""
        axes = {
            axis: size if isinstance(size, str) else None
            for axis, size in enumerate(shape)
            if not isinstance(size, int)
        }
        self._axes.setdefault(label, {}).update(axes)

    def check(self, function: str, label: str, shape: Sequence[int]) -> None:
        """Raises an `ArgumentError` if an array lacks a declared axis."""
        for known, axes in self._axes.items():
            inside = known.startswith((f"{label}[", f"{label}."))
            beyond = [axis for axis in axes if not -len(shape) <= axis < len(shape)]
            if inside or (label == known and beyond):
                raise ArgumentError(
                    function,
                    "dynamic",
                    f"axes of `{label}`, an array of shape {tuple(shape)}",
                    f"{known}: {list(axes)}",
                    "name an axis that the array has",
                )

    def of(self, label: str, rank: int) -> dict[int, str | None]:
        """Returns the dynamic axes of an array, with the names of their sizes, if any."""
        found: dict[int, str | None] = {}
        for known, axes in self._axes.items():
            if label == known or label.startswith((f"{known}[", f"{known}.")):
                for axis, name in axes.items():
                    place = axis + rank if axis < 0 else axis
                    if 0 <= place < rank:
                        found[place] = name
        return found
