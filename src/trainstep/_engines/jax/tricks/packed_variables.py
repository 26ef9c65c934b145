"""Trick: stores small variables in one packed array.

    momentums, velocities, ... --pack--> one input of the program, sliced where the step reads
                                         one output, concatenated from the values it writes

A call of a compiled program costs more than a microsecond for each input and output array, however
small. A deep network has two small optimizer slots for every bias, and a Trainer has two scalars
for every metric. So small variables that a step writes, and that other code rarely reads, are
packed. Reading a packed variable copies its slice; assigning writes it: packed variables have a
subclass with its own `_value`.

The first program that uses a variable decides whether it is packed, and all later programs follow.
It does not apply to trainable or large variables, to those on several devices, or of other dtypes
than 32 bits and bool. A layout over several devices dissolves packs for good.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from trainstep._common.side_table import SideTable
from trainstep._engines.contract import Tensor, Variable
from trainstep._engines.jax.private import lib
from trainstep._state.locks import moving

_LARGEST = 1024  # elements of a packed variable; copying more costs more than a separate array
_LEAST = 128  # elements of a pack; see `Pack.updated`
_MOST = 65536  # elements of a pack: assigning to one variable copies the whole pack


_BITS = np.dtype(np.uint32)  # the dtype of a pack: bits are moved, never converted
_DTYPES = frozenset(map(np.dtype, (np.float32, np.int32, np.uint32, np.bool_)))


class Part(NamedTuple):
    """The slice of a variable in a pack, with its shape and dtype."""

    variable: weakref.ref[Any]
    where: slice
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def extract(self, array: Tensor) -> Tensor:
        """Returns the value of the variable, inside a program."""
        bits = lax.slice(array, (self.where.start,), (self.where.stop,))
        value = bits != 0 if self.dtype == np.bool_ else lax.bitcast_convert_type(bits, self.dtype)
        return lax.reshape(value, self.shape)

    def bits(self, value: Tensor) -> Tensor:
        """Returns a value as elements of the pack, inside a program."""
        if self.dtype == np.bool_:
            return lax.convert_element_type(value, _BITS)
        return lax.bitcast_convert_type(value, _BITS)

    def read(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns a copy of the value of the variable, on the host."""
        bits = array[self.where]
        value = bits != 0 if self.dtype == np.bool_ else bits.view(self.dtype)
        return np.array(value).reshape(self.shape)

    def write(self, array: np.ndarray[Any, Any], value: Any) -> None:
        """Writes the value of the variable into an array on the host."""
        array[self.where] = _bits_of(np.asarray(value, self.dtype))


