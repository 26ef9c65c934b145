"""`function`: checks the settings and makes a `Function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from trainstep import _engines
from trainstep._engines import Engine, Options
from trainstep._function.function import Function, P, R
from trainstep._function.layout_scope import layout_of
from trainstep._function.policies import OPTIMIZE, check_choice
from trainstep._function.policies import policies as checked_policies
from trainstep._function.settings import StepSettings
from trainstep._function.sizes.policy import Shapes, policy

if TYPE_CHECKING:
    from trainstep._distribution.strategy import Strategy


@overload
def function(
    fn: Callable[P, R],
    *,
    signature: Sequence[Any] | None = None,
    max_traces: int | None = None,
    name: str | None = None,
    shapes: Shapes | str = "auto",
    dynamic: Mapping[str, Any] | None = None,
    donate: bool = True,
    optimize: str = "auto",
    side_effects: str = "warn",
    captures: str = "retrace",
    nan_policy: str | None = None,
    strategy: Strategy | None = None,
    engine: Engine | None = None,
) -> Function[P, R]: ...
@overload
def function(
    fn: None = None,
    *,
    signature: Sequence[Any] | None = None,
    max_traces: int | None = None,
    name: str | None = None,
    shapes: Shapes | str = "auto",
    dynamic: Mapping[str, Any] | None = None,
    donate: bool = True,
    optimize: str = "auto",
    side_effects: str = "warn",
    captures: str = "retrace",
    nan_policy: str | None = None,
    strategy: Strategy | None = None,
    engine: Engine | None = None,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(
    fn: Any = None,
    *,
    signature: Sequence[Any] | None = None,
    max_traces: int | None = None,
    name: str | None = None,
    shapes: Shapes | str = "auto",
    dynamic: Mapping[str, Any] | None = None,
    donate: bool = True,
    optimize: str = "auto",
    side_effects: str = "warn",
    captures: str = "retrace",
    nan_policy: str | None = None,
    strategy: Strategy | None = None,
    engine: Engine | None = None,
) -> Any:
    """Compiles a step: a Python function that reads and writes Keras variables.

    The function may read and write any Keras variable that it reaches: weights, batch-norm
    statistics, optimizer slots, metric state, seeds. They are discovered, not declared. The
    function is traced once per signature; `f.ledger` has every trace with its reason.

    Args:
        fn: The function. Without it, a decorator is returned.
        signature: One `Spec`, structure of `Spec`s, or None (anything) per parameter. A call that
            does not fit raises an `ArgumentError` before anything runs.
        max_traces: The largest number of traces; one more raises a `RetraceLimitError`.
        name: The name in the ledger and in messages.
        shapes: The policy for dynamic sizes: a `Shapes`, or the name of its policy. By default the
            first size is compiled exactly; from the second on, one trace and a few programs serve
            all sizes, with the results of the exact shapes.
        dynamic: More dynamic axes than the first of all arrays as long as the first array: an axis
            or axes by parameter, or a dict of them for a structure. `None` in a `signature` is one.
        donate: Whether the step may reuse the memory of the variables that it writes (JAX). Turn
            it off if other threads read `v.value` outside any `function` while this one runs.
        optimize: `"trace"` uses the engine's quick compiler (TensorFlow without XLA, a replayed
            torch graph), `"full"` its thorough one (XLA, inductor), which compiles longer and is
            not faster on every model; `"measure"` tries both on the first calls and keeps the
            faster; `"auto"` is the quick one. JAX has only one.
        side_effects: The policy for Python side effects, which run during tracing only: `"warn"`,
            `"raise"` or `"allow"`.
        captures: The policy for a captured value (a global, an attribute) that has changed since
            the trace: `"retrace"`, `"warn"`, `"raise"` or `"ignore"`.
        nan_policy: The policy for a batch whose loss or gradients are not finite: `"skip"` updates
            no variable and counts the batch (`f.skipped`); `"raise"` also raises a
            `NonFiniteError`, so each call waits for its result. None: no check.
        strategy: Distributes the step over devices; by default, that of the surrounding `scope`.
        engine: The engine, for tests; by default that of the current Keras backend.

    Returns:
        A `Function`, called like `fn`, with `ledger`, `trace_count` and `warm_up`.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> total = keras.Variable(0.0)
        >>> @ts.function
        ... def add(x):
        ...     total.assign_add(keras.ops.sum(x))
        ...     return total.value
        >>> float(add(np.ones(3))), float(add(np.ones(3))), add.trace_count
        (3.0, 6.0, 1)
    """
    policies = checked_policies("trainstep.function", side_effects, captures, nan_policy)
    check_choice("trainstep.function", "optimize", optimize, OPTIMIZE)
    engine = engine or _engines.current()
    settings = StepSettings(
        name=name or "",
        signature=signature,
        max_traces=max_traces,
        shapes=policy(shapes, engine),
        dynamic=dynamic,
        options=Options(donate, optimize, layout=layout_of("trainstep.function", strategy)),
        policies=policies,
        engine=engine,
    )

    def decorate(fn: Callable[P, R]) -> Function[P, R]:
        return Function(fn, settings)

    return decorate if fn is None else decorate(fn)
