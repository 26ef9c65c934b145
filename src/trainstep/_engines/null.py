"""An engine that compiles nothing: for tests of everything above the engines.

It runs the step once, on the arrays of the call, appends their shapes to `compiled`, and returns
the outputs of that run from every call. Host calls are repeated at every call, with the arrays of
that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainstep._engines.contract import (
    Axes,
    Engine,
    Executable,
    Loss,
    Options,
    Sizes,
    Step,
    Tensor,
    Traced,
    Wanted,
)
from trainstep._engines.shared.host_function import HostFunction, Results
from trainstep._state.scopes import Recorder, active


class NullEngine(Engine):
    """Compiles nothing.

    Args:
        sizes: How dynamic sizes are compiled, see `Engine.sizes`: "exact", "bucket" or "dynamic".

    Attributes:
        compiled: The shapes of the arrays of each trace.
        buckets: The bucket of each program for dynamic sizes.
        runs: The number of runs of all programs.

    Example:
        >>> import numpy as np, trainstep as ts
        >>> from trainstep.testing import NullEngine
        >>> engine = NullEngine()
        >>> step = ts.function(engine=engine)(lambda x: x)
        >>> step(np.zeros(3)).shape, step(np.zeros(3)).shape, engine.compiled
        ((3,), (3,), [[(3,)]])
    """

    name = "null"
    compilers: tuple[str, ...] = ("nothing",)

    def __init__(self, sizes: str = "exact") -> None:
        self.sizes = sizes
        self.compiled: list[list[tuple[int, ...]]] = []
        self.buckets: list[dict[str, int]] = []
        self.runs = 0

    def is_array(self, x: Any) -> bool:
        return False

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, (np.ndarray, np.generic))

    def tensor(self, x: Any) -> Tensor:
        return np.asarray(x)

    def trace(
        self,
        step: Step,
        leaves: Sequence[Any],
        recorder: Recorder,
        options: Options,
        axes: Axes | None = None,
    ) -> Traced:
        recorder.lift = lambda variable: np.zeros(tuple(variable.shape))
        with recorder:
            outputs = step(leaves)
        self.compiled.append([tuple(x.shape) for x in leaves])
        hosts = recorder.hosts

        def build(compiler: str, bucket: Sizes | None = None) -> Executable:
            if bucket is not None:
                self.buckets.append(dict(bucket))

            def run(leaves: Sequence[Any]) -> Sequence[Tensor]:
                self.runs += 1
                for fn, arrays in hosts:
                    fn([np.array(x) for x in arrays])
                return outputs

            return run

        return Traced(list(recorder.reads.values()), list(recorder.writes.values()), build)

    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor], *, each: bool = False
    ) -> tuple[Tensor, Any, list[Any], list[Any]]:
        value, aux = call(leaves)
        wanted: Callable[[], Sequence[Any]] | Sequence[Any] = variables or ()
        found = wanted() if callable(wanted) else wanted
        by_variable: list[Any] = [np.zeros(tuple(v.shape)) for v in found]
        by_leaf: list[Any] = [np.zeros_like(x) for x in leaves]
        if each:
            by_variable, by_leaf = [by_variable] * len(value), [by_leaf] * len(value)
        return value, aux, by_variable, by_leaf

    def host_call(
        self, fn: HostFunction, tensors: Sequence[Tensor], results: Results
    ) -> list[Tensor]:
        recorder = active()
        if recorder is None:
            return fn([np.array(x) for x in tensors])
        recorder.hosts.append((fn, tensors))
        return [np.zeros(shape, dtype) for shape, dtype in results]