def _bits_of(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = value.ravel()
    return flat.astype(_BITS) if value.dtype == np.bool_ else flat.view(_BITS)


class Pack:
    """One array with the values of several variables.

    Like a variable, it stores its array in `_value`, so programs treat both alike.

    Attributes:
        parts: The parts of the variables, by id.
        is_active: False once it has been dissolved.
        lock: Held while a program reads, donates and replaces the array. The program computes
            asynchronously, after the lock is released, so a host call may read a variable. Packs
            that are made together share a lock, since a program mostly uses them together.
    """

    def __init__(self, variables: Sequence[Variable], lock: Any) -> None:
        self._captured = [v._value for v in variables]  # to detect assignments until `install`
        values = [np.asarray(x) for x in self._captured]
        (self._device,) = variables[0]._value.devices()
        self._sharding = SingleDeviceSharding(self._device)
        rest = np.zeros(max(0, _LEAST - sum(x.size for x in values)), _BITS)
        self._value = self._array(np.concatenate([*map(_bits_of, values), rest]))
        self.parts: dict[int, Part] = {}
        self.is_active = True
        self.lock = lock
        start = 0
        for variable, x in zip(variables, values, strict=True):
            where = slice(start, start + x.size)
            self.parts[id(variable)] = Part(weakref.ref(variable), where, x.shape, x.dtype)
            start += x.size

    def read(self, variable: Variable) -> Tensor:
        """Returns a copy of the value of a variable."""
        with self.lock:
            return self._array(self.parts[id(variable)].read(np.asarray(self._value)))

    def write(self, new: Sequence[tuple[Variable, Any]]) -> None:
        """Assigns values to some of the variables."""
        with self.lock:
            numbers = np.array(self._value)
            for variable, value in new:
                self.parts[id(variable)].write(numbers, value)
            self._value = self._array(numbers)

    def members(self) -> list[Variable]:
        """Returns its variables that still exist."""
        found = (part.variable() for part in self.parts.values())
        return [v for v in found if v is not None and _pack_of_variable.get(v) is self]

    def install(self) -> None:
        """Moves the variables' values into this pack."""
        # In an order that an exception may interrupt at any point.
        for part, captured in zip(self.parts.values(), self._captured, strict=True):
            variable = part.variable()
            assert variable is not None
            variable.__class__ = _Packed
            _pack_of_variable.set(variable, self)
            last = variable.__dict__.pop("_value")
            if last is not captured:  # another thread has assigned it since
                self.write([(variable, last)])
        self._captured.clear()

    def dissolve(self) -> None:
        """Gives every variable its own array again; no program may be running on them."""
        members = self.members()
        for variable in members:  # not read before the class changes below
            variable.__dict__["_value"] = self.read(variable)
        self.is_active = False
        for variable in members:
            _pack_of_variable.set(variable, _UNPACKED)
            variable.__class__ = keras.Variable

    def updated(self, array: Tensor, new: dict[int, Tensor]) -> Tensor:
        """Returns the array with new values of some variables, by id, inside a program."""
        values = (
            # The id of a deleted variable may belong to another one now.
            part.bits(new[key])
            if key in new and part.variable() is not None
            else lax.slice(array, (part.where.start,), (part.where.stop,))
            for key, part in self.parts.items()
        )
        # As rows: XLA fuses the computation of vectors into the loop that concatenates them, where
        # rounding depends on the other parts. The results of a step must not depend on packing.
        rows = [lax.reshape(value, (1, value.size)) for value in values]
        rows.append(lax.full((1, array.size - sum(row.size for row in rows)), 0, array.dtype))
        return lax.reshape(lax.concatenate([row for row in rows if row.size], 1), array.shape)

    def merged(self, old: Tensor, array: Tensor, written: AbstractSet[int]) -> Tensor:
        """Returns the result of a program, merged with assignments made while it ran.

        Args:
            old: The input array of the program.
            array: Its output array.
            written: The ids of the variables that it wrote.
        """
        if self._value is old:
            return array
        numbers = np.array(self._value)
        for key in written & self.parts.keys():
            where = self.parts[key].where
            numbers[where] = np.asarray(array)[where]
        return self._array(numbers)

    def _array(self, numbers: np.ndarray[Any, Any]) -> Tensor:
        # The core of `jnp.asarray`, in a tenth of its time.
        aval = jax.core.ShapedArray(numbers.shape, numbers.dtype)
        return lib.xla_client.batched_device_put(
            aval, self._sharding, [numbers], [self._device], False
        )


_UNPACKED = object()
_pack_of_variable: SideTable[Any] = SideTable()  # the pack of a variable, or `_UNPACKED`
_packing = threading.RLock()


def pack(variables: Iterable[Variable], kinds: Mapping[int, str]) -> None:
    """Decides which variables are packed, where that is undecided.

    Args:
        variables: The variables.
        kinds: By id, the kind of each variable that may be packed; a pack has one kind.
    """
    lock = threading.RLock()
    with _packing:
        new = {id(v): v for v in variables if _pack_of_variable.get(v) is None}
        for group in _groups([(v, kinds[key]) for key, v in new.items() if key in kinds]):
            Pack(group, lock).install()
        for variable in new.values():
            if _pack_of_variable.get(variable) is None:
                _pack_of_variable.set(variable, _UNPACKED)


def pack_of(variable: Variable) -> Pack | None:
    """Returns the pack that stores a variable, if any."""
    pack = _pack_of_variable.get(variable)
    return pack if isinstance(pack, Pack) and pack.is_active else None


class _Packed(keras.Variable):  # type: ignore[misc]
    """A variable whose value is stored in a pack."""

    @property
    def _value(self) -> Any:
        pack = pack_of(self)
        return vars(self)["_value"] if pack is None else pack.read(self)

    @_value.setter
    def _value(self, value: Any) -> None:
        pack = pack_of(self)
        if pack is None:
            self.__dict__["_value"] = value
        elif value is not None:  # Keras's `fit` clears values temporarily, to save memory
            pack.write([(self, value)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies as a plain variable."""
        return _plain, ({**vars(self), "_value": self._value},)


def _plain(state: dict[str, Any]) -> Variable:
    variable = keras.Variable.__new__(keras.Variable)
    vars(variable).update(state)
    return variable


def assign(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Assigns values to variables, with one write per pack."""
    by_pack: dict[int, tuple[Pack, list[tuple[Variable, Any]]]] = {}
    for variable, value in zip(variables, values, strict=True):
        pack = pack_of(variable)
        if pack is None:
            variable.assign(value)
        else:
            by_pack.setdefault(id(pack), (pack, []))[1].append((variable, value))
    for pack, new in by_pack.values():
        pack.write(new)


def unpack(variables: Iterable[Variable]) -> None:
    """Dissolves the packs of variables for good; programs that use these packs no longer fit."""
    packs = {id(pack): pack for v in variables if (pack := pack_of(v)) is not None}
    with moving(v for pack in packs.values() for v in pack.members()):
        for pack in packs.values():
            if pack.is_active:  # not dissolved by another thread since
                pack.dissolve()


def _is_small(variable: Variable) -> bool:
    value = vars(variable).get("_value")
    return (
        type(variable) is keras.Variable
        and not variable.trainable
        and value is not None
        and value.dtype in _DTYPES
        and 0 < math.prod(value.shape) <= _LARGEST
        and not value.committed
    )


def _groups(variables: Iterable[tuple[Variable, str]]) -> Iterator[list[Variable]]:
    """Groups small variables of one kind and device, up to the size of a pack; drops singles."""
    groups: dict[Any, list[list[Variable]]] = {}
    room: dict[Any, int] = {}
    for variable, kind in filter(lambda pair: _is_small(pair[0]), variables):
        key = (kind, *variable._value.devices())
        size = math.prod(variable.shape)
        if room.get(key, 0) < size:
            groups.setdefault(key, []).append([])
            room[key] = _MOST
        groups[key][-1].append(variable)
        room[key] -= size
    return (group for found in groups.values() for group in found if len(group) > 1)
