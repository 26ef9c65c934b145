"""`print` and `callback`: Python that a compiled step runs on the host at every step.

    values --tensors taken out--> engine.host_call --at every run--> NumPy arrays
           --put back in their structure--> fn --checked against `returns`--> tensors of the step

The step's own Python runs once, when it is traced. These two are part of the program instead. The
structure of what goes in and comes out is handled here; engines see flat lists only.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from trainstep import _engines
from trainstep._common.errors import ArgumentError, TrainstepError
from trainstep._common.structure import like, structure
from trainstep._engines import Engine, Refused
from trainstep._function.inside.host_returns import filled, fitting, specs_in
from trainstep._state.outputs import Build, take_out
from trainstep._state.scopes import Recorder, active, rehearses


def print(
    *values: Any,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[str] | None = None,
    flush: bool = False,
) -> None:
    """Prints at every step, like Python's `print`.

    Tensors and variables, also in lists, tuples, dicts and dataclasses, are shown as NumPy prints
    them; other values as they are. A tensor has no value yet where Python makes a string of it: in
    place of `ts.print(f"loss {loss}")` pass it as an argument of its own, `ts.print("loss", loss)`.

    What `callback` says of when and where a function is called holds for this, too. Outside any
    step it prints at once.

    Args:
        *values: What to print.
        sep: What comes between them.
        end: What comes last.
        file: Where to; None is `sys.stdout` as it is when it prints.
        flush: Whether to flush it.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> @ts.function
        ... def total(x):
        ...     ts.print("sum of", x, "is", {"total": keras.ops.sum(x)})
        >>> total(np.array([1.0, 2.0], "float32"))
        sum of [1. 2.] is {'total': 3.0}
        >>> total(np.array([3.0, 4.0], "float32"))
        sum of [3. 4.] is {'total': 7.0}
    """

    def show(*values: Any) -> None:
        shown = [v if isinstance(v, np.ndarray) else _shown(v) for v in values]
        builtins.print(*shown, sep=sep, end=end, file=file, flush=flush)

    _call(show, values, {}, None)


def callback(fn: Callable[..., Any], *args: Any, returns: Any = None, **kwargs: Any) -> Any:
    """Calls a Python function at every step.

    Calls are made in the order of the program, each once in a step, before the step changes any
    variable: `fn` sees variables as they were. If it raises, so does the call of the step, and no
    variable has changed. No gradient flows through.

    `fn` may run on another thread. It is for Python and NumPy: a compiled function that shares
    variables with the step would wait for the step, and the step for it.

    Args:
        fn: The function. In place of tensors and variables, also in lists, tuples, dicts and
            dataclasses, it gets NumPy arrays of its own; other arguments as they are.
        *args: Its arguments.
        returns: What it gives back to the step: a `Spec` with a size on every axis, or a nested
            structure of them. None: what it returns is dropped.
        **kwargs: Its arguments by name.

    Returns:
        Tensors, in the structure of `returns`; or None.

    Raises:
        ArgumentError: At the call of the step, if a result does not fit its `Spec`.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> seen = []
        >>> def look_up(key):
        ...     seen.append(int(key))
        ...     return 10 * key
        >>> @ts.function
        ... def step(x):
        ...     return 1.0 + ts.callback(look_up, keras.ops.max(x), returns=ts.Spec(()))
        >>> float(step(np.array([2.0, 3.0]))), float(step(np.array([5.0, 4.0]))), seen
        (31.0, 51.0, [3, 5])
    """
    return _call(fn, args, kwargs, returns)


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, returns: Any) -> Any:
    name = f"callback of {getattr(fn, '__name__', type(fn).__name__)}"
    specs = specs_in(name, returns)
    if in_symbolic_scope() or rehearses():  # shapes are being found out, or losses built
        return filled(returns, [ops.zeros(s.shape, s.dtype) for s in specs])
    recorder = active()
    if recorder is not None and recorder.vectorizes:
        raise TrainstepError(
            f"`{name}` is called inside keras.ops.vectorized_map, which runs a function once for "
            "all elements: there is no call for each.\n"
            "  to fix:   use keras.ops.map, or call it outside with all of them"
        )
    engine: Engine = _engines.current() if recorder is None else recorder.engine
    tensors, build = _taken_out(name, (args, kwargs), engine, recorder)
    count = len(tensors)
    sizes = [place for place, x in enumerate(tensors) if not hasattr(x, "dtype")]
    chosen = [ops.equal(i, n) for i, n in (recorder.branches if recorder is not None else ())]
    results = [(s.sizes(), engine.canonical(s.dtype)) for s in specs]

    def run(arrays: list[Any]) -> list[Any]:
        if not all(arrays[count:]):  # of a branch that is not taken
            return [np.zeros(shape, dtype) for shape, dtype in results]
        for place in sizes:
            arrays[place] = arrays[place].item()
        given, named = build.of(arrays)
        found = fitting(name, returns, fn(*given, **named))
        return [x.astype(dtype) for x, (_, dtype) in zip(found, results, strict=True)]

    return filled(returns, engine.host_call(run, [*tensors, *chosen], results))


def _taken_out(
    name: str, values: Any, engine: Engine, recorder: Recorder | None
) -> tuple[list[Any], Build]:
    """The tensors of the arguments, and what puts arrays in their place."""

    def is_tensor(x: Any) -> bool:
        unknown = hasattr(x, "is_fully_defined") and not x.is_fully_defined()
        if unknown and recorder is not None and recorder.sizes_vary:
            raise Refused("`shape` of a size that varies; use `keras.ops.shape`")
        known = engine.is_tensor(x) or ops.is_tensor(x)  # TensorFlow's own variables, too
        return known and not isinstance(x, (np.ndarray, np.generic))

    try:
        return take_out(values, is_tensor, () if recorder is None else recorder.objects)
    except ArgumentError as error:
        raise ArgumentError(
            name,
            "args",
            "tensors in tuples, lists, dicts, named tuples or dataclasses",
            "tensors inside something else",
            "pass the tensors in one of those, or by themselves",
        ) from error


class _Shown:
    """An array inside a structure, which Python shows by its `repr`."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __repr__(self) -> str:
        return str(self._array)


def _shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _Shown(value)
    children = structure(value)
    return value if children is None else like(value, [_shown(child) for _, child in children])
