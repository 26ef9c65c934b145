"""What an engine must do. Everything else is written once, above this line.

An engine turns a stateful step into a program in two moves. `trace` runs the user's Python once,
inside a `Recorder`, and finds the variables it touches. `Traced.build` compiles what was recorded
into an `Executable`: given the arrays of a call, it reads the variables, computes, writes the new
values back all at once, and returns the outputs. If anything fails before that, no variable has
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from trainstep._common.codegen import Source
from trainstep._common.errors import nothing_to_differentiate_by
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

    A step that was recorded for sizes that vary may have looked at a size (`if n > 8`); `broken`
    tells what it took for granted that is not so for these sizes, with the line that looked in
    parentheses if that was a look from Python: "" if it serves them.
    """

    reads: list[Variable]
    writes: list[Variable]
    build: BuildProgram
    uncompiled: str = ""  # what the engine could not record: the step runs as Python
    compilers: tuple[str, ...] = ()  # those of the engine's that can compile it; (): all
    broken: Callable[[Sizes], str] = nothing_assumed


class Engine(Protocol):
    """A backend."""

    name: str
    array_types: tuple[type, ...]
    compiles_at_first_run: bool
    compilers: tuple[str, ...]  # the quick one first, the thorough one last
    branches_by_value: bool  # Keras's control flow asks Python for the predicate
    loops_have_gradients: bool  # those of `keras.ops.while_loop`
    # What sizes that vary cost: "bucket", a program for each of a few sizes, the arrays padded and
    # masked; "dynamic", one program for all; "exact", a program each.
    sizes: str
    waits: bool  # a call returns when its step is done, and the thread that calls has waited
    one_apart: bool  # what is recorded for sizes that vary does not serve an axis of one element
    hears_signals: bool  # SIGTERM, in one of many processes
    idle_text: Source  # the expression of `idle()`, to be written into the path of a hit

    def layout(self, kind: str, devices: Sequence[Any] | None) -> Any:
        """How arrays lie over devices.

        Args:
            kind: "mirrored": batches are cut, variables whole on each; "sharded": both are cut.
            devices: The devices; all that there are by default.
        """
        ...

    def launched(self) -> tuple[str, int, int] | None:
        """Returns address, count and index as set by a launcher that only the engine detects."""
        ...

    def connect(
        self, address: str, count: int, index: int, *, heartbeat: float, timeout: float
    ) -> Any:
        """Joins the job, and returns a store of strings that all processes share."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first process, in every process of the job.

        Args:
            value: Of the types that `shared.messages` encodes; used in the first process only.
        """
        ...

    def gather(self, variable: Variable) -> Any:
        """Returns the value of a variable as a NumPy array, gathered if it is sharded."""
        ...

    def assign(self, variables: Sequence[Variable], values: Sequence[Any]) -> None:
        """Gives variables values, which are NumPy arrays of their shapes and dtypes."""
        ...

    def rows(self, array: Any) -> Iterable[Any]:
        """What a NumPy array has along its first axis, as programs take it the soonest."""
        ...

    def taker(self, array: Any) -> Taker:
        """What copies rows of a NumPy array, as programs take them the soonest.

        It is for one thread at a time, and nobody may write to what it gives.
        """
        ...

    def draws(self) -> Any:
        """The state of the engine's own random generator; None if all draws are those of seeds."""
        ...

    def set_draws(self, state: Any) -> None:
        """Sets it."""
        ...

    def preempted(self, step: int, asked: bool) -> bool:
        """Whether many processes were asked to end, and have agreed to do so after this step.

        Args:
            step: The number of the step.
            asked: Whether this one was.
        """
        ...

    def canonical(self, dtype: str) -> str:
        """The dtype that the engine gives an array of `dtype`."""
        ...

    def is_tensor(self, x: Any) -> bool:
        """Whether `x` is a tensor of the engine, concrete or being traced."""
        ...

    def disk_hits(self) -> int:
        """How many programs this thread has taken from the engine's cache on disk so far."""
        ...

    def same_draws(self) -> AbstractContextManager[Any]:
        """A block in which the engine's own random generator always starts alike."""
        ...

    def place(self) -> Any:
        """The trace or graph that the engine is in now."""
        ...

    def idle(self) -> bool:
        """Whether this thread is in no trace or graph at all, ours or another's."""
        ...

    def inlines(self, function: str) -> bool:
        """Whether a call that is not idle stands inside a graph that can take it in.

        Raises:
            ForeignTraceError: If it stands inside one that cannot.
        """
        ...

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
            axes: The sizes that vary; the record then serves others, too. None: none does.

        Raises:
            Refused: If there are such sizes, and the step cannot be recorded for others.
        """
        ...

    def asks_for_a_value(self, error: BaseException) -> bool:
        """Whether `error` means that Python asked for the value of a traced tensor."""
        ...

    def shape(self, x: Any) -> tuple[int, ...]:
        """The shape of a concrete tensor, or of a NumPy array."""
        ...

    def differentiate(
        self, call: Loss, variables: Wanted, leaves: Sequence[Tensor], *, each: bool = False
    ) -> tuple[Tensor, Any, list[Any], list[Any]]:
        """The value and aux of `call(leaves)`, its gradients by variables, and those by leaves.

        Updates that `call` makes take effect once, in the scope around. The gradient of what
        the value does not depend on is zero. With `each`, the value is a list of scalars, and
        there is a list of gradients for each of them.
        """
        ...

    def tensor(self, x: Any) -> Tensor:
        """`x` as a tensor that can be differentiated by."""
        ...

    def host_call(
        self, fn: HostFunction, tensors: Sequence[Tensor], results: Results
    ) -> list[Tensor]:
        """Calls Python: at once, or at every run of the program that is being traced.

        Calls are kept and made in their order, before any variable changes; what one raises, the
        program raises. No gradient flows through.

        Args:
            fn: Takes a list of NumPy arrays of its own, and returns one.
            tensors: What it takes.
            results: The shapes and dtypes of what it returns; the dtypes are the engine's.
        """
        ...
