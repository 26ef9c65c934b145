"""Scopes that turn a stateful step into a pure one.

`keras.Variable.value` and `assign` go through the current `keras.StatelessScope`. A `Recorder` is
such a scope: it records the variables that a step reads and writes, returns the engine's tracers
for them, and stores new values without assigning them. A `Branch` does the same for one gradient or
one branch inside a step: it starts with the values of the scope around it, and writes back there.

Nothing here knows the engine: the engine passes a `lift` function that creates the tracers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from trainstep._common.errors import StateError
from trainstep._common.keras_private import (
    KerasVariable,
    global_state,
    initialize_all_variables,
)

_local = threading.local()
# A module: its GLOBAL_STATE_TRACKER holds the current scope of each thread. Generated code reads it
# through the module, since `clear_session` replaces the tracker.
states = global_state


def active() -> Recorder | None:
    """The recorder of this thread's trace; None outside of a trace."""
    return getattr(_local, "recorder", None)


def current_scope() -> Any:
    """The stateless scope of this thread, of trainstep or not; None outside of any."""
    return global_state.get_global_attribute("stateless_scope")


@contextlib.contextmanager
def no_scope() -> Iterator[None]:
    """A block outside of every stateless scope."""
    scope = current_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def initialize_pending() -> None:
    """Initializes the variables that were created inside a scope, which Keras defers."""
    with no_scope():
        initialize_all_variables()


