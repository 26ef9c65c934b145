"""`Logs`: the values of a batch, copied to the host only when they are read."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any, NamedTuple

import numpy as np
from keras import ops


class Logs(dict[str, Any]):
    """Loss and metrics by name, as `train_on_batch` and `test_on_batch` return them.

    The values stay on the device, and nothing waits for the step, until one is read. Reading a
    scalar returns a Python float, and reading any other value a NumPy array. `logs.tensors` are the
    values on the device.

    Example:
        >>> import numpy as np, trainstep as ts
        >>> logs = ts.Logs({"loss": np.float32(0.5), "accuracy": np.float32(1.0)})
        >>> logs["loss"], dict(logs)
        (0.5, {'loss': 0.5, 'accuracy': 1.0})
    """

    @property
    def tensors(self) -> dict[str, Any]:
        """The values, still on the device."""
        return {name: super(Logs, self).__getitem__(name) for name in self}

    def _read(self, value: Any) -> Any:
        return to_host(value)

    def __getitem__(self, name: str) -> Any:
        return self._read(super().__getitem__(name))

    # `dict(logs)` bypasses `__getitem__` unless the class defines its own `__iter__`.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return dict(self).items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return dict(self).values()

    def pop(self, name: str, *default: Any) -> Any:
        return self._read(super().pop(name, *default))

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        return name, self._read(value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self._read(super().setdefault(name, default))

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return dict(self) != other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(dict(self))

    # A pickle has the values on the host: another process may not have this device.
    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class StackedLogs(Logs):
    """The values of one of several steps that ran in one call and returned stacked tensors."""

    def __init__(self, tensors: dict[str, Any], step: int) -> None:
        super().__init__({name: _StackedValue(value, step) for name, value in tensors.items()})

    @property
    def tensors(self) -> dict[str, Any]:
        stacked = super().tensors.items()
        return {n: v.stacked[v.step] if isinstance(v, _StackedValue) else v for n, v in stacked}

    def _read(self, value: Any) -> Any:
        if not isinstance(value, _StackedValue):  # set by a callback
            return to_host(value)
        return to_host(ops.convert_to_numpy(value.stacked)[value.step])


class _StackedValue(NamedTuple):
    stacked: Any
    step: int


def to_host(value: Any) -> Any:
    """Converts a scalar tensor to a float and any other to NumPy; other objects pass unchanged."""
    if not hasattr(value, "shape"):
        return value
    try:
        array = np.asarray(value)  # on JAX, five times as fast as `float(value)`
    except (TypeError, ValueError, RuntimeError):
        array = ops.convert_to_numpy(value)
    return array if array.shape else float(array)
