"""Values that are fed: which tensor they are for, and whether they fit."""

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
    """Feeds as a dict, from another mapping."""
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
        raise _twice(graph, list(feeds))
    return found


def _twice(graph: Graph, keys: Sequence[Any]) -> ArgumentError:
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
        f"two for the same: {' and '.join(shown)}",
        "leave one of them out",
    )


def tensor_of(graph: Graph, key: Any) -> Any:
    """The tensor that is to be fed."""
    found = by_name(graph, key) if isinstance(key, str) else key
    is_weight = isinstance(found, Variable) and found.initial is None  # read by its layer
    if isinstance(found, keras.KerasTensor) and not is_weight:
        return found
    if isinstance(key, str) and found is None:
        raise graph.unknown(key, "feed_dict")
    what = describe(found) if hasattr(found, "name") else f"a {type(key).__name__}"
    raise ArgumentError(
        _FUNCTION,
        "feed_dict",
        "placeholders, other tensors of the graph, or their names as keys",
        what,
        "set a variable with `load` or an `assign`"
        if isinstance(found, (keras.Variable, Variable))
        else "feed what `graph.placeholder` returned",
    )


def by_name(graph: Graph, name: str) -> Any:
    """The tensor or operation of a name; None if there is none.

    Names of the graph come first, then names that Keras gave: the first output of such a layer.
    """
    found = graph.find(name)
    if found is None:
        found = graph.keras_names.get(name)
    if found is None:
        made = [n for n in nodes_from(graph.sources) if n.operation.name == plain_name(name)]
        if made:
            # Stored, since a run resolves its names each time, and a layer may be called again.
            found = graph.keras_names[name] = made[0].outputs[0]
    return found


def check_graph(graph: Graph, tensor: Any) -> None:
    """Refuses to feed a tensor of another graph, where that would do nothing."""
    if any(getattr(each, "graph", None) is not graph for each in sources_of([tensor])):
        raise ArgumentError(
            _FUNCTION,
            "feed_dict",
            "tensors of the session's own graph",
            f"{describe(tensor)}, of another graph",
            "make the session with `Session(graph=...)` for the graph that it was built in",
        )
    if (node := node_of(tensor)) in graph.inside:
        raise inside("feed_dict", tensor, graph.inside[node])


def inside(argument: str, what: Any, function: str) -> ArgumentError:
    """The error for what was written in a branch or a loop, and is nothing outside of it."""
    return ArgumentError(
        _FUNCTION,
        argument,
        f"what was not made in a function of `{function}`",
        describe(what),
        f"return it from that function, and take it from what `{function}` returns",
    )


def converter(tensor: Any) -> Callable[[Any], Any]:
    """A function that makes a value an array of a tensor's dtype, or refuses it."""
    wanted = tensor.dtype
    exact = np.dtype(wanted) if wanted != "bfloat16" else None

    def fit(value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype == exact and wanted != "float64":
            return value
        if isinstance(value, keras.KerasTensor):
            raise _wrong(tensor, f"{describe(value)}, which has no value", "run it first")
        dtype = getattr(value, "dtype", None)
        if dtype is not None and not isinstance(value, (np.ndarray, np.generic)):
            if hasattr(value, "to_numpy"):  # pandas
                value = value.to_numpy()
            elif keras.backend.standardize_dtype(dtype) == wanted:
                return value  # a tensor of the engine's
        return _converted(tensor, value, wanted)

    def fit_column(value: Any) -> Any:
        value = fit(value)
        return value[:, None] if len(value.shape) == 1 else value

    return fit_column if getattr(tensor, "is_column", False) else fit


def _converted(tensor: Any, value: Any, wanted: str) -> Any:
    if value is None:
        raise _wrong(tensor, "None")
    try:
        is_plain = not hasattr(value, "dtype")
        array = np.asarray(value if is_plain else keras.ops.convert_to_numpy(value))
    except (TypeError, ValueError) as error:
        raise _wrong(tensor, f"a {type(value).__name__}, which is no array: {error}") from None
    target = np.dtype("float32" if wanted == "bfloat16" else wanted)
    is_number = array.dtype.kind in "biufc" or array.dtype.name == "bfloat16"
    if not is_number or not _casts(array.dtype, target):
        shape = array_text(tuple(array.shape), array.dtype.name)
        raise _wrong(tensor, f"{shape}, whose numbers do not fit")
    came, array = array, array.astype(target)
    if came.dtype.kind in "iu" and target.kind in "iub" and (came != array).any():
        shape = array_text(tuple(came.shape), came.dtype.name)
        raise _wrong(tensor, f"{shape} with numbers that {wanted} has no room for")
    # As NumPy's, they would become Keras's float type.
    as_tensor = wanted in ("bfloat16", "float64")
    return keras.ops.convert_to_tensor(array, wanted) if as_tensor else array


def _casts(came: Any, target: Any) -> bool:
    if came.name == "bfloat16":
        return target.kind in "fc"
    if came.kind in "iu" and target.kind in "ub":  # Python's numbers are signed; 0 and 1 are bools
        return True
    return bool(np.can_cast(came, target, "same_kind"))


def checks(tensors: Sequence[Any]) -> Callable[..., None]:
    """A function that refuses values of a wrong shape, for before they are traced."""

    def check(*values: Any) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            shape = tuple(value.shape)
            sizes = zip(shape, tensor.shape, strict=False)
            if len(shape) != len(tensor.shape) or any(b not in (a, None) for a, b in sizes):
                came = array_text(shape, str(getattr(value.dtype, "name", value.dtype)))
                raise _wrong(tensor, came)

    return check


_CURE = "feed an array of that shape and kind; cast it with `astype` if numbers may be lost"


def _wrong(tensor: Any, came: str, cure: str = _CURE) -> ArgumentError:
    wanted = f"a value for {describe(tensor)}"
    return ArgumentError(_FUNCTION, f"feed_dict[{label(tensor)}]", wanted, came, cure)
