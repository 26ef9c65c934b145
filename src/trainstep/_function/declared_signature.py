"""The declared signature of a function: checks calls against it, and makes arrays for `warm_up`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from trainstep._common.errors import ArgumentError
from trainstep._common.structure import like, structure
from trainstep._explain.signature import Part
from trainstep._function.dtypes import cast as without_loss
from trainstep._function.sizes.policy import BATCH, DynamicAxes
from trainstep._function.spec import Spec, check


class Declared:
    """One `Spec`, structure of `Spec`s, or None (anything) per parameter."""

    def __init__(
        self,
        function: str,
        names: Sequence[str],
        signature: Sequence[Any],
        canonical: Callable[[str], str],
    ) -> None:
        if len(signature) > len(names):
            raise ArgumentError(
                function,
                "signature",
                f"at most {len(names)} entries, one per parameter",
                f"{len(signature)} entries",
                "give one Spec per parameter",
            )
        self._function = function
        self._names = names
        self._canonical = canonical
        self._specs = [*signature, *[None] * (len(names) - len(signature))]

    def __repr__(self) -> str:
        return f"Declared({self._specs!r})"

    def declare_sizes(self, dynamic: DynamicAxes) -> None:
        """Adds the axes without a fixed size to the dynamic ones."""
        for name, spec in zip(self._names, self._specs, strict=True):
            _declare_sizes(name, spec, dynamic)

    def conform(self, values: Sequence[Any]) -> list[Any]:
        """Converts numbers and lists of numbers to arrays of the declared dtype.

        Arrays keep their dtype here: `Dtypes` casts them if no value changes, and else raises.
        """
        return [_to_declared(spec, value) for spec, value in zip(self._specs, values, strict=True)]

    def dtypes(self) -> dict[str, str]:
        """Returns the dtypes of the declared arrays, by name."""
        found: dict[str, str] = {}
        for name, spec in zip(self._names, self._specs, strict=True):
            _collect_dtypes(name, spec, found)
        return found

    def check(self, values: Sequence[Any], parts: Sequence[Part]) -> None:
        """Raises an `ArgumentError` that names the argument unless every value fits."""
        sizes: dict[str, tuple[str, int]] = {}
        known = {part.label: part for part in parts}
        for name, spec, value in zip(self._names, self._specs, values, strict=True):
            self._check(name, spec, value, known)
            self._check_names(name, spec, value, sizes)

    def _check_names(
        self, name: str, spec: Any, value: Any, sizes: dict[str, tuple[str, int]]
    ) -> None:
        """Raises an `ArgumentError` if one name stands for two different sizes."""
        if not isinstance(spec, Spec):
            pairs = zip(structure(spec) or (), structure(value) or (), strict=False)
            for (suffix, inner), (_, child) in pairs:
                self._check_names(f"{name}{suffix}", inner, child, sizes)
            return
        for size, called in zip(np.shape(value), spec.shape, strict=True):
            if isinstance(called, str):
                where, known = sizes.setdefault(called, (name, size))
                if known != size:
                    raise ArgumentError(
                        self._function,
                        name,
                        f"{called}={known}, as in `{where}`",
                        f"{called}={size}",
                        "pass arrays of one size, or give the sizes different names",
                    )

    def _check(self, name: str, spec: Any, value: Any, parts: Mapping[str, Part]) -> None:
        if spec is None:
            return
        if isinstance(spec, Spec):
            self._check_array(name, spec, parts)
            return
        wanted, got = structure(spec), structure(value)
        if wanted is None or got is None or [n for n, _ in wanted] != [n for n, _ in got]:
            raise ArgumentError(
                self._function,
                name,
                f"the structure {spec!r}",
                type(value).__name__,
                "pass the same structure as in `signature`",
            )
        for (suffix, inner), (_, child) in zip(wanted, got, strict=True):
            self._check(f"{name}{suffix}", inner, child, parts)

    def _check_array(self, name: str, spec: Spec, parts: Mapping[str, Part]) -> None:
        part = parts.get(name)
        if part is None or part.kind != "array":
            inside = [p for label, p in parts.items() if label.startswith((f"{name} ", f"{name}["))]
            got = "; ".join(p.text for p in ([part] if part else inside))
            argument = spec.name or name
            raise ArgumentError(self._function, argument, str(spec), got, "pass one array")
        shape, dtype = cast("tuple[tuple[int, ...], str]", part.token)
        check(spec, shape, dtype, function=self._function, argument=name, canonical=self._canonical)


def _collect_dtypes(name: str, spec: Any, found: dict[str, str]) -> None:
    if isinstance(spec, Spec):
        found[name] = spec.dtype
    else:
        for suffix, inner in structure(spec) or ():
            _collect_dtypes(f"{name}{suffix}", inner, found)


def _to_declared(spec: Any, value: Any) -> Any:
    number = isinstance(value, (int, float, np.integer, np.floating)) and type(value) is not bool
    if not isinstance(spec, Spec) or not (number or type(value) is list):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    made = without_loss(array, spec.dtype) if array.dtype.kind in "biuf" else None
    return value if made is None else made


def _declare_sizes(name: str, spec: Any, dynamic: DynamicAxes) -> None:
    if isinstance(spec, Spec):
        dynamic.declare(name, spec.shape)
        return
    for suffix, inner in structure(spec) or ():
        _declare_sizes(f"{name}{suffix}", inner, dynamic)


def filled_with_zeros(
    function: str, name: str, value: Any, largest: int | Mapping[str, int] | None
) -> Any:
    """Returns the value with each `Spec` in it replaced by an array of zeros of that shape.

    Args:
        function: The name of the function, for messages.
        name: The name of the argument.
        value: The argument.
        largest: The sizes for axes that a `Spec` leaves open.
    """
    if isinstance(value, Spec):
        if isinstance(largest, int):
            value = value.sized(lambda size: largest)
        elif largest is not None:
            value = value.sized(lambda size: largest.get(size or BATCH, size))
        return value.zeros(function, value.name or name)
    children = structure(value)
    if children is None:
        return value
    filled = [
        filled_with_zeros(function, f"{name}{suffix}", child, largest) for suffix, child in children
    ]
    return like(value, filled)


def check_largest(function: str, largest: Any) -> None:
    """Raises an `ArgumentError` unless `largest` has sizes."""
    sizes = list(largest.values()) if isinstance(largest, Mapping) else [largest]
    if largest is not None and any(not isinstance(s, int) or s < 1 for s in sizes):
        raise ArgumentError(
            function,
            "largest",
            "a size of 1 or more, or a dict of them by name",
            repr(largest),
            "pass the largest size of any later call",
        )