@contextlib.contextmanager
def deferred_constants() -> Iterator[None]:
    """Lets a traced step create a variable from a value, as some optimizers do in `build`.

    In a stateless scope, Keras accepts only a function as the initializer, and calls it when the
    scope ends. So each value is wrapped in a function, in the tracing thread, during tracing.
    """
    original = KerasVariable.__init__

    def __init__(
        self: Any, initializer: Any, shape: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if active() is not None and isinstance(initializer, (bool, int, float, list, np.ndarray)):
            value = np.asarray(initializer)
            shape = value.shape
            dtype = dtype or _keras_dtype(initializer)
            initializer = lambda shape, dtype=None: ops.convert_to_tensor(value, dtype)  # noqa: E731
        original(self, initializer, shape, dtype, *args, **kwargs)

    KerasVariable.__init__ = __init__
    try:
        yield
    finally:
        KerasVariable.__init__ = original


def _keras_dtype(value: Any) -> str:
    """The dtype that Keras gives a value."""
    with no_scope():
        return str(keras.backend.standardize_dtype(ops.convert_to_tensor(value).dtype))


class Scope(keras.StatelessScope):  # type: ignore[misc]
    """A stateless scope that records writes.

    Args:
        current_graph: Returns the engine's current trace or graph. A write must happen in the
            step's own (`home`): a branch or loop body is a program that the value cannot leave.
        initialize: Whether variables created in the scope are initialized when it ends.

    Attributes:
        home: The trace or graph of the step.
        store: Converts a new value to the one that later reads return. Set by the engine.
    """

    def __init__(self, current_graph: Callable[[], Any], initialize: bool) -> None:
        super().__init__(collect_losses=True, initialize_variables=initialize)
        self.current_graph = current_graph
        self.home: Any = None
        # Keras's scope stores values under id(variable). This dict also keeps the variables alive:
        # one that dies during tracing could pass its id, and its value, to a new one.
        self.writes: dict[int, Any] = {}
        self.store: Callable[[Any, Any], Any] = _as_is

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self.current_graph() is not self.home:
            raise StateError(variable.path)
        self.state_mapping[id(variable)] = self.store(variable, value)
        self.writes[id(variable)] = variable

    def new_values(self) -> list[Any]:
        """The last value of each written variable, in the order of `writes`."""
        return [self.state_mapping[key] for key in self.writes]


class Recording(Scope):
    """A scope that also records reads.

    Attributes:
        lift: Creates the tracer of a variable at its first read. Set by the engine.
        note_read: Called with the value of every read. Set by engines that need it.
        copied: Copies a tracer into an independent one. Set, like the next two, by engines whose
            optimizers update in place.
        shielded: Copies a value; gradients pass through the copy.
        updated_in_place: Whether a value was updated in place.
    """

    def __init__(self, current_graph: Callable[[], Any]) -> None:
        super().__init__(current_graph, initialize=True)
        self.reads: dict[int, Any] = {}
        self.created: list[Any] = []  # variables that had no value before the trace
        self.lift: Callable[[Any], Any] = _no_lift
        self.note_read: Callable[[Any], None] = lambda value: None
        self.copied: Callable[[Any], Any] = lambda value: value
        self.shielded: Callable[[Any], Any] = lambda value: value
        self.updated_in_place: Callable[[Any], bool] = lambda value: False

    def get_current_value(self, variable: Any) -> Any:
        _note_reader(variable)
        value = self.state_mapping.get(id(variable))
        if value is None:
            self.reads[id(variable)] = variable
            if variable._value is None:
                self.created.append(variable)
            value = self.state_mapping[id(variable)] = self.lift(variable)
        self.note_read(value)
        return value


class Recorder(Recording):
    """The recording of a whole step; the thread's active recorder while it is entered."""

    def __init__(self, current_graph: Callable[[], Any]) -> None:
        super().__init__(current_graph)
        self.layers: dict[int, Any] = {}
        # The variables that may be packed, since code outside of steps rarely reads them: the kind
        # of each, by id.
        self.packable: dict[int, str] = {}
        self.uncompiled = False  # the engine cannot record the step: tensors have values now
        self.engine: Any = None
        self.objects: list[Any] = []  # among the arguments; a program does not keep them alive
        self.sizes_vary = False
        self.hosts: list[Any] = []  # the step's host calls, as the engine records them
        self.token: Any = (
            None  # an engine may pass it from one host call to the next, for their order
        )
        self.first_token: Callable[[], Any] = lambda: None
        self.vectorizes = False  # inside `vectorized_map`: one run for many elements
        # The branches that the step is in, whose siblings are computed, too: an index, a number.
        self.branches: list[tuple[Any, int]] = []

    def __enter__(self) -> Recorder:
        super().__enter__()
        _local.recorder = self
        return self

    def __exit__(self, *exception: object) -> None:
        _local.recorder = None
        super().__exit__(*exception)
        if exception[0] is not None:
            self._forget_masks()

    def _forget_masks(self) -> None:
        """Drops the dropout masks that recurrent cells keep until the end of an aborted call."""
        for entry in self.layers.values():
            for layer in entry._flatten_layers():
                for name in ("reset_dropout_mask", "reset_recurrent_dropout_mask"):
                    getattr(layer, name, lambda: None)()


def _note_reader(variable: Any) -> None:
    """Records the model that reads a variable: its trainable flags are part of the program.

    Also records that a variable is read by an optimizer and so may be one of its slots.
    """
    recorder = active()
    if recorder is None:
        return
    context = global_state.get_global_attribute("current_call_ctx")
    if context is not None:
        recorder.layers.setdefault(id(context.entry_layer), context.entry_layer)
    names = global_state.get_global_attribute("name_scope_stack")
    if names and isinstance(optimizer := names[-1].caller, keras.optimizers.Optimizer):
        count = getattr(optimizer, "_iterations", variable)  # some read it outside this name scope
        recorder.packable[id(variable)] = recorder.packable[id(count)] = "slot"


def note_packable(kind: str, variables: Iterable[Any]) -> None:
    """Records, in this thread's trace, variables that code outside of steps rarely reads."""
    recorder = active()
    if recorder is not None:
        recorder.packable.update((id(variable), kind) for variable in variables)


def _as_is(variable: Any, value: Any) -> Any:
    return value


def _no_lift(variable: Any) -> Any:
    raise RuntimeError("a recorder was entered before the engine set its `lift`")


class Branch(Scope):
    """The scope of one gradient, of one branch of a `cond`, or of a guarded step.

    Args:
        lift: Called with a variable and its value at its first read; returns the value to read.
        current_graph: See `Scope`.
    """

    def __init__(self, lift: Callable[[Any, Any], Any], current_graph: Callable[[], Any]) -> None:
        super().__init__(current_graph, initialize=False)
        self.parent = current_scope()
        self.lift = lift
        self.store = getattr(self.parent, "store", _as_is)
        self.note_read: Callable[[Any], None] = lambda value: None
        self.is_step = False  # whether it is the scope of a whole step inside another
        self.held: dict[int, Any] = {}  # the variables read, by id, kept alive as in `Scope`

    def __enter__(self) -> Branch:
        super().__enter__()
        self.home = self.current_graph()
        return self

    def get_current_value(self, variable: Any) -> Any:
        _note_reader(variable)
        key = id(variable)
        if key not in self.state_mapping:
            self.held[key] = variable
            self.state_mapping[key] = self.lift(variable, self.outer_value(variable))
        value = self.state_mapping[key]
        self.note_read(value)
        return value

    def outer_value(self, variable: Any) -> Any:
        """The value of a variable in the scope around this one."""
        if self.parent is not None:
            value = self.parent.get_current_value(variable)
            if value is not None:
                return value
        if variable._value is None:
            initialize_pending()
        return variable._value

    def give_back(self, values: list[Any]) -> None:
        """Assigns the new values of the written variables in the scope around this one."""
        for variable, value in zip(self.writes.values(), values, strict=True):
            if self.parent is not None:
                self.parent.add_update((variable, value))
            else:
                with no_scope():
                    variable.assign(value)


def recording() -> Recording | None:
    """The recording that the current scope is part of; None outside of a trace."""
    scope = current_scope()
    while isinstance(scope, Branch):
        scope = scope.parent
    return scope if isinstance(scope, Recording) else active()


@contextlib.contextmanager
def discarded() -> Iterator[None]:
    """A block whose writes are dropped; reads return the values of the scope around it."""
    around = recording()
    scope = current_scope()
    lift = _as_is if around is None else lambda variable, value: around.shielded(value)
    current_graph = scope.current_graph if isinstance(scope, Scope) else lambda: None
    with Branch(lift, current_graph):
        yield


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """A block that only builds layers and the like: no writes take effect, no host calls run."""
    before, _local.rehearses = rehearses(), True
    try:
        with discarded():
            yield
    finally:
        _local.rehearses = before


def rehearses() -> bool:
    """Whether this thread is in a `rehearsed` block."""
    return getattr(_local, "rehearses", False)


def run_isolated(case: Callable[[], Any], *, as_step: bool = False) -> tuple[Branch, Any]:
    """Runs a function inside a recording, and keeps its writes from the scope around it.

    Args:
        case: The function.
        as_step: Whether it is a whole step: then the engine may differentiate with respect to the
            variables that it reads. Otherwise gradients pass through to the step around it.

    Returns:
        The scope in which it ran, with all writes, in-place updates included; and its result.
    """
    around, scope = recording(), current_scope()
    assert around is not None
    is_step = as_step and (isinstance(scope, Recording) or scope.is_step)
    copy = around.copied if is_step else around.shielded
    branch = Branch(lambda variable, value: copy(value), scope.current_graph)
    branch.is_step = is_step
    if is_step:
        branch.note_read = around.note_read
    with branch:
        result = case()
    for key, variable in branch.held.items():
        if around.updated_in_place(branch.state_mapping[key]):
            branch.writes[key] = variable
    return branch, result
