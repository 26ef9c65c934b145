"""Feeds: finds the tensor of each key, and converts and checks its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from trainstep._common.errors import ArgumentError
from trainstep._explain.signature import array_text
from trainstep.graph._graph import Graph, plain_name
from trainstep.graph._tensors import describe, label, node_of
from trainstep.graph._traverse import nodes_from, sources_of
from trainstep.graph._variables import Variable

_FUNCTION = "Session.run"


def as_dict(feeds: Any) -> dict[Any, Any]:
    """Converts another mapping to a dict, and rejects anything else."""
    if not isinstance(feeds, Mapping):
        raise ArgumentError(
            _FUNCTION,
            "feed_dict",
            "a dict of values by placeholder",
            f"a {type(feeds).__name__}",
            "write `feed_dict={x: batch}`",
        )
    return dict(feeds)


def by_tensor(graph: Graph, feeds: dict[Any, Any]) -> dict[Any, Any]:
    """Feeds by tensor, in the same order; names among the keys are resolved."""
    found = {tensor_of(graph, key): value for key, value in feeds.items()}
    if len(found) < len(feeds):
        raise _fed_twice(graph, list(feeds))
    return found


def _fed_twice(graph: Graph, keys: Sequence[Any]) -> ArgumentError:
    seen: dict[Any, Any] = {}
    for key in keys:
        first = seen.setdefault(tensor_of(graph, key), key)
        if first is not key:
            break
    shown = [repr(each) if isinstance(each, str) else describe(each) for each in (first, key)]
    return ArgumentError(
        _FUNCTION,
        "feed_dict",
        "one value for each tensor",
        f"two values for one tensor: {' and '.join(shown)}",
        "remove one of them",
    )


def tensor_of(graph: Graph, key: Any) -> Any:
    """Returns the tensor of a key of `feed_dict`."""
    found = by_name(graph, key) if isinstance(key, str) else key
    is_weight = (
        isinstance(found, Variable) and found.initial is None
    )  # its layer reads the Keras variable, and would not see a feed
    if isinstance(found, keras.KerasTensor) and not is_weight:
        return found
    if isinstance(key, str) and found is None:
        raise graph.unknown_name_error(key, "feed_dict")
    got = describe(found) if hasattr(found, "name") else f"a {type(key).__name__}"
    raise ArgumentError(
        _FUNCTION,
        "feed_dict",
        "placeholders, other tensors of the graph, or their names as keys",
        got,
        "set a variable with `load` or an `assign`"
        if isinstance(found, (keras.Variable, Variable))
        else "use the result of `graph.placeholder` as key",
    )


def by_name(graph: Graph, name: str) -> Any:
    """Returns the tensor or operation of a name, or None.

    The graph's own names have priority; then the name of a Keras layer is its first output.
    """
    found = graph.find(name)
    if found is None:
        found = graph.keras_names.get(name)
    if found is None:
        made = [n for n in nodes_from(graph.sources) if n.operation.name == plain_name(name)]
        if made:
            # Stored: every run resolves its names, and a second call of the layer must not change
            # the result.
            found = graph.keras_names[name] = made[0].outputs[0]
    return found


def check_graph(graph: Graph, tensor: Any) -> None:
    """Rejects a feed that would have no effect: a tensor of another graph, or of a body."""
    if any(getattr(each, "graph", None) is not graph for each in sources_of([tensor])):
        raise ArgumentError(
            _FUNCTION,
            "feed_dict",
            "tensors of the session's own graph",
            f"{describe(tensor)}, of another graph",
            "make the session with `Session(graph=...)` for the graph of the tensor",
        )
    if (node := node_of(tensor)) in graph.body_owner:
        raise inside_body_error("feed_dict", tensor, graph.body_owner[node])


def inside_body_error(argument: str, value: Any, function: str) -> ArgumentError:
    """The error for a tensor or an operation that exists only inside a branch or a loop."""
    return ArgumentError(
        _FUNCTION,
        argument,
        f"a tensor or an operation from outside the functions of `{function}`",
        describe(value),
        f"return it from that function, and use the result of `{function}`",
    )


def converter(tensor: Any) -> Callable[[Any], Any]:
    """Returns a function that converts a value to a tensor's dtype, or rejects it."""
    wanted = tensor.dtype
    exact = np.dtype(wanted) if wanted != "bfloat16" else None

    def fit(value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype == exact and wanted != "float64":
            return value
        if isinstance(value, keras.KerasTensor):
            raise _feed_error(
                tensor,
                f"{describe(value)}, which has no value",
                "run it first, and feed the result",
            )
        dtype = getattr(value, "dtype", None)
        if dtype is not None and not isinstance(value, (np.ndarray, np.generic)):
            if hasattr(value, "to_numpy"):  # pandas
                value = value.to_numpy()
            elif keras.backend.standardize_dtype(dtype) == wanted:
                return value  # an engine's tensor
        return _converted(tensor, value, wanted)

    def fit_column(value: Any) -> Any:
        value = fit(value)
        return value[:, None] if len(value.shape) == 1 else value

    return fit_column if getattr(tensor, "is_column", False) else fit


def _converted(tensor: Any, value: Any, wanted: str) -> Any:
    if value is None:
        raise _feed_error(tensor, "None")
    try:
        is_plain = not hasattr(value, "dtype")
        array = np.asarray(value if is_plain else keras.ops.convert_to_numpy(value))
    except (TypeError, ValueError) as error:
        raise _feed_error(
            tensor, f"a {type(value).__name__} that NumPy cannot convert: {error}"
        ) from None
    target = np.dtype("float32" if wanted == "bfloat16" else wanted)
    is_number = array.dtype.kind in "biufc" or array.dtype.name == "bfloat16"
    if not is_number or not _can_cast(array.dtype, target):
        shape = array_text(tuple(array.shape), array.dtype.name)
        raise _feed_error(tensor, f"{shape}, which cannot be cast without loss")
    got, array = array, array.astype(target)
    if got.dtype.kind in "iu" and target.kind in "iub" and (got != array).any():
        shape = array_text(tuple(got.shape), got.dtype.name)
        raise _feed_error(tensor, f"{shape} with values outside the range of {wanted}")
    # As NumPy arrays, these dtypes would become Keras's default float type.
    as_tensor = wanted in ("bfloat16", "float64")
    return keras.ops.convert_to_tensor(array, wanted) if as_tensor else array


def _can_cast(got: Any, target: Any) -> bool:
    if got.name == "bfloat16":
        return target.kind in "fc"
    if (
        got.kind in "iu" and target.kind in "ub"
    ):  # Python's integers are signed; 0 and 1 are valid bools
        return True
    return bool(np.can_cast(got, target, "same_kind"))


def checks(tensors: Sequence[Any]) -> Callable[..., None]:
    """Returns a function that rejects values of a wrong shape before tracing."""

    def check(*values: Any) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            shape = tuple(value.shape)
            sizes = zip(shape, tensor.shape, strict=False)
            if len(shape) != len(tensor.shape) or any(b not in (a, None) for a, b in sizes):
                got = array_text(shape, str(getattr(value.dtype, "name", value.dtype)))
                raise _feed_error(tensor, got)

    return check


_CURE = "feed an array of that shape and dtype; cast it with `astype` if rounding is acceptable"


def _feed_error(tensor: Any, got: str, cure: str = _CURE) -> ArgumentError:
    wanted = f"a value for {describe(tensor)}"
    return ArgumentError(_FUNCTION, f"feed_dict[{label(tensor)}]", wanted, got, cure)
