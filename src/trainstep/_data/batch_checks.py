"""Checks batches, and raises an `ArgumentError` with a cure for a wrong one.

A step checks a batch on a cache miss only: the first time that it sees these shapes, dtypes and
structure. A later batch of the same kind can differ in its values alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainstep._common.errors import ArgumentError
from trainstep._common.structure import is_number_list


def unpack_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Unpacks an item of a data set into `(x, y, sample_weight)`."""
    if isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 3:
        return (*batch, *(None,) * (3 - len(batch)))
    if isinstance(batch, (tuple, list)):
        raise ArgumentError(
            "Trainer",
            "data",
            "batches of x, (x, y) or (x, y, sample_weight)",
            f"a {type(batch).__name__} of {len(batch)}",
            "yield one of these; several inputs go into one list or dict, as x",
        )
    return batch, None, None


def class_weight_table(class_weight: Mapping[int, float] | None, weights: Any) -> Any:
    """Returns class numbers and their weights as the two rows of an array."""
    if class_weight is None:
        return None
    if weights is not None:
        raise both_weights_error()
    number = (int, float, np.integer, np.floating)
    if (
        not isinstance(class_weight, Mapping)
        or not all(isinstance(key, (int, np.integer)) for key in class_weight)
        or not all(isinstance(weight, number) for weight in class_weight.values())
    ):
        raise ArgumentError(
            "Trainer",
            "class_weight",
            "a dict from class numbers to weights",
            repr(class_weight),
            "number the classes as in `y`",
        )
    return np.array([list(class_weight), list(class_weight.values())], "float32")


def both_weights_error() -> ArgumentError:
    """The error for `class_weight` together with `sample_weight`."""
    return ArgumentError(
        "Trainer",
        "class_weight",
        "`class_weight` or `sample_weight`",
        "both",
        "multiply the weights of the classes into `sample_weight`",
    )


def check_dense(function: str, name: str, x: Any) -> None:
    """Rejects sparse and ragged arrays."""
    kind = type(x).__name__
    if hasattr(x, "toarray") or kind in ("SparseTensor", "RaggedTensor", "BCOO"):
        raise ArgumentError(
            function,
            name,
            "a dense array",
            f"a {kind}",
            "make it dense: `x.toarray()`, `tf.sparse.to_dense(x)`, `x.to_tensor()`, `x.todense()`",
        )


