"""`print` and `callback`: host calls, Python that a compiled step runs at every step.

    values --tensors extracted--> engine.host_call --at every run--> NumPy arrays
           --restored to their structure--> fn --checked against `returns`--> tensors of the step

The other Python of a step runs once, during tracing. A host call is part of the program instead.
This file handles the structures of arguments and results; engines see flat lists only.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from keras import ops

from trainstep import _engines
from trainstep._common.errors import ArgumentError, TrainstepError
from trainstep._common.keras_private import in_symbolic_scope
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

    Tensors and variables, also inside lists, tuples, dicts and dataclasses, are printed as NumPy
    arrays; other values as Python prints them. During tracing a tensor has no value, so an f-string
    cannot contain it: instead of `ts.print(f"loss {loss}")` write `ts.print("loss", loss)`.

    It prints at the times, and on the threads, at which `callback` calls its function. Outside any
    step it prints immediately.

    Args:
        *values: The values to print.
        sep: The text between them.
        end: The text after the last one.
        file: The file to print to; None is `sys.stdout` at the time of printing.
        flush: Whether to flush the file.

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

    Calls run in the order of the program, each once per step, before the step updates any
    variable: `fn` reads the old values. If it raises, the call of the step raises the same error,
    and no variable is updated. No gradient flows through.

    `fn` may run on another thread. It may use Python and NumPy, but no compiled function that
    shares variables with the step: each would wait for the other.

    Args:
        fn: The function. It gets a copy of each tensor and variable, also inside lists, tuples,
            dicts and dataclasses, as a NumPy array; other arguments are passed on unchanged.
        *args: Its positional arguments.
        returns: The shapes and dtypes of its results: a `Spec` with a size on every axis, or a
            nested structure of them. None: its result is dropped.
        **kwargs: Its keyword arguments.

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
    if in_symbolic_scope() or rehearses():  # Keras infers shapes or builds losses
        return filled(returns, [ops.zeros(s.shape, s.dtype) for s in specs])
    recorder = active()
    if recorder is not None and recorder.vectorizes:
        raise TrainstepError(
            f"`{name}` is called inside keras.ops.vectorized_map, which runs its function once "
            "for all elements, not once per element.\n"
            "  to fix:   use keras.ops.map, or call it outside with all elements"
        )
    engine: Engine = _engines.current() if recorder is None else recorder.engine
    tensors, build = _extract(name, (args, kwargs), engine, recorder)
    count = len(tensors)
    sizes = [place for place, x in enumerate(tensors) if not hasattr(x, "dtype")]
    chosen = [ops.equal(i, n) for i, n in (recorder.branches if recorder is not None else ())]
    results = [(s.sizes(), engine.canonical(s.dtype)) for s in specs]

    def run(arrays: list[Any]) -> list[Any]:
        if not all(arrays[count:]):  # in a branch that is not executed
            return [np.zeros(shape, dtype) for shape, dtype in results]
        for place in sizes:
            arrays[place] = arrays[place].item()
        given, named = build.of(arrays)
        found = fitting(name, returns, fn(*given, **named))
        return [x.astype(dtype) for x, (_, dtype) in zip(found, results, strict=True)]

    return filled(returns, engine.host_call(run, [*tensors, *chosen], results))


def _extract(
    name: str, values: Any, engine: Engine, recorder: Recorder | None
) -> tuple[list[Any], Build]:
    """Extracts the tensors of the arguments; the `Build` puts arrays in their places."""

    def is_tensor(x: Any) -> bool:
        unknown = hasattr(x, "is_fully_defined") and not x.is_fully_defined()
        if unknown and recorder is not None and recorder.sizes_vary:
            raise Refused("`shape` of a dynamic size; use `keras.ops.shape`")
        # Keras's `is_tensor` is also true for TensorFlow's own variables.
        known = engine.is_tensor(x) or ops.is_tensor(x)
        return known and not isinstance(x, (np.ndarray, np.generic))

    try:
        return take_out(values, is_tensor, () if recorder is None else recorder.objects)
    except ArgumentError as error:
        raise ArgumentError(
            name,
            "args",
            "tensors in tuples, lists, dicts, named tuples or dataclasses",
            "tensors inside another object",
            "pass the tensors directly, or in one of those",
        ) from error


class _Shown:
    """An array inside a structure: Python prints elements by `repr`, this one as by `str`."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __repr__(self) -> str:
        return str(self._array)


def _shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _Shown(value)
    children = structure(value)
    return value if children is None else like(value, [_shown(child) for _, child in children])
