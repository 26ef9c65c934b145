"""Gradients: `value_and_grad`, `grad`, `global_norm`, `clip_by_global_norm`.

They differentiate by Keras variables, which a function reads without getting them as arguments, or
by positional arguments. They work inside and outside a `function`, and can be nested.

Every gradient that a step computes is reported to the listener of its thread (`listening`). A
gradient inside another one is not reported: it is a part of that one. A gradient inside a branch
or a loop body of the engine is only counted: its tensors belong to another program.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from trainstep import _engines
from trainstep._common.errors import GradientError, nothing_to_differentiate_by
from trainstep._common.structure import filled, leaves, like, structure
from trainstep._engines import Engine
from trainstep._engines.contract import Tensor, Variable, Wanted
from trainstep._state.scopes import Scope, current_scope

_local = threading.local()


def value_and_grad(
    fn: Callable[..., Any],
    variables: Wanted = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that computes `fn` and its gradients.

    Updates that `fn` makes (batch-norm statistics, metrics, seeds) take effect exactly once.
    The gradient by a variable that the value does not depend on is zeros, on every engine.

    Args:
        fn: A callable that returns a scalar tensor, or `(scalar, aux)`.
        variables: The variables to differentiate by, in the order the gradients come back; or a
            function that returns them, called after `fn` (for a model that `fn` builds). None:
            every trainable variable that `fn` reads, in the order in which it reads them. That need
            not be the order of `model.trainable_variables`: pass the variables if an optimizer
            pairs them with the gradients.
        argnums: The position, or positions, of the arguments to differentiate by, instead of
            variables. An argument may be a nested structure of arrays.
        has_aux: Whether `fn` returns `(scalar, aux)`.

    Returns:
        A callable with the arguments of `fn` that returns `(value, gradients)`, or
        `((value, aux), gradients)`. Gradients by variables are a list. Gradients by an argument
        have its structure; if `argnums` is a sequence, they are a tuple with one per argument.

    Raises:
        GradientError: If the value is not a scalar, or `variables` is empty.

    Example:
        >>> import keras, trainstep as ts
        >>> w = keras.Variable([1.0, 2.0])
        >>> value, (dw,) = ts.value_and_grad(lambda: keras.ops.sum(w * w), [w])()
        >>> float(value), [float(g) for g in dw]
        (5.0, [2.0, 4.0])
    """
    if variables is not None and argnums is not None:
        raise GradientError(
            "`variables` and `argnums` were both given.\n"
            "  to fix:   pass one of them; nest two calls for both"
        )
    if variables is not None and not callable(variables):
        variables = _checked(list(variables))

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        engine = _engines.current()
        numbers = [argnums] if isinstance(argnums, int) else list(argnums or ())
        args = tuple(_tensors(arg, engine) for arg in args)
        kwargs = {name: _tensors(arg, engine) for name, arg in kwargs.items()}
        found: list[Tensor] = []
        for number in numbers:
            found += [_tensor(leaf, engine) for leaf in leaves(_argument(args, number))]

        def loss(tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
            left = iter(tensors)
            given = list(args)
            for number in numbers:
                given[number] = filled(given[number], left)
            return _scalar(fn(*given, **kwargs), has_aux)

        wanted, named = ((), None) if numbers else _remembered(variables)
        with muted_listener() as listener:
            value, aux, by_variable, by_leaf = engine.differentiate(loss, wanted, found)
        gradients: Any = by_variable
        if numbers:
            left = iter(by_leaf)
            gradients = tuple(filled(args[number], left) for number in numbers)
            gradients = gradients[0] if isinstance(argnums, int) else gradients
        if listener is not None:
            listener.note(Differentiation(value, gradients, named or None))
        return ((value, aux) if has_aux else value), gradients

    return call


def differentiated(
    losses: Callable[[Sequence[Tensor]], tuple[list[Tensor], Any]],
    variables: Sequence[Variable],
    tensors: Sequence[Tensor],
) -> tuple[Any, list[list[Tensor]], list[list[Tensor]]]:
    """Returns gradients of several values by variables and tensors, without checks.

    Args:
        losses: A function of the tensors that returns a list of scalars and an aux value.
        variables: The variables to differentiate by.
        tensors: The tensors to differentiate by.

    Returns:
        The aux value; for each scalar, the gradients by variables; for each scalar, the gradients
        by tensors.
    """
    with muted_listener() as listener:
        values, aux, by_variable, by_tensor = _engines.current().differentiate(
            losses, list(variables), list(tensors), each=True
        )
    for value, first, second in zip(values, by_variable, by_tensor, strict=True):
        if listener is not None:
            named = None if tensors else list(variables)
            listener.note(Differentiation(value, [*first, *second], named))
    return aux, by_variable, by_tensor


def grad(
    fn: Callable[..., Any],
    variables: Wanted = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Like `value_and_grad`, without the value: returns gradients, or `(gradients, aux)`.

    Example:
        >>> import keras, trainstep as ts
        >>> float(ts.grad(ts.grad(lambda x: x**3, argnums=0), argnums=0)(2.0))
        12.0
    """
    both = value_and_grad(fn, variables, argnums=argnums, has_aux=has_aux)

    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return call


def global_norm(gradients: Any) -> Tensor:
    """The Euclidean norm of all gradients together, in at least float32.

    Example:
        >>> import numpy as np, trainstep as ts
        >>> float(ts.global_norm([np.array([3.0], "float32"), np.array([4.0], "float32")]))
        5.0
    """
    squares = [ops.sum(ops.square(_wide(g))) for g in leaves(gradients)]
    if not squares:
        return ops.zeros(())
    names = {keras.backend.standardize_dtype(s.dtype) for s in squares}
    widest = "float64" if "float64" in names else "float32"
    return ops.sqrt(sum(ops.cast(s, widest) for s in squares))


def clip_by_global_norm(gradients: Any, limit: Any) -> Any:
    """Scales all gradients by one factor so that their global norm is at most `limit`.

    Args:
        gradients: A nested structure of gradients.
        limit: A number or a scalar tensor.

    Returns:
        The same structure. Gradients within the limit are unchanged.

    Example:
        >>> import numpy as np, trainstep as ts
        >>> (clipped,) = ts.clip_by_global_norm([np.array([3.0, 4.0], "float32")], 1.0)
        >>> [round(float(g), 6) for g in clipped]
        [0.6, 0.8]
    """
    norm = global_norm(gradients)
    limit = ops.cast(limit, norm.dtype)
    # A NaN in one gradient makes all of them NaN, so it is not hidden.
    scale = ops.where(norm <= limit, ops.ones_like(norm), limit / norm)
    clipped = iter([ops.cast(ops.cast(g, scale.dtype) * scale, g.dtype) for g in leaves(gradients)])
    return filled(gradients, clipped)


def _wide(x: Tensor) -> Tensor:
    narrow = keras.backend.standardize_dtype(x.dtype) in ("float16", "bfloat16")
    return ops.cast(x, "float32") if narrow else ops.convert_to_tensor(x)


def _checked(variables: list[Variable]) -> list[Variable]:
    if not variables:
        raise nothing_to_differentiate_by()
    for index, variable in enumerate(variables):
        if not isinstance(variable, keras.Variable):
            raise GradientError(
                f"`variables[{index}]` is a {type(variable).__name__}, not a keras.Variable.\n"
                "  to fix:   pass variables, or differentiate by an argument with `argnums`"
            )
    return variables


def _remembered(variables: Wanted) -> tuple[Wanted, list[Variable]]:
    """Returns the same, and a list that will have the variables once they are known."""
    if variables is None or not callable(variables):
        return variables, list(variables or ())
    named: list[Variable] = []
    asked = variables

    def remember() -> list[Variable]:
        named[:] = asked()
        return named

    return remember, named


def _argument(args: tuple[Any, ...], number: int) -> Any:
    if not -len(args) <= number < len(args):
        raise GradientError(
            f"`argnums` has position {number}, but the call has {len(args)} positional arguments.\n"
            "  to fix:   pass that argument by position"
        )
    return args[number]


def _scalar(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise GradientError(
            f"has_aux=True needs a function that returns `(scalar, aux)`, but it returned a "
            f"{type(result).__name__}.\n  to fix:   return both, or omit has_aux"
        )
    value, aux = result if has_aux else (result, None)
    shape = getattr(value, "shape", None)
    if shape is None or len(shape):
        got = f"a {type(value).__name__}" if shape is None else f"shape {tuple(shape)}"
        cure = "reduce it with keras.ops.mean or keras.ops.sum"
        if isinstance(value, tuple):
            cure = "pass has_aux=True if the function returns `(scalar, aux)`"
        raise GradientError(
            f"the value to differentiate must be a scalar tensor, but it is {got}.\n"
            f"  to fix:   {cure}"
        )
    return value, aux


def _tensor(x: Any, engine: Engine) -> Tensor:
    """Converts a leaf to a tensor; floats of NumPy and Python become Keras's `floatx`."""
    if not engine.is_tensor(x) or isinstance(x, (np.ndarray, np.generic)):
        x = np.asarray(x)
        x = x.astype(
            engine.canonical(keras.config.floatx() if x.dtype == "float64" else x.dtype.name)
        )
    return engine.tensor(x)


def _tensors(value: Any, engine: Engine) -> Any:
    """Converts the NumPy arrays in a structure to tensors, as `function` does."""
    children = structure(value)
    if children is not None:
        return like(value, [_tensors(child, engine) for _, child in children])
    return _tensor(value, engine) if isinstance(value, (np.ndarray, np.generic)) else value


# Listeners ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Differentiation:
    """One call of `value_and_grad`.

    Attributes:
        value: The scalar.
        gradients: Its gradients, in the structure in which they are returned.
        variables: The variables that were named to differentiate by, if any.
    """

    value: Any
    gradients: Any
    variables: Sequence[Any] | None


class GradientListener:
    """The gradients that were computed in one scope.

    Attributes:
        found: The differentiations, in order.
        missed: Whether there were others, in branches or loops, whose tensors cannot leave.
    """

    def __init__(self) -> None:
        self._scope = current_scope()
        self.found: list[Differentiation] = []
        self.missed = False

    def note(self, made: Differentiation) -> None:
        """Records a differentiation."""
        scope = current_scope()
        at_top_level = not isinstance(scope, Scope) or scope.current_graph() is scope.home
        if scope is self._scope and at_top_level:
            self.found.append(made)
        else:
            self.missed = True


@contextlib.contextmanager
def listening() -> Iterator[GradientListener]:
    """Listens to the gradients of a block; an outer listener does not get them."""
    listener = GradientListener()
    with _install(listener):
        yield listener


@contextlib.contextmanager
def muted_listener() -> Iterator[GradientListener | None]:
    """Yields the installed listener, and installs none during the block."""
    listener = getattr(_local, "listener", None)
    with _install(None):
        yield listener


@contextlib.contextmanager
def _install(listener: GradientListener | None) -> Iterator[None]:
    before = getattr(_local, "listener", None)
    _local.listener = listener
    try:
        yield
    finally:
        _local.listener = before
