"""Strategies: over which devices a step is spread.

A step is written for the whole batch, and means the same under every strategy: the mean of a loss
is over all rows, statistics and metrics are those of all rows. A strategy decides where the parts
are computed, and nothing else.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from keras import ops, tree

from trainstep import _engines
from trainstep._common.errors import ArgumentError
from trainstep._data.feed import feed, split_batch
from trainstep._data.per_process import per_process_feed
from trainstep._data.protocol import iterate_batches
from trainstep._function.function import Function
from trainstep._function.layout_scope import within


class Strategy:
    """What all strategies can do.

    Attributes:
        layout: How arrays lie over the devices, in the engine's terms; None for one device.
    """

    def __init__(self, layout: Any = None) -> None:
        self.layout = layout
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @property
    def parts(self) -> int:
        """How many devices a batch is cut for."""
        return 1 if self.layout is None else int(self.layout.parts)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the strategy of the trainers and functions that are made inside.

        Example:
            >>> import keras, trainstep as ts
            >>> with ts.Single().scope():
            ...     double = ts.function(lambda x: 2 * x)
        """
        with within(self.layout):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a step, compiled, spread over the devices.

        The step sees the whole batch, whatever the number of devices, and what it returns is of
        the whole batch: there is one value, and not one for each device.

        Args:
            fn: A function, or a `trainstep.function`. It is compiled once, and kept with it.
            args: Its arguments. Arrays as long as the first one are cut along their first axis.
            kwargs: The same by name.

        Example:
            >>> import keras, numpy as np, trainstep as ts
            >>> strategy = ts.Single()
            >>> def mean(x):
            ...     return keras.ops.mean(x)
            >>> float(strategy.run(mean, args=(np.ones(4),)))
            1.0
        """
        return self._compiled(fn)(*args, **(kwargs or {}))

    def _compiled(self, fn: Any) -> Callable[..., Any]:
        if not callable(fn):
            raise ArgumentError(
                "Strategy.run", "fn", "a function", repr(fn), "pass the step, not what it returns"
            )
        known = self._functions.get(fn)
        if known is None:
            step = fn if isinstance(fn, Function) else Function(fn)
            known = self._functions[fn] = step.laid_out(self.layout)
        return known

    def reduce(self, how: str, values: Any, axis: int | None = None) -> Any:
        """The sum or the mean of what a step returned.

        A value of the whole batch is one value already, and stays as it is. Values of single rows
        are reduced along their axis.

        Args:
            how: `"sum"` or `"mean"`.
            values: A tensor, or a structure of them.
            axis: The axis of the rows; None for what has none.

        Example:
            >>> import numpy as np, trainstep as ts
            >>> float(ts.Single().reduce("mean", np.array([1.0, 3.0]), axis=0))
            2.0
        """
        found = {"sum": ops.sum, "mean": ops.mean}.get(how.lower() if isinstance(how, str) else "")
        if found is None:
            raise ArgumentError(
                "Strategy.reduce", "how", "'sum' or 'mean'", repr(how), "pass one of them"
            )
        if axis is None:
            return values
        return tree.map_structure(lambda x: found(x, axis=axis), values)

    def distribute(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        steps: int | None = None,
    ) -> Iterator[Any]:
        """The batches of a data set, laid out over the devices: one epoch of them.

        Args:
            data: Arrays, `(x, y)` or `(x, y, sample_weight)` of them, the same in every process;
                or a source of batches, as `Trainer.fit` takes it, which yields each process its
                own rows.
            batch_size: Of the whole batch, for arrays; 32 by default.
            shuffle: Whether arrays are put into a new order.
            steps: How many batches; all by default.

        Yields:
            `(x, y, sample_weight)`, with None for what there is not.

        Example:
            >>> import numpy as np, trainstep as ts
            >>> batches = ts.Single().distribute((np.ones((5, 2)), np.ones(5)), batch_size=2)
            >>> [len(x) for x, y, _ in batches]
            [2, 2, 1]
        """
        source = feed(
            *split_batch(data, None, None), batch_size=batch_size, steps=steps, shuffle=shuffle
        )
        laid_out = per_process_feed(source, self.layout)
        return iterate_batches(laid_out.epoch(1))


class Single(Strategy):
    """One device; what a trainer or function has if nothing else is said.

    On JAX, a distribution that was set by `keras.distribution.set_distribution` is kept to.

    Example:
        >>> import trainstep as ts
        >>> ts.Single().parts
        1
    """


class Mirrored(Strategy):
    """Batches are cut over devices, variables are whole.

    On JAX each device has its own copy of them. On TensorFlow they are on the first device of a
    process, which sends them to the others in each step. On torch, a process has one device: see
    `initialize` for many of them.

    Args:
        devices: The devices, their numbers or names; all that there are by default, also those of
            other processes.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = ts.Trainer(model, optimizer="adam", loss="mse", strategy=ts.Mirrored())
        >>> logs = trainer.train_on_batch(np.ones((8, 2)), np.ones((8, 1)))
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        super().__init__(_layout("mirrored", devices))


class Sharded(Strategy):
    """Batches are cut over devices, and so are variables with their slots (JAX).

    Each device then holds a part of the state: of each variable of some size, along its longest
    axis that the number of devices divides.

    Args:
        devices: As of `Mirrored`.

    Example:
        >>> import keras, trainstep as ts
        >>> if keras.backend.backend() == "jax":
        ...     strategy = ts.Sharded()
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        super().__init__(_layout("sharded", devices))


def _layout(kind: str, devices: Sequence[Any] | None) -> Any:
    if devices is not None and not len(devices):
        raise ArgumentError(
            kind.capitalize(), "devices", "at least one device", "none", "pass None for all"
        )
    return _engines.current().layout(kind, devices)
