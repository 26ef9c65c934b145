"""What an engine must do. Everything else is written once, above this line.

An engine turns a stateful step into a program in two moves. `trace` runs the user's Python once,
inside a `Recorder`, and finds the variables it touches. `Traced.build` compiles what was recorded
into an `Executable`: given the arrays of a call, it reads the variables, computes, writes the new
values back all at once, and returns the outputs. If anything fails before that, no variable has
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
# Which variables to differentiate by: these, what the function says after the value was computed,
# or (None) every trainable one that was read.
Wanted = Sequence[Variable] | Callable[[], Sequence[Variable]] | None
Executable = Callable[[Sequence[Any]], Sequence[Tensor]]
# Of each array of a call, by axis, the name of a size that varies, or None: `(("n", None), ("n",))`
Axes = Sequence[Sequence[str | None]]
Sizes = Mapping[str, int]
Taker = Callable[[Any], Any]  # of places, the rows of an array that are there


class Refused(Exception):
    """A step cannot be recorded once for sizes that vary; the text says what stands against it.

    Attributes:
        frames: Files and lines that it comes from, innermost first, if no traceback tells.
    """

    _keras_call_info_injected = True  # Keras passes it on as it is

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.frames: Sequence[tuple[str, int]] = ()


@runtime_checkable
class Inlined(Protocol):
    """An executable that can be written into the path of a hit, which saves its frames."""

    def inline(self, arrays: dict[str, Any]) -> Source:
        """Statements that run it on arrays of these names, and leave the outputs in `outs`."""
        ...


@runtime_checkable
class Unread(Protocol):
    """An executable that may leave out what nobody reads."""

    def unread(self, leaves: Sequence[Any]) -> None:
        """Runs the step for what it writes alone."""
        ...


def is_wanted(variables: Wanted) -> Callable[[Variable], bool]:
    """Tells of a variable that is read whether it may have to be differentiated by."""
    if variables is None:
        return lambda variable: bool(variable.trainable)
    if callable(variables):
        return lambda variable: True
    named = {id(v) for v in variables}
    return lambda variable: id(variable) in named


def chosen(variables: Wanted, read: Sequence[Variable]) -> list[Variable]:
    """The variables to differentiate by, now that the function has run and read some."""
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
    """What a user may ask of the compiler."""

    donate: bool = True
    optimize: str = "auto"  # auto, trace, full, measure
    # Steps in one call: arguments and outputs have a leading axis of this size. 0: no such axis.
    repeat: int = 0
    layout: Any = None  # how the arrays lie over several devices: the engine's own; None: one


def plain_taker(array: Any) -> Taker:
    """What copies rows of an array."""
    # Of short rows, `take` makes a copy in half the time of an index.
    return partial(array.take, axis=0) if type(array) is np.ndarray else array.__getitem__


def assign_each(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Gives variables values, one after the other."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def nothing_assumed(sizes: Sizes) -> str:
    """What a record that takes nothing for granted says of any sizes."""
    return ""


class BuildProgram(Protocol):
    """Compiles a recorded step; it runs no Python of the user's."""

    def __call__(self, compiler: str, bucket: Sizes | None = None) -> Executable:
        """The program of one of the engine's compilers.

        Args:
            compiler: Its name.
            bucket: For an engine of buckets, and a step that was recorded for sizes that vary: the
                largest sizes that the program serves. It is called with arrays as they are.
        """
        ...


@dataclass(slots=True)
class Traced:
    """A recorded step: the variables that it reads and writes, and the way to compile it.

    A step that was recorded with dynamic sizes may branch on a size (`if n > 8`).
    `violated_assumption` returns the first assumption of the record that given sizes violate, with
    the line that branches in parentheses if it is Python; "" if the record serves them.
    """

    reads: list[Variable]
    writes: list[Variable]
    build: BuildProgram
    uncompiled: str = ""  # what the engine could not record: the step runs as Python
    compilers: tuple[str, ...] = ()  # those of the engine's that can compile it; (): all
    violated_assumption: Callable[[Sizes], str] = nothing_assumed


