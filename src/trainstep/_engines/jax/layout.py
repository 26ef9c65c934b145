"""JAX: how the arrays of a step lie over a mesh of devices.

The step is written, and traced, for the whole batch. XLA cuts it into parts by how its inputs lie,
and puts in the sums that the parts need; so the numbers are those of one device, to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from trainstep._common.codegen import Source
from trainstep._engines.contract import Tensor, Variable
from trainstep._engines.jax.tricks import pack_of
from trainstep._engines.shared.padding import own
from trainstep._state.locks import moving

_AXIS = "data"
_SMALL = 1024  # numbers; a variable with fewer is not worth cutting


class Layout:
    """Batches cut along their first axis; variables whole on every device, or cut too.

    Args:
        devices: Those of the mesh.
        shards: Whether variables are cut, along their longest axis that can be.

    Attributes:
        parts: How many devices a batch is cut for.
        processes: How many processes they belong to.
    """

    _batch_axis = _AXIS

    def __init__(self, devices: Sequence[Any], *, shards: bool = False) -> None:
        self.mesh = Mesh(np.array(devices), (_AXIS,))
        self.parts = len(devices)
        self.processes = len({device.process_index for device in devices})
        self._shards = shards

    def of_batch(self, axis: int) -> Sharding:
        """How an array of a batch lies: cut along an axis."""
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, self._batch_axis))

    def of_variable(self, variable: Variable) -> Sharding:
        """How a variable lies."""
        shape = tuple(variable.shape)
        fitting = [size if size % self.parts == 0 else 0 for size in shape]
        if not self._shards or max(fitting, default=0) == 0 or np.prod(shape) < _SMALL:
            return self.whole()
        axis = fitting.index(max(fitting))
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, _AXIS))

    def whole(self) -> Sharding:
        """The whole of an array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place(self, variables: Sequence[Variable]) -> list[Sharding]:
        """Lays variables out, where they do not lie so already; tells how each lies."""
        wanted = [self.of_variable(v) for v in variables]
        moved = [
            (v, sharding)
            for v, sharding in zip(variables, wanted, strict=True)
            if not (v._value.committed and lies(v._value, sharding))
        ]
        with moving(v for v, _ in moved):
            values: list[Any] = [v._value for v, _ in moved]
            if moved and self.processes > 1:  # each has made its own: those of the first count
                values = multihost_utils.broadcast_one_to_all([np.asarray(x) for x in values])
            for (variable, sharding), value in zip(moved, values, strict=True):
                variable._value = put(value, sharding, copy=True)
                variable._layout = sharding  # Keras keeps to it when a value is assigned
        return wanted

    def assembled(
        self, shape: tuple[int, ...], axis: int, read: Callable[[tuple[slice, ...]], Any]
    ) -> Tensor:
        """An array of a batch, of which this process reads what its devices need."""
        sharding = self.whole() if shape[axis] % self.parts else self.of_batch(axis)
        return jax.make_array_from_callback(shape, sharding, read)

    def joined(self, leaves: Sequence[Any] | None, last: Sequence[Any] | None) -> list[Any] | None:
        """The arrays of a batch, of the rows that each process has; None if no process has any.

        Args:
            leaves: The arrays of this one; None if it has no more.
            last: Its last ones, for their shapes.
        """
        own = -1 if leaves is None else len(leaves[0])
        counts = multihost_utils.process_allgather(np.int32(own))
        if (counts < 0).all():
            return None
        rows = np.maximum(counts, 0)
        if last is None:
            return []
        each = self.parts // self.processes
        if (rows == rows[0]).all() and rows[0] % each == 0 and leaves is not None:
            batch = self.of_batch(0)
            return [jax.make_array_from_process_local_data(batch, x) for x in leaves]
        most = int(rows.max())  # unequal shares: every process gets all of them
        padded = [np.zeros((most, *x.shape[1:]), x.dtype) for x in last]
        for full, x in zip(padded, leaves or (), strict=False):
            full[: len(x)] = x
        found = multihost_utils.process_allgather(padded)
        return [
            put(np.concatenate([x[p, :n] for p, n in enumerate(rows)]), self.whole()) for x in found
        ]

    @staticmethod
    def agree(arrays: Sequence[Any]) -> list[Any]:
        """The arrays of the first process, in all of them."""
        return list(multihost_utils.broadcast_one_to_all(list(arrays)))


class KerasLayout(Layout):
    """What `keras.distribution.set_distribution` has laid out."""

    def __init__(self, distribution: Any) -> None:
        mesh = distribution.device_mesh.backend_mesh
        super().__init__(mesh.devices.flatten())
        self.mesh, self._distribution = mesh, distribution
        self._batch_axis = distribution.batch_dim_name
        self.parts = mesh.shape[self._batch_axis]

    def of_variable(self, variable: Variable) -> Sharding:
        layout = variable._layout
        if layout is None:
            layout = self._distribution.get_variable_layout(variable)
        sharding: Sharding = getattr(layout, "backend_layout", layout)
        return sharding


class FoundLayout(Layout):
    """What somebody has laid out: variables stay as they lie."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh.devices.flatten())
        self.mesh, self._batch_axis = mesh, mesh.axis_names[0]
        self.parts = mesh.shape[self._batch_axis]

    def of_variable(self, variable: Variable) -> Sharding:
        sharding = variable._value.sharding
        is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh
        return sharding if is_on_mesh else self.whole()


def active(variables: Sequence[Variable]) -> Layout | None:
    """The layout of Keras's own distribution, or of the variables, if there is one."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        return _of_keras(distribution)
    shardings = (v._value.sharding for v in variables if pack_of(v) is None)
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1]
    return FoundLayout(meshes[0]) if meshes else None


