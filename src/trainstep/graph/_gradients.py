"""Gradients as tensors of the graph, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._function.inside import gradients as _grad
from trainstep.graph._calls import call_node
from trainstep.graph._evaluate import Gradients
from trainstep.graph._tensors import describe
from trainstep.graph._variables import Variable, as_tensor


def gradients(ys: Any, xs: Any, name: str | None = None) -> list[Any]:
    """Makes the gradients of a tensor, or of the sum of several tensors.

    Args:
        ys: A tensor or a list of tensors; a tensor with axes is summed.
        xs: One of, or a list of: `graph.Variable`, `keras.Variable`, tensor.
        name: The name of the gradients.

    Returns:
        A list of tensors, one for each of `xs`; zeros if `ys` does not depend on it.

    Example:
        >>> from trainstep import graph
        >>> w = graph.Variable([1.0, 2.0])
        >>> (dw,) = graph.gradients(w * w, w)
        >>> graph.Session().run(dw).tolist()
        [2.0, 4.0]
    """
    tensors = ys if isinstance(ys, (list, tuple)) else [ys]
    tensors = [as_tensor(y, "graph.gradients", "ys") for y in tensors]
    wanted = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    if not tensors or not wanted:
        missing = "xs" if tensors else "ys"
        raise ArgumentError(
            "graph.gradients", missing, "at least one tensor", "none", f"pass `{missing}`"
        )
    for y in tensors:
        _check_float(y, "ys")
    for x in wanted:
        _check_float(x, "xs")
    by_variable = {id(x): _variable(x) for x in wanted if _variable(x) is not None}
    loose = [x for x in wanted if id(x) not in by_variable]
    found: dict[int, Any] = {}
    if by_variable:
        node = Gradients(tensors, list(by_variable.values()), [])
        made = node.make_outputs(tensors, list(by_variable.values()), name)
        found.update(zip(by_variable, made, strict=True))
    if loose:
        node = Gradients(tensors, [], loose)
        made = node.make_outputs([*tensors, *loose], loose, name)
        found.update(zip(map(id, loose), made, strict=True))
    return [found[id(x)] for x in wanted]


def _variable(x: Any) -> Any:
    return x.variable if isinstance(x, Variable) else x if isinstance(x, keras.Variable) else None


def _check_float(x: Any, argument: str) -> None:
    if not isinstance(x, (keras.KerasTensor, keras.Variable)):
        raise ArgumentError(
            "graph.gradients",
            argument,
            "variables or tensors of the graph",
            f"a {type(x).__name__}",
            "pass a `graph.Variable`, a weight of a layer or a placeholder",
        )
    if "float" not in str(x.dtype):
        raise ArgumentError(
            "graph.gradients",
            argument,
            "tensors of a float dtype",
            describe(x),
            "differentiate with respect to the float tensor, before the cast to integers",
        )


def global_norm(tensors: Sequence[Any], name: str | None = None) -> Any:
    """Makes the Euclidean norm of all tensors together.

    Example:
        >>> from trainstep import graph
        >>> norm = graph.global_norm([graph.constant([3.0]), graph.constant([4.0])])
        >>> float(graph.Session().run(norm))
        5.0
    """
    return _unaliased_call(_global_norm, name, _present(tensors, "graph.global_norm"))


def clip_by_global_norm(
    tensors: Sequence[Any], clip_norm: Any, name: str | None = None
) -> tuple[list[Any], Any]:
    """Scales all tensors by one factor, so that their global norm is at most `clip_norm`.

    Returns:
        The list of clipped tensors, with None for each None in `tensors`; and the unclipped norm.

    Example:
        >>> from trainstep import graph
        >>> (clipped,), norm = graph.clip_by_global_norm([graph.constant([3.0, 4.0])], 1.0)
        >>> value, before = graph.Session().run([clipped, norm])
        >>> [round(float(v), 6) for v in value], float(before)
        ([0.6, 0.8], 5.0)
    """
    present = _present(tensors, "graph.clip_by_global_norm")
    clipped, norm = _unaliased_call(_clip_by_global_norm, name, present, clip_norm)
    left = iter(clipped)
    return [None if tensor is None else next(left) for tensor in tensors], norm


def clip_by_norm(tensor: Any, clip_norm: Any, name: str | None = None) -> Any:
    """Scales one tensor so that its norm is at most `clip_norm`.

    Example:
        >>> from trainstep import graph
        >>> clipped = graph.clip_by_norm(graph.constant([3.0, 4.0]), 1.0)
        >>> [round(float(v), 6) for v in graph.Session().run(clipped)]
        [0.6, 0.8]
    """
    tensor = as_tensor(tensor, "graph.clip_by_norm", "tensor")
    return _unaliased_call(_clip_by_norm, name, tensor, clip_norm)


def clip_by_value(
    tensor: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None
) -> Any:
    """Limits every element of a tensor.

    Example:
        >>> from trainstep import graph
        >>> clipped = graph.clip_by_value(graph.constant([-3.0, 4.0]), -1.0, 1.0)
        >>> graph.Session().run(clipped).tolist()
        [-1.0, 1.0]
    """
    tensor = as_tensor(tensor, "graph.clip_by_value", "tensor")
    return _unaliased_call(ops.clip, name, tensor, clip_value_min, clip_value_max)


def _present(tensors: Sequence[Any], function: str) -> list[Any]:
    given = tensors if isinstance(tensors, (list, tuple)) else list(tensors)
    present = [as_tensor(t, function, "tensors") for t in given if t is not None]
    if not present:
        raise ArgumentError(
            function, "tensors", "at least one tensor", "no tensor", "pass gradients"
        )
    return present


def _unaliased_call(fn: Callable[..., Any], name: str | None, *args: Any) -> Any:
    return call_node(fn, args, name, is_unaliased=True)


def _global_norm(tensors: Any) -> Any:
    return _grad.global_norm(list(tensors))


def _clip_by_global_norm(tensors: Any, limit: Any) -> Any:
    return _grad.clip_by_global_norm(list(tensors), limit), _grad.global_norm(list(tensors))


def _clip_by_norm(tensor: Any, limit: Any) -> Any:
    return _grad.clip_by_global_norm([tensor], limit)[0]
