"""JAX: small variables that nobody looks at, which share an array.

    momentums, velocities, ... --pack--> one input of the program, cut where a step reads
                                         one output, put together of what it wrote

A call of a compiled program costs more than a microsecond for each array that goes in and comes
out, however small. A network of many layers has two small slots of its optimizer for every bias,
and a Trainer has two numbers for every metric. So what is small, written by a step, and hardly
looked at by anybody else is packed. Who does look gets a copy of a part, and who assigns a value
changes a part: a packed variable is of a class of its own, whose `_value` does that.

How a variable is held is chosen when the first program that touches it is built (`_jax_held`), and
all later ones keep to it. Only laying a model out over devices takes a pack apart, for good.
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
from jax._src.lib import xla_client
from jax.sharding import SingleDeviceSharding

from trainstep._common.side_table import SideTable
from trainstep._engines.contract import Tensor, Variable
from trainstep._state.locks import moving

_LARGEST = 1024  # numbers: to copy more takes longer than an array of its own
_LEAST = 128  # numbers in a pack; see `Pack.joined`
_ROOM = 65536  # numbers in a pack: assigning to one variable copies all of them


_BITS = np.dtype(np.uint32)  # of a pack: whatever numbers they mean, they move about unchanged
_DTYPES = frozenset(map(np.dtype, (np.float32, np.int32, np.uint32, np.bool_)))


class Part(NamedTuple):
    """Where in a pack a variable is, and what its bits mean."""

    variable: weakref.ref[Any]
    where: slice
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def cut(self, array: Tensor) -> Tensor:
        """Its value, inside a program."""
        bits = lax.slice(array, (self.where.start,), (self.where.stop,))
        value = bits != 0 if self.dtype == np.bool_ else lax.bitcast_convert_type(bits, self.dtype)
        return lax.reshape(value, self.shape)

    def bits(self, value: Tensor) -> Tensor:
        """The part of an array for its value, inside a program."""
        if self.dtype == np.bool_:
            return lax.convert_element_type(value, _BITS)
        return lax.bitcast_convert_type(value, _BITS)

    def read(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy of its value, on the host."""
        bits = array[self.where]
        value = bits != 0 if self.dtype == np.bool_ else bits.view(self.dtype)
        return np.array(value).reshape(self.shape)

    def write(self, array: np.ndarray[Any, Any], value: Any) -> None:
        """Puts its value into an array on the host."""
        array[self.where] = _bits_of(np.asarray(value, self.dtype))


