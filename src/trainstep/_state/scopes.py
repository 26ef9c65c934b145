"""Scopes that turn a stateful step into a pure one.

`keras.Variable.value` and `assign` go through the current `keras.StatelessScope`. A `Recorder`
is such a scope: it notes which variables a step reads and writes, hands out the engine's
stand-ins for them, and keeps new values to itself. A `Branch` is the same for one
differentiation inside a step: it starts from the scope around it and gives its writes back.

Nothing here knows the engine: stand-ins are made by the `lift` function that it passes in.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common import KerasVariable, global_state
from keras.src.backend.common.variables import initialize_all_variables

from trainstep._common.errors import StateError

_local = threading.local()
# Its GLOBAL_STATE_TRACKER, per thread, has the current scope; `clear_session` puts in another.
states = global_state


def active() -> Recorder | None:
    """The recorder of the trace that this thread is in, if any."""
    return getattr(_local, "recorder", None)


def current_scope() -> Any:
    """The stateless scope that this thread is in, ours or another's, if any."""
    return global_state.get_global_attribute("stateless_scope")


@contextlib.contextmanager
def no_scope() -> Iterator[None]:
    """Steps out of every stateless scope for a while."""
    scope = current_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def initialize_pending() -> None:
    """Gives values to the variables that were created inside a scope, which Keras puts off."""
    with no_scope():
        initialize_all_variables()


@contextlib.contextmanager
def deferred_constants() -> Iterator[None]:
    """Lets a traced step create a variable from a value, as some optimizers do in `build`.

    In a stateless scope Keras takes only a function as the initializer, and calls it when the
    scope is left. So a value becomes a function, in the tracing thread, until the trace is over.
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
    """A stateless scope that notes what is written.

    Args:
        place: Tells in which trace or graph the engine is now; a write has to be made at home,
            not in a branch or loop body, which is a program of its own.
        initialize: Whether variables created in the scope get their values when it is left.

    Attributes:
        home: The place of the step.
        store: Makes what later reads see of a new value. Set by the engine.
    """

    def __init__(self, place: Callable[[], Any], initialize: bool) -> None:
        super().__init__(collect_losses=True, initialize_variables=initialize)
        self.place = place
        self.home: Any = None
        # The scope files values under id(variable). Dicts of ours also keep the variables alive, so
        # that none that dies while tracing can pass its id to a new one.
        self.writes: dict[int, Any] = {}
        self.store: Callable[[Any, Any], Any] = _as_is

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self.place() is not self.home:
            raise StateError(variable.path)
        self.state_mapping[id(variable)] = self.store(variable, value)
        self.writes[id(variable)] = variable

    def new_values(self) -> list[Any]:
        """The last value of each written variable, in the order of `writes`."""
        return [self.state_mapping[key] for key in self.writes]


class Recording(Scope):
    """A scope that also notes what is read.

    Attributes:
        lift: Makes the stand-in for a variable at its first read. Set by the engine.
        note_read: Told of every read. Set by an engine that has a use for it.
        copied: Makes a stand-in of its own from one. This and the next two are set by engines
            whose optimizers update in place.
        shielded: Makes a copy of a value, which gradients go through.
        updated_in_place: Tells whether a value was.
    """

    def __init__(self, place: Callable[[], Any]) -> None:
        super().__init__(place, initialize=True)
        self.reads: dict[int, Any] = {}
        self.created: list[Any] = []  # those that had no value before the trace
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
    """The recording of a whole step; the thread's active one while it is entered."""

    def __init__(self, place: Callable[[], Any]) -> None:
        super().__init__(place)
        self.layers: dict[int, Any] = {}
        # Variables that hardly anybody but a step looks at: of what kind each is, by id.
        self.packable: dict[int, str] = {}
        self.uncompiled = False  # the engine gave up recording: tensors have values now
        self.engine: Any = None
        self.objects: list[Any] = []  # among the arguments: a program does not hold them
        self.sizes_vary = False
        self.hosts: list[Any] = []  # what the step calls on the host, as the engine notes it
        self.token: Any = None  # what an engine may pass from one such call to the next
        self.first_token: Callable[[], Any] = lambda: None
        self.vectorizes = False  # a function is being run once for many elements
        # The branches that are computed side by side with others: an index, and which it is.
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
        """Recurrent cells keep the dropout masks of a call until its end, which did not come."""
        for entry in self.layers.values():
            for layer in entry._flatten_layers():
                for name in ("reset_dropout_mask", "reset_recurrent_dropout_mask"):
                    getattr(layer, name, lambda: None)()