class Engine(abc.ABC):
    """A backend.

    An engine must define the abstract methods. The rest has defaults that are right for an engine
    with one device, one process, no random generator of its own, and nothing to speed up.

    Attributes:
        name: Keras's name of it.
        compilers: Those that it has, the quick one first, the thorough one last.
        compiles_at_first_run: Whether a program is compiled when it first runs.
        branches_by_value: Whether Keras's control flow asks Python for the predicate.
        loops_have_gradients: Whether `keras.ops.while_loop` can be differentiated.
        sizes: What dynamic sizes cost: "bucket", a program for each of a few sizes, with the
            arrays padded and masked; "dynamic", one program for all; "exact", a program each.
        is_synchronous: Whether a call returns only when its step is done.
        size_one_is_separate: Whether an axis of one element needs a record of its own.
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
            options: What the user asked for.
            axes: The dynamic sizes; the record then serves others, too. None: none is.

        Raises:
            Refused: If there are dynamic sizes, and the step cannot be recorded for others.
        """

    @abc.abstractmethod
    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor], *, each: bool = False
    ) -> tuple[Tensor, Any, list[Any], list[Any]]:
        """The value and aux of `call(leaves)`, its gradients by variables, and those by leaves.

        Updates that `call` makes take effect once, in the scope around. The gradient of what
        the value does not depend on is zero. With `each`, the value is a list of scalars, and
        there is a list of gradients for each of them.
        """

    @abc.abstractmethod
    def host_call(
        self, fn: HostFunction, tensors: Sequence[Tensor], results: Results
    ) -> list[Tensor]:
        """Calls Python: at once, or at every run of the program that is being traced.

        Calls are kept and made in their order, before any variable changes; an exception of one is
        raised by the program. No gradient flows through.

        Args:
            fn: Takes a list of NumPy arrays of its own, and returns one.
            tensors: Its arguments.
            results: The shapes and dtypes of its results; the dtypes are the engine's.
        """

    def asks_for_a_value(self, error: BaseException) -> bool:
        """Whether `error` means that Python asked for the value of a traced tensor."""
        return False

    def disk_hits(self) -> int:
        """How many programs this thread has taken from the engine's cache on disk so far."""
        return 0

    # Where a call stands.

    def current_graph(self) -> Any:
        """The trace or graph that the engine is in now."""
        return None

    def is_idle(self) -> bool:
        """Whether this thread is in no trace or graph at all, ours or another's."""
        return True

    def is_idle_source(self) -> Source:
        """The expression of `is_idle()`, for the fast path."""
        return Source("is_idle()", {"is_idle": self.is_idle})

    def inlines(self, function: str) -> bool:
        """Whether a call that is not idle stands inside a graph that it can become a part of.

        Raises:
            ForeignTraceError: If it stands inside one that it cannot.
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
        """`x` as a tensor that can be differentiated by."""

    def shape(self, x: Any) -> tuple[int, ...]:
        """The shape of a concrete tensor, or of a NumPy array."""
        return tuple(x.shape)

    def canonical(self, dtype: str) -> str:
        """The dtype that the engine gives an array of `dtype`."""
        return dtype

    def assign(self, variables: Sequence[Variable], values: Sequence[Any]) -> None:
        """Gives variables values, which are NumPy arrays of their shapes and dtypes."""
        assign_each(variables, values)

    def rows(self, array: Any) -> Iterable[Any]:
        """The rows of a NumPy array, in the form that programs read fastest."""
        return array  # type: ignore[no-any-return]

    def taker(self, array: Any) -> Taker:
        """Copies rows of a NumPy array, in the form that programs read fastest.

        It serves one thread at a time, and nobody may write to its results.
        """
        return plain_taker(array)

    # Random numbers.

    def rng_state(self) -> Any:
        """The state of the engine's own random generator; None if seeds are all there is."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Sets it."""
        del state

    def fixed_rng_state(self) -> AbstractContextManager[Any]:
        """A block in which the engine's own random generator always starts alike."""
        return nullcontext()

    # Several devices and processes.

    def layout(self, kind: str, devices: Sequence[Any] | None) -> Any:
        """How arrays are spread over devices.

        Args:
            kind: "mirrored": batches are split, variables whole on each; "sharded": both are split.
            devices: The devices; all that there are by default.
        """
        raise runs_on_one_device(self.name)

    def launched(self) -> tuple[str, int, int] | None:
        """The address, count and index set by a launcher that only the engine knows."""
        return None

    def connect(
        self, address: str, count: int, index: int, *, heartbeat: float, timeout: float
    ) -> Any:
        """Makes this process one of many; returns a store of strings that all see."""
        raise runs_on_one_device(self.name)

    def broadcast(self, value: Any) -> Any:
        """The value of the first process, in every process of the job.

        Args:
            value: Of the types that `shared/messages.py` encodes; used in the first process only.
        """
        return value

    def gather(self, variable: Variable) -> Any:
        """The value of a variable, as a NumPy array, also if it is spread over many processes."""
        return keras.ops.convert_to_numpy(variable.value)

    def preempted(self, step: int, asked: bool) -> bool:
        """Whether many processes were asked to end, and have agreed to do so after this step.

        Args:
            step: The number of the step.
            asked: Whether this one was.
        """
        return False
