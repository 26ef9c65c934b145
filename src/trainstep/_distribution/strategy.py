"""Strategies: the devices that compute a step.

A step is written for the whole batch and computes the same under every strategy: the mean of a
loss, the statistics and the metrics cover all rows. A strategy decides only where each part is
computed. One device is a strategy too, so no other code asks whether a step is distributed.
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
    """The base of all strategies.

    Attributes:
        layout: The engine's own description of how arrays are split over devices; None for one
            device.
    """

    def __init__(self, layout: Any = None) -> None:
        self.layout = layout
        # Weak keys: a compiled step lives as long as the function that it was made of.
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @property
    def parts(self) -> int:
        """The number of devices that a batch is split over."""
        return 1 if self.layout is None else int(self.layout.parts)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the strategy of every trainer and function that is made inside the block.

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
        """Compiles a step and runs it on all devices.

        The step sees the whole batch and returns one value for it, not one per device.

        Args:
            fn: A function, or a `trainstep.function`. It is compiled at the first call; later calls
                reuse the program.
            args: The positional arguments. Arrays as long as the first one are split along their
                first axis.
            kwargs: The keyword arguments.

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
                "Strategy.run", "fn", "a function", repr(fn), "pass the step itself, not its result"
            )
        compiled = self._functions.get(fn)
        if compiled is None:
            step = fn if isinstance(fn, Function) else Function(fn)
            compiled = self._functions[fn] = step.laid_out(self.layout)
        return compiled

    def reduce(self, how: str, values: Any, axis: int | None = None) -> Any:
        """Reduces the result of a step to its sum or mean.

        A value for the whole batch needs no reduction and is returned unchanged. Per-row values are
        reduced along `axis`.

        Args:
            how: `"sum"` or `"mean"`.
            values: A tensor, or a structure of tensors.
            axis: The axis of the rows; None for values of the whole batch.

        Example:
            >>> import numpy as np, trainstep as ts
            >>> float(ts.Single().reduce("mean", np.array([1.0, 3.0]), axis=0))
            2.0
        """
        reduce = {"sum": ops.sum, "mean": ops.mean}.get(how.lower() if isinstance(how, str) else "")
        if reduce is None:
            raise ArgumentError(
                "Strategy.reduce", "how", "'sum' or 'mean'", repr(how), "pass one of them"
            )
        if axis is None:  # one value for the whole batch: there is nothing to reduce
            return values
        return tree.map_structure(lambda x: reduce(x, axis=axis), values)

    def distribute(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        steps: int | None = None,
    ) -> Iterator[Any]:
        """Iterates over one epoch of batches that are split over the devices.

        Args:
            data: Arrays, `(x, y)` or `(x, y, sample_weight)`, the same in every process; or any
                source of batches that `Trainer.fit` accepts, which yields each process its own
                rows.
            batch_size: The size of the whole batch, for arrays; 32 by default.
            shuffle: Whether to shuffle arrays.
            steps: The number of batches; all by default.

        Yields:
            `(x, y, sample_weight)`, with None for an absent part.

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
    """One device: the default of every trainer and function.

    On JAX, a distribution set with `keras.distribution.set_distribution` still applies.

    Example:
        >>> import trainstep as ts
        >>> ts.Single().parts
        1
    """


class Mirrored(Strategy):
    """Splits batches over devices and keeps variables whole.

    On JAX, each device has its own copy of the variables. On TensorFlow, the first device of a
    process stores the variables and sends them to the others in each step. On torch, a process has
    one device; see `initialize` for several processes.

    Args:
        devices: Devices, or their numbers or names; by default all devices of all processes.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = ts.Trainer(model, optimizer="adam", loss="mse", strategy=ts.Mirrored())
        >>> logs = trainer.train_on_batch(np.ones((8, 2)), np.ones((8, 1)))
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        super().__init__(_layout("mirrored", devices))


class Sharded(Strategy):
    """Splits batches, variables and optimizer slots over devices (JAX).

    Each device stores a part of every variable that is not small, split along the longest axis
    whose size is a multiple of the number of devices.

    Args:
        devices: See `Mirrored`.

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