@functools.lru_cache(maxsize=8)
def _of_keras(distribution: Any) -> Layout:
    return KerasLayout(distribution)


class Spread:
    """A step over several devices: how its inputs and outputs lie.

    A batch that the devices do not divide is fed with more rows, which the program drops at once:
    the parts that XLA makes of the rest are as equal as they can be.

    Args:
        layout: The layout.
        state: The variables that the step reads, first among its inputs.
        writes: Those that it writes, first among its outputs.
        arguments: The other inputs, with shapes and dtypes.
        results: The other outputs, with shapes.
        axis: The one along which batches are cut.

    Attributes:
        shardings: What `jax.jit` is told.
        arguments: The inputs as they are fed.
        feeds: Make them of the arguments of a call.
        is_shared: Whether other processes take part.
        waits: Whether a step has to end before the next one begins.
    """

    def __init__(
        self,
        layout: Layout,
        state: list[Variable],
        writes: list[Variable],
        arguments: Sequence[Any],
        results: Sequence[Any],
        *,
        axis: int,
    ) -> None:
        rows = next((x.shape[axis] for x in arguments if x.ndim > axis), 0)
        missing = -rows % layout.parts
        batch, whole = layout.of_batch(axis), layout.whole()

        def is_batch(x: Any) -> bool:
            return bool(rows) and x.ndim > axis and x.shape[axis] == rows

        given = [batch if is_batch(x) else whole for x in arguments]
        # What is not in this process, it could not read; what has no equal parts, JAX takes whole.
        cut = layout.processes == 1 and not missing
        returned = [batch if cut and is_batch(x) else whole for x in results]
        self.shardings = {
            "in_shardings": (*layout.place(state), *given),
            "out_shardings": [*layout.place(writes), *returned],
        }
        more = [missing if is_batch(x) else 0 for x in arguments]
        self.arguments = [_longer(x, axis, by) for x, by in zip(arguments, more, strict=True)]
        self.feeds = [feeder(sharding, axis, by) for sharding, by in zip(given, more, strict=True)]
        self._back = [(batch, axis, rows) if by else None for by in more]
        # Devices that are parts of one processor share its threads. With a second step on its way,
        # the parts of the first may find none, and wait for each other for ever.
        self.is_shared = layout.processes > 1
        self.waits = layout.mesh.devices.flat[0].platform == "cpu"

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs, of the arguments of a call."""
        return [feed(x) for feed, x in zip(self.feeds, leaves, strict=True)]

    def source(self, arrays: Mapping[str, Any]) -> tuple[Source, list[str]]:
        """Statements that prepare the inputs, of arguments like these; and their expressions."""
        inputs, names = self.taken(list(arrays))
        return Source("", names), inputs

    def taken(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """The expressions of the inputs, of those of the arguments, and what they mean."""
        texts = [f"feeds[{place}]({text})" for place, text in enumerate(arguments)]
        return texts, {"feeds": self.feeds}

    def around(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The step, of arguments as they are fed."""
        if not any(self._back):
            return fun
        first = -len(self._back)

        def spread(*operands: Tensor) -> Any:
            given = [
                x
                if back is None
                else jax.lax.with_sharding_constraint(
                    jax.lax.slice_in_dim(x, 0, back[2], axis=back[1]), back[0]
                )
                for x, back in zip(operands[first:], self._back, strict=True)
            ]
            return fun(*operands[:first], *given)

        return spread


def _longer(x: Any, axis: int, by: int) -> Any:
    return jax.ShapeDtypeStruct(_shape(x, axis, x.shape[axis] + by), x.dtype) if by else x


def lies(value: Tensor, sharding: Sharding) -> bool:
    """Whether an array lies as told; one that was never laid out may go anywhere."""
    return bool(value.sharding.is_equivalent_to(sharding, value.ndim))


def put(value: Any, sharding: Sharding, *, copy: bool = False) -> Tensor:
    """An array, laid out. Of many processes, each has the whole, and takes its devices' parts.

    Args:
        value: The array.
        sharding: How it is to lie.
        copy: Whether it may not share memory with `value`. What a step gives away has to be its
            own: whoever holds the old array keeps it.
    """
    if sharding.is_fully_addressable:
        # Of `may_alias=False`, JAX makes nothing where an array goes to several devices.
        return jax.device_put(jax.numpy.array(value, copy=True) if copy else value, sharding)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def feeder(sharding: Sharding, axis: int, more: int) -> Callable[[Any], Tensor]:
    """What lays out an argument of a step; one that lies so already is left alone.

    Args:
        sharding: How it is to lie.
        axis: The axis of the rows.
        more: How many rows are put behind it.
    """

    def feed(x: Any) -> Tensor:
        if more:
            x = np.asarray(x)
            return put(
                np.concatenate([x, np.zeros(_shape(x, axis, more), x.dtype)], axis), sharding
            )
        if type(x) is np.ndarray:
            return put(own(x), sharding)
        return x if x.committed and lies(x, sharding) else put(x, sharding)

    return feed


def _shape(x: Any, axis: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:axis], rows, *x.shape[axis + 1 :])


def copied(x: Tensor) -> Tensor:
    """A copy of an array, made part by part: no other process has to take part."""
    parts = [jax.device_put(shard.data, may_alias=False) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
