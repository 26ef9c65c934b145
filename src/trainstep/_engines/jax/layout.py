"""JAX: the shardings of the arrays of a step over a mesh of devices.

The step is written, and traced, for the whole batch. XLA partitions it by the shardings of its
inputs and inserts the collectives, so results equal those of one device up to rounding.
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
_SMALL = 1024  # elements; smaller variables are replicated


class Layout:
    """Shards batches along their first axis; replicates variables, or shards them too.

    Args:
        devices: The devices of the mesh.
        shards: Whether variables are sharded, along the longest axis that divides evenly.

    Attributes:
        parts: The number of parts of a batch.
        processes: The number of processes that own the devices.
    """

    _batch_axis = _AXIS

    def __init__(self, devices: Sequence[Any], *, shards: bool = False) -> None:
        self.mesh = Mesh(np.array(devices), (_AXIS,))
        self.parts = len(devices)
        self.processes = len({device.process_index for device in devices})
        self._shards = shards

    def batch_sharding(self, axis: int) -> Sharding:
        """Returns the sharding of an array of a batch along an axis."""
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, self._batch_axis))

    def variable_sharding(self, variable: Variable) -> Sharding:
        """Returns the sharding of a variable."""
        shape = tuple(variable.shape)
        fitting = [size if size % self.parts == 0 else 0 for size in shape]
        if not self._shards or max(fitting, default=0) == 0 or np.prod(shape) < _SMALL:
            return self.replicated()
        axis = fitting.index(max(fitting))
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, _AXIS))

    def replicated(self) -> Sharding:
        """Returns the sharding of an array that is replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place(self, variables: Sequence[Variable]) -> list[Sharding]:
        """Moves variables to their shardings, where needed; returns the shardings."""
        wanted = [self.variable_sharding(v) for v in variables]
        moved = [
            (v, sharding)
            for v, sharding in zip(variables, wanted, strict=True)
            if not (v._value.committed and has_sharding(v._value, sharding))
        ]
        with moving(v for v, _ in moved):
            values: list[Any] = [v._value for v, _ in moved]
            if moved and self.processes > 1:  # each has its own values; use those of the first
                values = multihost_utils.broadcast_one_to_all([np.asarray(x) for x in values])
            for (variable, sharding), value in zip(moved, values, strict=True):
                variable._value = put(value, sharding, copy=True)
                variable._layout = sharding  # Keras applies it to assigned values
        return wanted

    def assembled(
        self, shape: tuple[int, ...], axis: int, read: Callable[[tuple[slice, ...]], Any]
    ) -> Tensor:
        """Returns an array of a batch; this process reads only the rows that its devices need."""
        sharding = self.replicated() if shape[axis] % self.parts else self.batch_sharding(axis)
        return jax.make_array_from_callback(shape, sharding, read)

    def joined(self, leaves: Sequence[Any] | None, last: Sequence[Any] | None) -> list[Any] | None:
        """Joins the rows of all processes into one batch; returns None if no process has any.

        Args:
            leaves: The arrays of this process; None if its data is exhausted.
            last: Its last arrays, for their shapes.
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
            batch = self.batch_sharding(0)
            return [jax.make_array_from_process_local_data(batch, x) for x in leaves]
        most = int(rows.max())  # unequal shares: every process gets all of them
        padded = [np.zeros((most, *x.shape[1:]), x.dtype) for x in last]
        for full, x in zip(padded, leaves or (), strict=False):
            full[: len(x)] = x
        found = multihost_utils.process_allgather(padded)
        return [
            put(np.concatenate([x[p, :n] for p, n in enumerate(rows)]), self.replicated())
            for x in found
        ]

    @staticmethod
    def agree(arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays of the first process, in every process."""
        return list(multihost_utils.broadcast_one_to_all(list(arrays)))


class KerasLayout(Layout):
    """The layout of `keras.distribution.set_distribution`."""

    def __init__(self, distribution: Any) -> None:
        mesh = distribution.device_mesh.backend_mesh
        super().__init__(mesh.devices.flatten())
        self.mesh, self._distribution = mesh, distribution
        self._batch_axis = distribution.batch_dim_name
        self.parts = mesh.shape[self._batch_axis]

    def variable_sharding(self, variable: Variable) -> Sharding:
        layout = variable._layout
        if layout is None:
            layout = self._distribution.get_variable_layout(variable)
        sharding: Sharding = getattr(layout, "backend_layout", layout)
        return sharding


class ExistingLayout(Layout):
    """The layout that the user's code has given to variables: they keep their shardings."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh.devices.flatten())
        self.mesh, self._batch_axis = mesh, mesh.axis_names[0]
        self.parts = mesh.shape[self._batch_axis]

    def variable_sharding(self, variable: Variable) -> Sharding:
        sharding = variable._value.sharding
        is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh
        return sharding if is_on_mesh else self.replicated()


def active(variables: Sequence[Variable]) -> Layout | None:
    """Returns the layout of Keras's distribution, or that of the variables, if any."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        return _of_keras(distribution)
    shardings = (v._value.sharding for v in variables if pack_of(v) is None)
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1]
    return ExistingLayout(meshes[0]) if meshes else None


