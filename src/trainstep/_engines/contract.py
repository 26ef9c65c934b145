"""The contract of an engine. Everything else is written once, above this line.

An engine turns a stateful step into a program in two moves. `trace` runs the user's Python once,
inside a `Recorder`, and finds the variables that it reads and writes. `Traced.build` compiles the
record into an `Executable`: given the arrays of a call, it reads the variables, computes, writes
all new values at once, and returns the outputs. If anything fails before the write, no variable has
changed.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np

from trainstep._common.codegen import Source
from trainstep._common.errors import nothing_to_differentiate_by, runs_on_one_device
from trainstep._engines.shared.host_function import HostFunction, Results
from trainstep._state.scopes import Recorder

Tensor = Any
Variable = Any
Step = Callable[[Sequence[Tensor]], list[Tensor]]
Loss = Callable[[Sequence[Tensor]], tuple[Any, Any]]
# The variables to differentiate by: these; those that the function returns once the value has been
# computed; or (None) every trainable variable that was read.
Wanted = Sequence[Variable] | Callable[[], Sequence[Variable]] | None
Executable = Callable[[Sequence[Any]], Sequence[Tensor]]
# For each array of a call, by axis, the name of a dynamic size or None: `(("n", None), ("n",))`
Axes = Sequence[Sequence[str | None]]
Sizes = Mapping[str, int]
Taker = Callable[[Any], Any]  # copies the rows of an array at the given places


class Refused(Exception):
    """A step cannot be recorded for dynamic sizes; the text gives the reason.

    Attributes:
        frames: The files and lines that caused it, innermost first, if its traceback lacks them.
    """

    _keras_call_info_injected = True  # keeps Keras from rewriting the text

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.frames: Sequence[tuple[str, int]] = ()


@runtime_checkable
class Inlined(Protocol):
    """An executable that can be inlined into the fast path, which saves its Python frames."""

    def inline(self, arrays: dict[str, Any]) -> Source:
        """Returns statements that run it on arrays of these names and assign `outs`."""
        ...


@runtime_checkable
class Unread(Protocol):
    """An executable that can skip outputs that are never read."""

    def unread(self, leaves: Sequence[Any]) -> None:
        """Runs the step for its writes only."""
        ...


def is_wanted(variables: Wanted) -> Callable[[Variable], bool]:
    """Returns a test: whether a variable that is read may need a gradient."""
    if variables is None:
        return lambda variable: bool(variable.trainable)
    if callable(variables):
        return lambda variable: True
    named = {id(v) for v in variables}
    return lambda variable: id(variable) in named


def chosen(variables: Wanted, read: Sequence[Variable]) -> list[Variable]:
    """Returns the variables to differentiate by, after the function has run."""
    if variables is None:
        found = [v for v in read if v.trainable]
    else:
        found = list(variables()) if callable(variables) else list(variables)
        if not callable(variables):
            return found
    if not found:
        raise nothing_to_differentiate_by()
    return found


@dataclass(frozen=True, slots=True)
class Options:
    """The compiler options of the user."""

    donate: bool = True
    optimize: str = "auto"  # auto, trace, full, measure
    # Steps in one call: arguments and outputs have a leading axis of this size. 0: no such axis.
    repeat: int = 0
    layout: Any = None  # the engine's layout over several devices; None: one device


def plain_taker(array: Any) -> Taker:
    """Returns a function that copies rows of an array."""
    # For short rows, `take` needs half the time of indexing.
    return partial(array.take, axis=0) if type(array) is np.ndarray else array.__getitem__


def assign_each(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Assigns values to variables, one after the other."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def nothing_assumed(sizes: Sizes) -> str:
    """The `Traced.violated_assumption` of a record that holds for all sizes."""
    return ""


class BuildProgram(Protocol):
    """Compiles a recorded step, without running the user's Python again."""

    def __call__(self, compiler: str, bucket: Sizes | None = None) -> Executable:
        """Compiles with one of the engine's compilers.

        Args:
            compiler: The name of the compiler.
            bucket: For an engine of buckets, and a step recorded for dynamic sizes: the largest
                sizes that the program serves. Callers pass unpadded arrays.
        """
        ...


@dataclass(slots=True)
class Traced:
    """A recorded step: the variables that it reads and writes, and a function that compiles it.

    A step recorded for dynamic sizes may have branched on a size (`if n > 8`).
    `violated_assumption` returns the first assumption that does not hold for given sizes, followed
    by the user's line in parentheses if Python code made the comparison; "" if the record serves
    these sizes.
    """

    reads: list[Variable]
    writes: list[Variable]
    build: BuildProgram
    uncompiled: str = ""  # the operation that cannot be recorded: the step runs as Python
    compilers: tuple[str, ...] = ()  # the engine's compilers that can compile it; (): all
    violated_assumption: Callable[[Sizes], str] = nothing_assumed