def _bits_of(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = value.ravel()
    return flat.astype(_BITS) if value.dtype == np.bool_ else flat.view(_BITS)


class Pack:
    """One array with the values of several variables.

    Programs take it for a variable: it keeps its array where they do.

    Attributes:
        parts: Those of the variables, by id.
        is_whole: False once it was taken apart.
        lock: Held while a program takes the array, gives it away and puts another in its place. It
            computes afterwards: so a function on the host that it calls may look at a variable.
            Packs that are made together share it, since a program takes most of them together.
    """

    def __init__(self, variables: Sequence[Variable], lock: Any) -> None:
        self._taken = [v._value for v in variables]  # what was read, until it is put together
        values = [np.asarray(x) for x in self._taken]
        (self._device,) = variables[0]._value.devices()
        self._sharding = SingleDeviceSharding(self._device)
        rest = np.zeros(max(0, _LEAST - sum(x.size for x in values)), _BITS)
        self._value = self._array(np.concatenate([*map(_bits_of, values), rest]))
        self.parts: dict[int, Part] = {}
        self.is_whole = True
        self.lock = lock
        start = 0
        for variable, x in zip(variables, values, strict=True):
            where = slice(start, start + x.size)
            self.parts[id(variable)] = Part(weakref.ref(variable), where, x.shape, x.dtype)
            start += x.size

    def read(self, variable: Variable) -> Tensor:
        """The value of a variable, as an array of its own."""
        with self.lock:
            return self._array(self.parts[id(variable)].read(np.asarray(self._value)))

    def write(self, new: Sequence[tuple[Variable, Any]]) -> None:
        """Gives some of the variables values."""
        with self.lock:
            numbers = np.array(self._value)
            for variable, value in new:
                self.parts[id(variable)].write(numbers, value)
            self._value = self._array(numbers)

    def members(self) -> list[Variable]:
        """The variables that it holds, of those that there still are."""
        found = (part.variable() for part in self.parts.values())
        return [v for v in found if v is not None and _held.get(v) is self]

    def put_together(self) -> None:
        """Makes this the place of the variables' values."""
        # In an order that may be broken off at any point.
        for part, taken in zip(self.parts.values(), self._taken, strict=True):
            variable = part.variable()
            assert variable is not None
            variable.__class__ = _Packed
            _held.set(variable, self)
            last = variable.__dict__.pop("_value")
            if last is not taken:  # another thread has assigned it meanwhile
                self.write([(variable, last)])
        self._taken.clear()

    def take_apart(self) -> None:
        """Gives every variable an array of its own; no program may be using them."""
        members = self.members()
        for variable in members:  # nobody looks there yet
            variable.__dict__["_value"] = self.read(variable)
        self.is_whole = False
        for variable in members:
            _held.set(variable, _ALONE)
            variable.__class__ = keras.Variable

    def joined(self, array: Tensor, new: dict[int, Tensor]) -> Tensor:
        """The array with new values of some of the variables, by id, inside a program."""
        values = (
            # The id of a variable that is gone may be another one's.
            part.bits(new[key])
            if key in new and part.variable() is not None
            else lax.slice(array, (part.where.start,), (part.where.stop,))
            for key, part in self.parts.items()
        )
        # As rows: XLA computes vectors again in the loop that joins them, and there rounds
        # otherwise, depending on what else is joined. What a step computes must not hang on that.
        rows = [lax.reshape(value, (1, value.size)) for value in values]
        rows.append(lax.full((1, array.size - sum(row.size for row in rows)), 0, array.dtype))
        return lax.reshape(lax.concatenate([row for row in rows if row.size], 1), array.shape)

    def merged(self, old: Tensor, array: Tensor, written: AbstractSet[int]) -> Tensor:
        """What a program made of its array, with what was assigned to variables meanwhile.

        Args:
            old: The array that the program took.
            array: The one that it gave.
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
        # What `jnp.asarray` comes down to, which takes ten times as long on the way.
        aval = jax.core.ShapedArray(numbers.shape, numbers.dtype)
        return xla_client.batched_device_put(aval, self._sharding, [numbers], [self._device], False)


_ALONE = object()
_held: SideTable[Any] = SideTable()  # by which pack a variable is held, or that it is by none
_choosing = threading.RLock()


def pack(variables: Iterable[Variable], kinds: Mapping[int, str]) -> None:
    """Chooses how variables are held, where that was not chosen yet.

    Args:
        variables: The variables.
        kinds: Of what kind those are that may be packed, by id; those of one kind go together.
    """
    lock = threading.RLock()
    with _choosing:
        new = {id(v): v for v in variables if _held.get(v) is None}
        for group in _groups([(v, kinds[key]) for key, v in new.items() if key in kinds]):
            Pack(group, lock).put_together()
        for variable in new.values():
            if _held.get(variable) is None:
                _held.set(variable, _ALONE)


def pack_of(variable: Variable) -> Pack | None:
    """The pack that holds a variable, if any."""
    pack = _held.get(variable)
    return pack if isinstance(pack, Pack) and pack.is_whole else None


class _Packed(keras.Variable):  # type: ignore[misc]
    """A variable whose value is part of a pack."""

    @property
    def _value(self) -> Any:
        pack = pack_of(self)
        return vars(self)["_value"] if pack is None else pack.read(self)

    @_value.setter
    def _value(self, value: Any) -> None:
        pack = pack_of(self)
        if pack is None:
            self.__dict__["_value"] = value
        elif value is not None:  # Keras's `fit` takes values away for a while, to save memory
            pack.write([(self, value)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain variable."""
        return _plain, ({**vars(self), "_value": self._value},)


def _plain(state: dict[str, Any]) -> Variable:
    variable = keras.Variable.__new__(keras.Variable)
    vars(variable).update(state)
    return variable


def assign(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Gives variables values, those of a pack at once."""
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
    """Takes variables out of their packs, for good; the programs that use those do not fit then."""
    packs = {id(pack): pack for v in variables if (pack := pack_of(v)) is not None}
    with moving(v for pack in packs.values() for v in pack.members()):
        for pack in packs.values():
            if pack.is_whole:  # no other thread has done so meanwhile
                pack.take_apart()


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
    """Small variables of one kind on one device that have room in a pack; one alone needs none."""
    groups: dict[Any, list[list[Variable]]] = {}
    room: dict[Any, int] = {}
    for variable, kind in filter(lambda pair: _is_small(pair[0]), variables):
        key = (kind, *variable._value.devices())
        size = math.prod(variable.shape)
        if room.get(key, 0) < size:
            groups.setdefault(key, []).append([])
            room[key] = _ROOM
        groups[key][-1].append(variable)
        room[key] -= size
    return (group for found in groups.values() for group in found if len(group) > 1)