@functools.lru_cache(maxsize=8)
def _of_keras(distribution: Any) -> Layout:
    return KerasLayout(distribution)


class Spread:
    """The inputs and outputs of a step over several devices, with their shardings.

    A batch that does not divide evenly is padded with rows that the program drops first; XLA then
    splits the true rows as evenly as possible.

    Args:
        layout: The layout.
        state: The variables that the step reads, its first inputs.
        writes: The variables that it writes, its first outputs.
        arguments: The other inputs, with shapes and dtypes.
        results: The other outputs, with shapes.
        axis: The axis along which batches are sharded.

    Attributes:
        shardings: The sharding arguments of `jax.jit`.
        arguments: The padded inputs, with shapes and dtypes.
        placers: Functions from each argument of a call to its input.
        is_multiprocess: Whether other processes take part.
        must_wait: Whether a step has to end before the next one begins.
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
        batch, whole = layout.batch_sharding(axis), layout.replicated()

        def is_batch(x: Any) -> bool:
            return bool(rows) and x.ndim > axis and x.shape[axis] == rows

        given = [batch if is_batch(x) else whole for x in arguments]
        # Shards of other processes cannot be read here; uneven shards are not supported by JAX.
        cut = layout.processes == 1 and not missing
        returned = [batch if cut and is_batch(x) else whole for x in results]
        self.shardings = {
            "in_shardings": (*layout.place(state), *given),
            "out_shardings": [*layout.place(writes), *returned],
        }
        more = [missing if is_batch(x) else 0 for x in arguments]
        self.arguments = [_lengthened(x, axis, by) for x, by in zip(arguments, more, strict=True)]
        self.placers = [
            input_placer(sharding, axis, by) for sharding, by in zip(given, more, strict=True)
        ]
        self._unpad = [(batch, axis, rows) if by else None for by in more]
        # CPU devices share one thread pool. If a second step is dispatched, parts of the first may
        # get no thread, and its collectives deadlock.
        self.is_multiprocess = layout.processes > 1
        self.must_wait = layout.mesh.devices.flat[0].platform == "cpu"

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the inputs for the arguments of a call."""
        return [place(x) for place, x in zip(self.placers, leaves, strict=True)]

    def source(self, arrays: Mapping[str, Any]) -> tuple[Source, list[str]]:
        """Returns statements that prepare the inputs for such arguments, and their expressions."""
        inputs, names = self.expressions(list(arrays))
        return Source("", names), inputs

    def expressions(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Returns the expressions of the inputs, given those of the arguments, and their names."""
        texts = [f"placers[{place}]({text})" for place, text in enumerate(arguments)]
        return texts, {"placers": self.placers}

    def wrap(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step as a function of the padded inputs."""
        if not any(self._unpad):
            return fun
        first = -len(self._unpad)

        def spread(*operands: Tensor) -> Any:
            given = [
                x
                if back is None
                else jax.lax.with_sharding_constraint(
                    jax.lax.slice_in_dim(x, 0, back[2], axis=back[1]), back[0]
                )
                for x, back in zip(operands[first:], self._unpad, strict=True)
            ]
            return fun(*operands[:first], *given)

        return spread


def _lengthened(x: Any, axis: int, by: int) -> Any:
    return jax.ShapeDtypeStruct(_shape(x, axis, x.shape[axis] + by), x.dtype) if by else x


def has_sharding(value: Tensor, sharding: Sharding) -> bool:
    """Whether an array has a sharding, or an equivalent one."""
    return bool(value.sharding.is_equivalent_to(sharding, value.ndim))


def put(value: Any, sharding: Sharding, *, copy: bool = False) -> Tensor:
    """Returns an array with a sharding. Each process has the whole, and stores its shards.

    Args:
        value: The array.
        sharding: The sharding.
        copy: Whether to copy, so that the result does not alias `value`: a donated array must
            have no other owner.
    """
    if sharding.is_fully_addressable:
        # JAX ignores `may_alias=False` for several devices, so the copy is explicit.
        return jax.device_put(jax.numpy.array(value, copy=True) if copy else value, sharding)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def input_placer(sharding: Sharding, axis: int, more: int) -> Callable[[Any], Tensor]:
    """Returns a function that pads and shards an argument of a step, where needed.

    Args:
        sharding: The sharding of the input.
        axis: The axis of the rows.
        more: The number of padding rows.
    """

    def to_input(x: Any) -> Tensor:
        if more:
            x = np.asarray(x)
            return put(
                np.concatenate([x, np.zeros(_shape(x, axis, more), x.dtype)], axis), sharding
            )
        if type(x) is np.ndarray:
            return put(own(x), sharding)
        return x if x.committed and has_sharding(x, sharding) else put(x, sharding)

    return to_input


def _shape(x: Any, axis: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:axis], rows, *x.shape[axis + 1 :])


def copy_shards(x: Tensor) -> Tensor:
    """Copies an array shard by shard, so no other process has to take part."""
    parts = [jax.device_put(shard.data, may_alias=False) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
