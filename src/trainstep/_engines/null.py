"""An engine that compiles nothing: for tests of everything above the engines.

It runs the step once, on the arrays as they are, keeps what it was asked to compile in
`compiled`, and answers every call with the outputs of that one run. What a step calls on the host
is called at every run, with the arrays of that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from trainstep._common.codegen import Source
from trainstep._common.errors import runs_on_one_device
from trainstep._engines.contract import (
    Axes,
    Executable,
    Loss,
    Options,
    Sizes,
    Step,
    Taker,
    Tensor,
    Traced,
    Wanted,
    assign_each,
    plain_taker,
)
from trainstep._engines.shared.host_function import HostFunction, Results
from trainstep._state.scopes import Recorder, active


class NullEngine:
    """Compiles nothing.

    Args:
        sizes: What sizes that vary cost, as of other engines: "exact", "bucket" or "dynamic".

    Attributes:
        compiled: The shapes of the arrays of each trace.
        buckets: The sizes of each program for sizes that vary.
        runs: How often a program was run.

    Example:
        >>> import numpy as np, trainstep as ts
        >>> from trainstep.testing import NullEngine
        >>> engine = NullEngine()
        >>> step = ts.function(engine=engine)(lambda x: x)
        >>> step(np.zeros(3)).shape, step(np.zeros(3)).shape, engine.compiled
        ((3,), (3,), [[(3,)]])
    """

    name = "null"
    array_types: tuple[type, ...] = ()
    compiles_at_first_run = False
    compilers: tuple[str, ...] = ("nothing",)
    hears_signals = False
    branches_by_value = False
    loops_have_gradients = True
    one_apart = False
    waits = False
    idle_text = Source("True")

    def __init__(self, sizes: str = "exact") -> None:
        self.sizes = sizes
        self.compiled: list[list[tuple[int, ...]]] = []
        self.buckets: list[dict[str, int]] = []
        self.runs = 0

    def layout(self, kind: str, devices: Sequence[Any] | None) -> Any:
        raise runs_on_one_device(self.name)

    def launched(self) -> tuple[str, int, int] | None:
        return None

    def connect(
        self, address: str, count: int, index: int, *, heartbeat: float, timeout: float
    ) -> Any:
        raise runs_on_one_device(self.name)

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, variable: Any) -> Any:
        return keras.ops.convert_to_numpy(variable.value)

    def assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        assign_each(variables, values)

    def rows(self, array: Any) -> Iterable[Any]:
        return array  # type: ignore[no-any-return]

    def taker(self, array: Any) -> Taker:
        return plain_taker(array)

    def draws(self) -> Any:
        return None

    def set_draws(self, state: Any) -> None:
        """There is none."""

    def preempted(self, step: int, asked: bool) -> bool:
        return False

    def canonical(self, dtype: str) -> str:
        return dtype

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, (np.ndarray, np.generic))

    def tensor(self, x: Any) -> Tensor:
        return np.asarray(x)

    def disk_hits(self) -> int:
        return 0

    def same_draws(self) -> AbstractContextManager[Any]:
        return nullcontext()  # its draws are those of seeds, which are state

    def place(self) -> Any:
        return None

    def idle(self) -> bool:
        return True

    def inlines(self, function: str) -> bool:
        return True

    def asks_for_a_value(self, error: BaseException) -> bool:
        return False

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
