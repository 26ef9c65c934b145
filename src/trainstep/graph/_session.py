"""`Session`: runs sets of fetches, each planned and compiled once.

fetches, feed keys -- hit ---> compiled callable -- feed values --> NumPy values
                   -- miss --> names resolved, Plan, Function --> compiled callable
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import optree
from keras import ops

from trainstep._common.errors import ArgumentError
from trainstep._common.structure import filled, leaves
from trainstep._engines import current
from trainstep._explain.ledger import Events, merged
from trainstep._function.function import Function
from trainstep._function.settings import StepSettings
from trainstep._function.sizes.policy import Shapes, policy
from trainstep._state.scopes import current_scope
from trainstep.graph._feeds import as_dict, by_tensor, check_graph, checks, converter, tensor_of
from trainstep.graph._graph import Graph, get_default_graph
from trainstep.graph._operations import Operation
from trainstep.graph._plan import Plan, resolve

# A plan has one or two entries. Without a limit, a loop that fetches a new expression in every
# iteration would grow the table; an evicted entry costs a second planning, but no compilation.
_MAX_PREPARED = 1024


class _Prepared(NamedTuple):
    """A planned run.

    Attributes:
        call: Returns the list of values, from the feed values.
        kept: The objects whose ids are in the key: while they live, no other object gets their ids.
    """

    call: Callable[[Sequence[Any]], list[Any]]
    kept: Sequence[Any]


class Session:
    """Computes tensors and runs operations of a graph.

    Args:
        graph: The graph; by default, the default graph at the time of this call.
        shapes: The policy for dynamic sizes, as in `trainstep.function`.

    Example:
        >>> import keras
        >>> from trainstep import graph
        >>> x = graph.placeholder("float32", [None], name="x")
        >>> w = graph.Variable(2.0)
        >>> loss = keras.ops.mean((w * x - 1.0) ** 2)
        >>> train = graph.train.minimize(keras.optimizers.SGD(0.5), loss)
        >>> with graph.Session() as session:
        ...     _, before = session.run([train, loss], feed_dict={x: [1.0]})
        ...     after = session.run(loss, {x: [1.0]})
        >>> float(before), float(after)
        (1.0, 0.0)
    """

    def __init__(self, graph: Graph | None = None, *, shapes: Shapes | str = "auto") -> None:
        if not isinstance(graph, (Graph, type(None))):
            raise ArgumentError(
                "Session", "graph", "a graph.Graph", f"a {type(graph).__name__}",
                "omit it to use the default graph",
            )  # fmt: skip
        self.graph = get_default_graph() if graph is None else graph
        self._shapes = policy(shapes, current())
        self._functions: dict[Any, tuple[Plan, Function[..., Any]]] = {}
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        self._lock = threading.RLock()
        self._closed = False

    def run(self, fetches: Any, feed_dict: Any = None) -> Any:
        """Computes the fetches, and nothing that they do not need.

        Tensors have their values from before the updates of this run. A run without operations
        changes no state except the RNG state.

        Args:
            fetches: Tensors, variables, operations or names, in any structure.
            feed_dict: Values by placeholder; a value for any other tensor replaces that tensor.

        Returns:
            NumPy values in the structure of the fetches; None for operations.
        """
        if feed_dict is None:
            feed_dict = {}
        elif type(feed_dict) is not dict:
            feed_dict = as_dict(feed_dict)
        # optree flattens and rebuilds in C, so a repeated run walks nothing in Python. The key has
        # ids: a list that was mutated has another key, and Keras variables have no usable `==`.
        flat, treespec = optree.tree_flatten(fetches, none_is_leaf=True)
        key = (self.graph.revision, treespec, *map(id, flat), *map(id, feed_dict))
        prepared = self._prepared.get(key)
        if prepared is None:
            return self._run_unprepared(fetches, feed_dict, flat, key)
        return treespec.unflatten(prepared.call(tuple(feed_dict.values())))

    def _run_unprepared(
        self, fetches: Any, feed_dict: dict[Any, Any], flat: list[Any], key: tuple[Any, ...]
    ) -> Any:
        """Runs fetches that the key does not find: new ones, names, or a dataclass of fetches.

        Names are resolved at every run, since a name may get another meaning. optree sees no
        structure in a dataclass or a subclass of list: as leaves they could change unnoticed.
        """
        if self._closed:
            raise _closed_error()
        found = leaves(fetches)
        resolved_fetches = [resolve(self.graph, each) for each in found]
        feeds = by_tensor(self.graph, feed_dict)
        own_key = (key[0], len(found), *map(id, resolved_fetches), *map(id, feeds))
        prepared = self._prepared.get(own_key)
        if prepared is None:
            call = self._call(resolved_fetches, list(feeds))
            prepared = _Prepared(call, [*resolved_fetches, *feeds])
            self._keep(own_key, prepared)
        has_names = any(isinstance(each, str) for each in (*flat, *feed_dict))
        if not has_names and _are_same(flat, found):
            self._keep(key, _Prepared(prepared.call, [*flat, *feed_dict]))
        return filled(fetches, iter(prepared.call(tuple(feeds.values()))))

    def _keep(self, key: tuple[Any, ...], prepared: _Prepared) -> None:
        with self._lock:
            while len(self._prepared) >= _MAX_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[key] = prepared

    def make_callable(
        self, fetches: Any, feed_list: Sequence[Any] | None = None
    ) -> Callable[..., Any]:
        """Returns a function of the feed values, for a loop that repeats the same fetches.

        Args:
            fetches: As in `run`.
            feed_list: The tensors to feed, in the order of the function's arguments.

        Example:
            >>> from trainstep import graph
            >>> x = graph.placeholder("float32", [None])
            >>> double = graph.Session().make_callable(2 * x, [x])
            >>> double([1.0, 2.0]).tolist()
            [2.0, 4.0]
        """
        if feed_list is not None and not isinstance(feed_list, (list, tuple)):
            raise ArgumentError(
                "make_callable",
                "feed_list",
                "a list of tensors",
                f"a {type(feed_list).__name__}",
                "write `[x]` for a single tensor",
            )
        feeds = [tensor_of(self.graph, each) for each in feed_list or ()]
        flat = leaves(fetches)
        run = self._call([resolve(self.graph, each) for each in flat], feeds)
        rebuild = _rebuilder(fetches, flat)
        count = len(feeds)

        def call(*values: Any) -> Any:
            if len(values) != count:
                raise ArgumentError(
                    "make_callable",
                    "values",
                    f"{count} values, one for each tensor of `feed_list`",
                    f"{len(values)} values",
                    "pass them in the order of `feed_list`",
                )
            return rebuild(run(values))

        return call

    def _call(self, flat: list[Any], feeds: list[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """Plans and compiles tensors and operations: a function of the feed values."""
        if self._closed:
            raise _closed_error()
        for tensor in feeds:
            check_graph(self.graph, tensor)
        if not flat:
            return lambda values: []
        plan, function = self._function(flat, feeds)
        places = [next(i for i, t in enumerate(feeds) if t is each) for each in plan.fed]
        convert = [converter(tensor) for tensor in plan.fed]
        run = function.shortcut()
        left = iter(range(len(plan.tensors)))
        wanted = [None if isinstance(each, Operation) else next(left) for each in flat]

        def call(values: Sequence[Any]) -> list[Any]:
            if self._closed:
                raise _closed_error()
            given = tuple([fit(values[at]) for fit, at in zip(convert, places, strict=True)])
            found = run(given)
            if current_scope() is not None:  # inside another step, tensors have no values yet
                return [None if at is None else found[at] for at in wanted]
            return [None if at is None else to_numpy(found[at]) for at in wanted]

        return call

    def _function(self, flat: list[Any], feeds: list[Any]) -> tuple[Plan, Function[..., Any]]:
        with self._lock:
            plan = Plan(self.graph, flat, feeds)
            key = (tuple(map(id, flat)), tuple(map(id, plan.fed)), plan.placement)
            if key not in self._functions:
                names = plan.__signature__.parameters
                axes = {
                    name: [i for i, size in enumerate(tensor.shape) if size is None and i]
                    for name, tensor in zip(names, plan.fed, strict=True)
                }
                self._functions[key] = (
                    plan,
                    Function(
                        plan,
                        StepSettings(
                            name=plan.__name__,
                            shapes=self._shapes,
                            dynamic={name: found for name, found in axes.items() if found},
                            check=checks(plan.fed),
                            uses=plan.uses,
                        ),
                    ),
                )
            return self._functions[key]

    @property
    def ledger(self) -> Events:
        """Every trace of this session, with its fetches and its reason."""
        with self._lock:
            made = [function.ledger for _, function in self._functions.values()]
        return merged("Session", made)

    def close(self) -> None:
        """Drops all programs; later runs raise an error."""
        with self._lock:
            self._closed = True
            self._functions.clear()
            self._prepared.clear()

    def __enter__(self) -> Session:
        _local.sessions.append(self)
        self._default = self.graph.as_default()
        self._default.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _local.sessions.pop()
        self._default.__exit__(None, None, None)
        self.close()


class _Local(threading.local):
    def __init__(self) -> None:
        self.sessions: list[Session] = []


_local = _Local()


def get_default_session() -> Session | None:
    """Returns the session of the innermost `with Session()`, or None.

    Example:
        >>> from trainstep import graph
        >>> with graph.Session() as session:
        ...     graph.get_default_session() is session
        True
    """
    return _local.sessions[-1] if _local.sessions else None


def session_for(session: Session | None, function: str) -> Session:
    """Returns the given session, or else the default session."""
    found = session or get_default_session()
    if found is None:
        raise ArgumentError(
            function,
            "session",
            "a session, or a `with Session()` around the call",
            "no session",
            "pass `session=`, or write `with graph.Session():`",
        )
    return found


def _closed_error() -> ArgumentError:
    return ArgumentError(
        "Session.run", "session", "an open session", "a closed session", "make a new one"
    )


def to_numpy(value: Any) -> Any:
    """Converts to a NumPy array or number; inside a `tf.function`, returns the tensor."""
    if hasattr(value, "numpy"):
        try:
            return value.numpy()[()]
        except (TypeError, RuntimeError):  # on another device, or a dtype that NumPy lacks
            pass
    try:
        return ops.convert_to_numpy(value)[()]
    except NotImplementedError:
        return value


def _rebuilder(fetches: Any, flat: list[Any]) -> Callable[[list[Any]], Any]:
    """A function that puts values in the structure that fetches have now."""
    seen, treespec = optree.tree_flatten(fetches, none_is_leaf=True)
    if _are_same(seen, flat):
        unflatten: Callable[[list[Any]], Any] = treespec.unflatten
        return unflatten
    copy = filled(fetches, iter(flat))  # fetches may be mutated later
    return lambda values: filled(copy, iter(values))


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
