"""`Shapes`: what sizes that vary cost, and the names of the axes along which they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep._common.errors import ArgumentError
from trainstep._engines import Engine

_POLICIES = ("auto", "exact", "dynamic", "bucket")


@dataclass(frozen=True)
class Shapes:
    """How the sizes of arrays map to programs.

    Whatever the policy, the numbers are those of the exact shapes: an array that is padded for a
    larger program is masked in it, wherever positions mix.

    Args:
        policy: `"exact"`: a program for every shape. `"bucket"`: the step is recorded once, for any
            size; on JAX it is compiled for a few sizes, and smaller arrays are padded; elsewhere
            one program takes all sizes. `"dynamic"`: one program for all sizes, by the engine's own
            means; not on JAX. `"auto"`: the first size is compiled as it is; from the second on,
            as `"bucket"`.
        grid: The sizes of buckets, or a dict of them by the name of the size. By default
            multiples of `multiple`, in steps of `ratio`, around the first size seen.
        ratio: From one bucket to the next; 2 for the batch and 1.5 for other sizes by default.
        multiple: What sizes of buckets are rounded up to.
        patience: A closer bucket is compiled once the larger one has wasted as much as so many
            steps of the mean size.
        buckets: The number of buckets for each size that varies.
        max_programs: The number of programs that a function keeps; past it, the one that was used
            longest ago goes.
        background: Whether a closer bucket is compiled in a thread while the larger one serves.
            Turn it off for runs that are equal bit by bit: at which step the smaller program
            takes over, and with it the rounding, depends on time.

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
        """The sizes that were given for the buckets of one size, ascending."""
        given = self.grid.get(name) if isinstance(self.grid, Mapping) else self.grid
        return None if given is None else sorted(given)

    def ratio_of(self, name: str) -> float:
        """From one bucket of a size to the next."""
        return self.ratio or (2.0 if name == BATCH else 1.5)


BATCH = "batch"  # the name of the first array's first axis


def policy(shapes: Any, engine: Engine) -> Shapes:
    """The policy of a function, from what a person may pass, checked against the engine."""
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
    """Refuses what does not name axes by parameter."""
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


class Varying:
    """The axes that a person has named as varying, by the labels of arguments."""

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
                "an axis, axes, or a dict of them for the arrays inside, by parameter",
                f"{label}: {axes!r}",
                "for example dynamic={'x': 1} or dynamic={'batch': {'tokens': (0, 1)}}",
            )

    def declare(self, label: str, shape: Sequence[Any]) -> None:
        """Adds the axes of a Spec that have no size, with their names."""
        axes = {
            axis: size if isinstance(size, str) else None
            for axis, size in enumerate(shape)
            if not isinstance(size, int)
        }
        self._axes.setdefault(label, {}).update(axes)

    def check(self, function: str, label: str, shape: Sequence[int]) -> None:
        """Refuses axes of an array that it has not."""
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
        """The axes of an array that vary, with the names of their sizes if they have any."""
        found: dict[int, str | None] = {}
        for known, axes in self._axes.items():
            if label == known or label.startswith((f"{known}[", f"{known}.")):
                for axis, name in axes.items():
                    place = axis + rank if axis < 0 else axis
                    if 0 <= place < rank:
                        found[place] = name
        return found