class Engine(abc.ABC):
    """A backend.

    An engine must define the abstract methods. The defaults of the others fit an engine with one
    device, one process, no random generator of its own, and no optimizations.

    Attributes:
        name: The name of the Keras backend.
        compilers: The names of its compilers, the one that compiles fastest first.
        compiles_at_first_run: Whether a program is compiled during its first run.
        branches_by_value: Whether Keras's control flow needs the predicate as a Python value.
        loops_have_gradients: Whether `keras.ops.while_loop` can be differentiated.
        sizes: How dynamic sizes are compiled: "bucket", a program for each of a few sizes, with
            padded and masked arrays; "dynamic", one program for all; "exact", one for each size.
        is_synchronous: Whether a call returns only when its step is done.
        size_one_is_separate: Whether an axis of size 1 needs a record of its own.
        handles_sigterm: Whether the engine handles SIGTERM in a job of many processes.
    """

    name: str
    compilers: tuple[str, ...]
    compiles_at_first_run = False
    branches_by_value = False
    loops_have_gradients = True
    sizes = "exact"
    is_synchronous = False
    size_one_is_separate = False
    handles_sigterm = False

    # Tracing and compiling.

    @abc.abstractmethod
    def trace(
        self,
        step: Step,
        leaves: Sequence[Any],
        recorder: Recorder,
        options: Options,
        axes: Axes | None = None,
    ) -> Traced:
        """Runs `step` once on stand-ins for `leaves`.

        Args:
            step: The step.
            leaves: The arrays of a call.
            recorder: The scope to run it in.
            options: The options of the user.
            axes: The dynamic sizes, for which the record must hold. None: record these shapes only.

        Raises:
            Refused: If the step cannot be recorded for dynamic sizes.
        """

    @abc.abstractmethod
    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor], *, each: bool = False
    ) -> tuple[Tensor, Any, list[Any], list[Any]]:
        """Returns the value and aux of `call(leaves)`, the gradients by variables, and by leaves.

        Updates that `call` makes take effect once, in the enclosing scope. Where the value does
        not depend on a variable or leaf, its gradient is zero. With `each`, the value is a list of
        scalars, and there is a list of gradients for each of them.
        """

    @abc.abstractmethod
    def host_call(
        self, fn: HostFunction, tensors: Sequence[Tensor], results: Results
    ) -> list[Tensor]:
        """Calls Python: now, or at every run of the program that is being traced.

        The program makes every call, in program order, before any variable changes. It raises the
        exception of a call. No gradient flows through.

        Args:
            fn: A function from a list of NumPy arrays, which it may keep, to another.
            tensors: Its arguments.
            results: The shapes and dtypes of its results; the engine supports these dtypes.
        """

    def asks_for_a_value(self, error: BaseException) -> bool:
        """Whether `error` means that Python code needs the value of a traced tensor."""
        return False

    def disk_hits(self) -> int:
        """Returns the number of disk cache hits of this thread so far."""
        return 0

    # The trace or graph around a call.

    def current_graph(self) -> Any:
        """Returns the trace or graph that is being recorded now."""
        return None

    def is_idle(self) -> bool:
        """Whether this thread records no trace or graph, ours or foreign."""
        return True

    def is_idle_source(self) -> Source:
        """Returns the expression of `is_idle()`, for the fast path."""
        return Source("is_idle()", {"is_idle": self.is_idle})

    def inlines(self, function: str) -> bool:
        """Whether a call inside a foreign graph becomes part of that graph.

        Raises:
            ForeignTraceError: If it cannot.
        """
        return True

    # Arrays.

    @abc.abstractmethod
    def is_array(self, x: Any) -> bool:
        """Whether `x` is a concrete tensor of the engine."""

    @abc.abstractmethod
    def is_tensor(self, x: Any) -> bool:
        """Whether the engine computes with `x`: a tensor, concrete or traced, or a NumPy array."""

    @abc.abstractmethod
    def tensor(self, x: Any) -> Tensor:
        """Returns `x` as a tensor that gradients can be taken by."""

    def shape(self, x: Any) -> tuple[int, ...]:
        """Returns the shape of a concrete tensor, or of a NumPy array."""
        return tuple(x.shape)

    def canonical(self, dtype: str) -> str:
        """Returns the dtype to which the engine converts an array of `dtype`."""
        return dtype

    def assign(self, variables: Sequence[Variable], values: Sequence[Any]) -> None:
        """Assigns NumPy arrays, of the right shapes and dtypes, to variables."""
        assign_each(variables, values)

    def rows(self, array: Any) -> Iterable[Any]:
        """Iterates over the rows of a NumPy array, as the type that programs read fastest."""
        return array  # type: ignore[no-any-return]

    def taker(self, array: Any) -> Taker:
        """Returns a function that copies rows of a NumPy array, for programs to read.

        It is not thread-safe, and its results must not be written to.
        """
        return plain_taker(array)

    # Random numbers.

    def rng_state(self) -> Any:
        """Returns the RNG state of the engine's global generator; None if it has none."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Sets the RNG state of the engine's global generator."""
        del state

    def fixed_rng_state(self) -> AbstractContextManager[Any]:
        """A context in which the engine's global generator starts from a fixed RNG state."""
        return nullcontext()

    # Several devices and processes.

    def layout(self, kind: str, devices: Sequence[Any] | None) -> Any:
        """Returns a layout of arrays over devices.

        Args:
            kind: "mirrored": split batches, replicate variables; "sharded": split both.
            devices: The devices; None: all devices.
        """
        raise runs_on_one_device(self.name)

    def launched(self) -> tuple[str, int, int] | None:
        """Returns the address, count and index set by a launcher that only the engine supports."""
        return None

    def connect(
        self, address: str, count: int, index: int, *, heartbeat: float, timeout: float
    ) -> Any:
        """Joins this process to a job; returns a store of strings that all processes share."""
        raise runs_on_one_device(self.name)

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first process, in every process of the job.

        Args:
            value: Of the types that `shared/messages.py` encodes; used in the first process only.
        """
        return value

    def gather(self, variable: Variable) -> Any:
        """Returns a variable, which may be sharded over processes, as a NumPy array."""
        return keras.ops.convert_to_numpy(variable.value)

    def preempted(self, step: int, asked: bool) -> bool:
        """Whether the job is preempted: all processes have agreed to end after this step.

        Args:
            step: The number of the step.
            asked: Whether this process was asked to end.
        """
        return False