def _note_reader(variable: Any) -> None:
    """Remembers the model that is being called, whose trainable flags are part of the program.

    And of what an optimizer reads while it applies gradients, that it may be its own.
    """
    recorder = active()
    if recorder is None:
        return
    context = global_state.get_global_attribute("current_call_ctx")
    if context is not None:
        recorder.layers.setdefault(id(context.entry_layer), context.entry_layer)
    names = global_state.get_global_attribute("name_scope_stack")
    if names and isinstance(optimizer := names[-1].caller, keras.optimizers.Optimizer):
        count = getattr(optimizer, "_iterations", variable)  # which some read outside this scope
        recorder.packable[id(variable)] = recorder.packable[id(count)] = "slot"


def note_packable(kind: str, variables: Iterable[Any]) -> None:
    """Tells the trace that this thread is in which variables nobody will look at, or seldom."""
    recorder = active()
    if recorder is not None:
        recorder.packable.update((id(variable), kind) for variable in variables)


def _as_is(variable: Any, value: Any) -> Any:
    return value


def _no_lift(variable: Any) -> Any:
    raise RuntimeError("a recorder was entered before its engine prepared it")


class Branch(Scope):
    """The scope of one differentiation, of one branch of a `cond`, or of a guarded step.

    Args:
        lift: Called with a variable and its value at its first read; returns what `fn` reads.
        place: See `Scope`.
    """

    def __init__(self, lift: Callable[[Any, Any], Any], place: Callable[[], Any]) -> None:
        super().__init__(place, initialize=False)
        self.parent = current_scope()
        self.lift = lift
        self.store = getattr(self.parent, "store", _as_is)
        self.note_read: Callable[[Any], None] = lambda value: None
        self.is_step = False  # of a whole step inside another, not of a part of one
        self.held: dict[int, Any] = {}  # what was read

    def __enter__(self) -> Branch:
        super().__enter__()
        self.home = self.place()
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
        """What the variable holds outside this differentiation."""
        if self.parent is not None:
            value = self.parent.get_current_value(variable)
            if value is not None:
                return value
        if variable._value is None:
            initialize_pending()
        return variable._value

    def give_back(self, values: list[Any]) -> None:
        """Makes the writes take effect in the scope around, once."""
        for variable, value in zip(self.writes.values(), values, strict=True):
            if self.parent is not None:
                self.parent.add_update((variable, value))
            else:
                with no_scope():
                    variable.assign(value)


def recording() -> Recording | None:
    """The recording that the current scope is part of, if any."""
    scope = current_scope()
    while isinstance(scope, Branch):
        scope = scope.parent
    return scope if isinstance(scope, Recording) else active()


@contextlib.contextmanager
def discarded() -> Iterator[None]:
    """Forgets what is written inside; reads see the scope around."""
    around = recording()
    scope = current_scope()
    lift = _as_is if around is None else lambda variable, value: around.shielded(value)
    place = scope.place if isinstance(scope, Scope) else lambda: None
    with Branch(lift, place):
        yield


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """Runs something for what it builds alone: its writes are forgotten, and it calls nobody."""
    before, _local.rehearses = rehearses(), True
    try:
        with discarded():
            yield
    finally:
        _local.rehearses = before


def rehearses() -> bool:
    """Whether what runs now runs for what it builds alone."""
    return getattr(_local, "rehearses", False)


def apart(case: Callable[[], Any], *, as_step: bool = False) -> tuple[Branch, Any]:
    """Runs a case without letting its writes out.

    Args:
        case: What to run, inside a recording.
        as_step: Whether it is a step like the one around it: an engine's own differentiation may
            be by the variables as they are read in it. Gradients go through a part of a step.

    Returns:
        The scope in which it ran, with all that it wrote, also in place; and its result.
    """
    around, scope = recording(), current_scope()
    assert around is not None
    is_step = as_step and (isinstance(scope, Recording) or scope.is_step)
    copy = around.copied if is_step else around.shielded
    branch = Branch(lambda variable, value: copy(value), scope.place)
    branch.is_step = is_step
    if is_step:
        branch.note_read = around.note_read
    with branch:
        result = case()
    for key, variable in branch.held.items():
        if around.updated_in_place(branch.state_mapping[key]):
            branch.writes[key] = variable
    return branch, result