def check_positive(function: str, **numbers: float | None) -> None:
    """Rejects numbers that are not positive; None passes."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ArgumentError(
                function, name, "a positive number", repr(number), "pass 1 or more, or leave it out"
            )


def check_lengths(function: str, x: Any, y: Any, weights: Any) -> list[tuple[str, Any]]:
    """Checks that all arrays have the same first size, and returns them with their names."""
    named = (("x", x), ("y", y), ("sample_weight", weights))
    arrays = [pair for name, value in named for pair in _named_arrays(name, value, function)]
    if not arrays:
        raise ArgumentError(function, "x", "the inputs of the model", repr(x), "pass an array")
    (first_name, first), *others = arrays
    for name, array in arrays:
        if len(array.shape) == 0:
            raise ArgumentError(
                function,
                name,
                "an array whose first axis is the batch",
                "a single number",
                "pass a batch of one: add an axis in front",
            )
    length = first.shape[0]
    if length == 0:
        raise ArgumentError(
            function,
            first_name,
            "at least one sample",
            f"an empty array, of shape {tuple(first.shape)}",
            "skip empty batches",
        )
    for name, array in others:
        if array.shape[0] != length:
            raise ArgumentError(
                function,
                name,
                f"{length} samples, as in `{first_name}`",
                f"{array.shape[0]}, in shape {tuple(array.shape)}",
                "give every array the same first size",
            )
    return arrays


class BatchCheck:
    """Checks the batches of one model.

    Args:
        model: The model.
        function: The name of the method that the user called, for the error text.
        takes_targets: Whether the batch needs targets.
        losses: The number of outputs that have their own loss; None if one loss is for all.
        values: Whether to search for NaN.
    """

    def __init__(
        self,
        model: Any,
        function: str,
        *,
        takes_targets: bool,
        losses: int | None,
        values: bool,
    ) -> None:
        self._model = model
        self._function = function
        self._takes_targets = takes_targets
        self._losses = losses
        self._values = values

    def __call__(self, x: Any, y: Any = None, weights: Any = None, classes: Any = None) -> None:
        arrays = check_lengths(self._function, x, y, weights)
        self._check_inputs(x)
        if self._takes_targets:
            self._check_targets(y, classes)
        if self._values:
            self._check_nan(arrays)

    def _error(self, argument: str, expected: str, got: str, cure: str) -> ArgumentError:
        return ArgumentError(self._function, argument, expected, got, cure)

    def _check_inputs(self, x: Any) -> None:
        specs = getattr(self._model, "inputs", None)
        if not specs:
            return
        named = getattr(self._model, "_inputs_struct", None)
        if isinstance(x, dict):
            keys = named if isinstance(named, dict) else {spec.name: spec for spec in specs}
            pairs = [
                (key, spec, x.get(key)) for key, spec in keys.items() if hasattr(spec, "shape")
            ]
            missing = [key for key, _, _ in pairs if key not in x]
            if missing and len(x) < len(pairs):
                raise self._error(
                    "x",
                    f"inputs {', '.join(map(repr, keys))}",
                    f"only {', '.join(map(repr, x))}",
                    f"add {', '.join(map(repr, missing))}",
                )
            pairs = [] if missing else pairs
        else:
            given = x if is_array_sequence(x) else [x]
            if len(given) != len(specs):
                raise self._error(
                    "x",
                    f"{len(specs)} input{'s' * (len(specs) > 1)}, "
                    f"{', '.join(repr(s.name) for s in specs)}",
                    f"{len(given)} arrays",
                    "pass an array for each, in a list in this order, or in a dict by these names",
                )
            pairs = [(spec.name, spec, array) for spec, array in zip(specs, given, strict=True)]
        for name, spec, array in pairs:
            # `np.shape` also reads a nested list of numbers; an optional Keras input may be None.
            optional = array is None and spec._keras_history.operation.optional
            shape = None if array is None else np.shape(array)
            if not optional and (shape is None or not _shape_matches(spec.shape, shape)):
                raise self._error(
                    "x" if len(specs) == 1 else f"x ({name})",
                    f"shape {_shape_text((None, *spec.shape[1:]))}, as the model's input {name!r}",
                    "None" if shape is None else f"shape {_shape_text(shape)}",
                    "reshape the batch, or build the model for this shape",
                )

    def _check_targets(self, y: Any, classes: Any) -> None:
        if y is None:
            raise self._error("y", "targets for the loss", "None", "pass `y`, or (x, y) batches")
        outputs = getattr(self._model, "outputs", None)
        count = len(list(_named_arrays("y", y, self._function)))
        if classes is not None and count > 1:
            raise self._error(
                "class_weight",
                "a model with one output",
                f"targets of {count}",
                "pass `sample_weight`, one array per output",
            )
        structured = isinstance(y, dict) or is_array_sequence(y)
        if outputs and len(outputs) > 1 and not structured:
            raise self._error(
                "y",
                f"targets of {len(outputs)} outputs: "
                f"{', '.join(map(repr, self._model.output_names))}",
                "one",
                "pass a list of targets in this order, or a dict by these names",
            )
        # Keras accepts targets for all outputs, or only for those that have a loss.
        if outputs and count not in {len(outputs), self._losses or len(outputs)}:
            names = getattr(self._model, "output_names", None) or range(len(outputs))
            raise self._error(
                "y",
                f"targets of {len(outputs)} output{'s' * (len(outputs) > 1)}: "
                f"{', '.join(map(repr, names))}",
                f"{count} arrays",
                "pass one array per output",
            )

    def _check_nan(self, arrays: list[tuple[str, Any]]) -> None:
        for name, array in arrays:
            if isinstance(array, np.ndarray) and array.dtype.kind == "f" and np.isnan(array).any():
                row = int(np.argwhere(np.isnan(array))[0][0])
                raise self._error(
                    name,
                    "numbers",
                    f"NaN, first in sample {row} of the batch",
                    "clean the data; if NaN is intended, pass `check_values=False` to the Trainer",
                )


def _named_arrays(name: str, value: Any, function: str) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of an argument with their names, as NumPy or engine arrays."""
    if value is None:
        return
    if isinstance(value, Mapping):
        for key in value:
            yield from _named_arrays(f"{name}[{key!r}]", value[key], function)
        return
    if isinstance(value, (str, type)):
        kind = "string" if isinstance(value, str) else "class"
        raise _not_numbers(function, name, f"the {kind} {value!r}")
    if is_array_sequence(value):
        for index, item in enumerate(value):
            yield from _named_arrays(f"{name}[{index}]", item, function)
        return
    check_dense(function, name, value)
    array = value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)
    if not hasattr(array, "ndim") and hasattr(array, "__array__"):  # a pandas frame has no dtype
        array = np.asarray(array)
    kind = getattr(array.dtype, "kind", "")
    if kind in ("O", "U", "S", "M", "m"):
        raise _not_numbers(function, name, f"dtype {array.dtype}")
    yield name, array


def is_array_sequence(value: Any) -> bool:
    """Whether `value` is a sequence of arrays; False for an array written as a list of numbers."""
    return isinstance(value, tuple) or (isinstance(value, list) and not is_number_list(value))


def _not_numbers(function: str, name: str, got: str) -> ArgumentError:
    return ArgumentError(
        function,
        name,
        "numbers",
        got,
        "convert it: `x.astype('float32')`; number the labels: `np.unique(y, return_inverse=True)`",
    )


def _shape_matches(spec: Any, shape: Any) -> bool:
    """Whether an input fits `spec`, also after Keras adds or drops a last axis of size 1."""
    spec = tuple(spec)
    if len(shape) == len(spec) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    elif len(shape) == len(spec) - 1 and spec[-1] == 1:
        shape = (*shape, 1)
    return len(shape) == len(spec) and all(
        want is None or got is None or want == got
        for want, got in zip(spec[1:], shape[1:], strict=True)
    )


def _shape_text(shape: Any) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"
