"""Gradients: `value_and_grad`, `grad`, and what one does with gradients.

Differentiates by Keras variables, which are no arguments but are read where the function reads
them, or by positional arguments. Works inside and outside a `function`, and inside itself.
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
    What the value does not depend on has a gradient of zeros, on every engine.

    Args:
        fn: A callable that returns a scalar tensor, or `(scalar, aux)`.
        variables: The variables to differentiate by, in the order the gradients come back; or a
            function that returns them, called after `fn` has run (for a model that builds itself
            in `fn`). None: every trainable variable that `fn` reads, in the order it reads them,
            which need not be the order of `model.trainable_variables`: name them if an optimizer
            is to pair them with gradients.
        argnums: The position, or positions, of the arguments to differentiate by, instead of
            variables. An argument may be a nested structure of arrays.
        has_aux: Whether `fn` returns `(scalar, aux)`.

    Returns:
        A callable with the arguments of `fn` that returns `(value, gradients)`, or
        `((value, aux), gradients)`. Gradients are a list by variables, and by arguments of the
        argument's own structure, a tuple of them if `argnums` is a sequence.

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
            "  to fix:   differentiate by one of them; nest two calls for both"
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
        with differentiating() as listener:
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
    """Gradients of several values by variables and tensors, for those who have checked everything.

    Args:
        losses: A function of the tensors that returns a list of scalars and anything else.
        variables: The variables to differentiate by.
        tensors: Where to differentiate by the tensors.

    Returns:
        What else the function returned; for each scalar, the gradients by variables; the same by
        tensors.
    """
    with differentiating() as listener:
        values, aux, by_variable, by_tensor = _engines.current().differentiate(
            losses, list(variables), list(tensors), each=True
        )
    for value, ours, theirs in zip(values, by_variable, by_tensor, strict=True):
        if listener is not None:
            named = None if tensors else list(variables)
            listener.note(Differentiation(value, [*ours, *theirs], named))
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
    # What is not a number makes all of them so, and goes nowhere unseen.
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
    """The same, and a list that has the variables once they are known, unless none are named."""
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
            f"`argnums` names position {number}, and the call has {len(args)} arguments by "
            "position.\n"
            "  to fix:   pass that argument by position"
        )
    return args[number]


def _scalar(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise GradientError(
            f"has_aux=True needs a function that returns `(scalar, aux)`, and this returned a "
            f"{type(result).__name__}.\n  to fix:   return both, or leave has_aux out"
        )
    value, aux = result if has_aux else (result, None)
    shape = getattr(value, "shape", None)
    if shape is None or len(shape):
        came = f"a {type(value).__name__}" if shape is None else f"shape {tuple(shape)}"
        cure = "reduce it with keras.ops.mean or keras.ops.sum"
        if isinstance(value, tuple):
            cure = "pass has_aux=True if the function returns `(scalar, aux)`"
        raise GradientError(
            f"the value to differentiate has to be a scalar tensor, and this is {came}.\n"
            f"  to fix:   {cure}"
        )
    return value, aux


def _tensor(x: Any, engine: Engine) -> Tensor:
    """A leaf as a tensor; NumPy's and Python's floats become Keras's float type."""
    if not engine.is_tensor(x) or isinstance(x, (np.ndarray, np.generic)):
        x = np.asarray(x)
        x = x.astype(
            engine.canonical(keras.config.floatx() if x.dtype == "float64" else x.dtype.name)
        )
    return engine.tensor(x)


def _tensors(value: Any, engine: Engine) -> Any:
    """A structure with NumPy arrays made tensors, as the arguments of a `function` are."""
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
        variables: What they are by, if variables were named.
    """

    value: Any
    gradients: Any
    variables: Sequence[Any] | None


class Taken:
    """What was differentiated in one scope.

    Attributes:
        here: The differentiations, in order.
        elsewhere: Whether there were others in branches or loops, whose tensors cannot leave.
    """

    def __init__(self) -> None:
        self._scope = current_scope()
        self.here: list[Differentiation] = []
        self.elsewhere = False

    def note(self, made: Differentiation) -> None:
        """Hears of a differentiation."""
        scope = current_scope()
        at_home = not isinstance(scope, Scope) or scope.current_graph() is scope.home
        if scope is self._scope and at_home:
            self.here.append(made)
        else:
            self.elsewhere = True


@contextlib.contextmanager
def listening() -> Iterator[Taken]:
    """Hears of what is differentiated inside, which nobody around hears of then."""
    taken = Taken()
    with _told(taken):
        yield taken


@contextlib.contextmanager
def differentiating() -> Iterator[Taken | None]:
    """Gives the listener to tell; of what is differentiated inside nobody hears."""
    listener = getattr(_local, "listener", None)
    with _told(None):
        yield listener


@contextlib.contextmanager
def _told(listener: Taken | None) -> Iterator[None]:
    before = getattr(_local, "listener", None)
    _local.listener = listener
    try:
        yield
    finally:
        _local.listener = before
