"""Keras's control flow during tracing, with branches that may write variables.

On JAX and TensorFlow a branch of `keras.ops.cond` is a program of its own, which an assigned value
cannot leave; on torch, Keras needs the predicate in Python, and a trace has no value for it. In
both cases every branch is computed, and then the results and the variables of the right one are
selected. A loss-scaling optimizer skips a step in this way.

Keras looks these functions up by name in its backend's module. During tracing, and for the tracing
thread only, the functions here replace them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras import ops, tree

from trainstep._common.errors import StateError
from trainstep._common.keras_private import backend
from trainstep._state.scopes import Branch, active, current_scope, run_isolated

_core: Any = backend.core
_NAMES = ("cond", "switch", "while_loop", "fori_loop", "vectorized_map")


class Uncompilable(Exception):
    """The step contains an operation that the engine can only run as Python."""

    _keras_call_info_injected = True  # so that Keras does not rebuild it from its text


@contextlib.contextmanager
def traced_control_flow(*, by_value: bool) -> Iterator[None]:
    """Replaces Keras's control flow until the trace is over.

    Args:
        by_value: Whether Keras's own functions need tensor values in Python on this engine.
    """
    natives = {name: getattr(_core, name) for name in _NAMES}
    cond, switch, while_loop, fori_loop, vectorized_map = natives.values()

    def traced_cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        if not _compiling():
            return cond(pred, true_fn, false_fn)
        if isinstance(pred, bool):
            return true_fn() if pred else false_fn()
        with contextlib.suppress(StateError):
            if not by_value:
                return cond(pred, true_fn, false_fn)
        return _select(ops.cast(ops.cast(pred, "bool"), "int32"), [false_fn, true_fn])

    def traced_switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        if not _compiling():
            return switch(index, branches, *operands)
        with contextlib.suppress(StateError):
            if not by_value:
                return switch(index, branches, *operands)
        index = ops.clip(ops.cast(index, "int32"), 0, len(branches) - 1)
        return _select(index, [functools.partial(branch, *operands) for branch in branches])

    def traced_while_loop(*args: Any, **kwargs: Any) -> Any:
        if _compiling() and by_value:
            raise Uncompilable("keras.ops.while_loop")
        return while_loop(*args, **kwargs)

    def traced_fori_loop(lower: Any, upper: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiling() and by_value and not (_is_number(lower) and _is_number(upper)):
            raise Uncompilable("keras.ops.fori_loop")
        return fori_loop(lower, upper, *args, **kwargs)

    def traced_vectorized_map(function: Callable[..., Any], elements: Any) -> Any:
        recorder = active()
        if recorder is None:
            return vectorized_map(function, elements)
        outer, recorder.vectorizes = recorder.vectorizes, True
        try:
            return vectorized_map(function, elements)
        finally:
            recorder.vectorizes = outer

    _core.cond, _core.switch = traced_cond, traced_switch
    _core.while_loop, _core.fori_loop = traced_while_loop, traced_fori_loop
    _core.vectorized_map = traced_vectorized_map
    try:
        yield
    finally:
        for name, native in natives.items():
            setattr(_core, name, native)


def _compiling() -> bool:
    recorder = active()
    return recorder is not None and not recorder.uncompiled


def _is_number(x: Any) -> bool:
    """Whether Python can count to `x`, which may be a dynamic size."""
    return hasattr(x, "__index__") and not ops.is_tensor(x)


def _select(index: Any, cases: Sequence[Callable[[], Any]]) -> Any:
    """Runs every case and selects the results and variables of case `index`."""
    branches = []
    results = []
    for number, case in enumerate(cases):
        branch, result = _run_case(case, (index, number))
        branches.append(branch)
        results.append(result)
    written = {key: variable for branch in branches for key, variable in branch.writes.items()}
    for key, variable in written.items():
        outer = branches[0].outer_value(variable)
        values = [
            branch.state_mapping[key] if key in branch.writes else outer for branch in branches
        ]
        current_scope().add_update((variable, _choose(index, values)))
    return tree.map_structure(lambda *leaves: _choose(index, leaves), *results)


def _run_case(case: Callable[[], Any], selected: tuple[Any, int]) -> tuple[Branch, Any]:
    """Runs one case and keeps its writes from the scope around it.

    Args:
        case: The function.
        selected: The index tensor, and the number of this case.
    """
    recorder = active()
    assert recorder is not None
    recorder.branches.append(selected)
    try:
        return run_isolated(case)
    finally:
        recorder.branches.pop()


def _choose(index: Any, values: Sequence[Any]) -> Any:
    chosen = values[0]
    for number, value in enumerate(values[1:], start=1):
        if value is not chosen:
            if getattr(value, "shape", ()) != getattr(chosen, "shape", ()):
                raise ValueError(
                    f"the branches return different shapes: {tuple(chosen.shape)} and "
                    f"{tuple(value.shape)}; let them return the same structure of tensors"
                )
            chosen = ops.where(ops.equal(index, number), value, chosen)
    return chosen
