"""The values of a batch, which reach the host only when somebody looks."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any, NamedTuple

import numpy as np
from keras import ops


class Logs(dict[str, Any]):
    """Loss and metrics by name: what `train_on_batch` and `test_on_batch` return.

    A dict whose values stay on the device until one is read; then it is a Python float, or a NumPy
    array if it is no scalar. Nothing waits for the step before that. `logs.tensors` are the
    values as they are.

    Example:
        >>> import numpy as np, trainstep as ts
        >>> logs = ts.Logs({"loss": np.float32(0.5), "accuracy": np.float32(1.0)})
        >>> logs["loss"], dict(logs)
        (0.5, {'loss': 0.5, 'accuracy': 1.0})
    """

    @property
    def tensors(self) -> dict[str, Any]:
        """The values on the device."""
        return {name: super(Logs, self).__getitem__(name) for name in self}

    def _read(self, value: Any) -> Any:
        return on_host(value)

    def __getitem__(self, name: str) -> Any:
        return self._read(super().__getitem__(name))

    # With an `__iter__` of its own, Python copies a dict through `__getitem__`.
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

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class LogsAt(Logs):
    """The values of one step of several that ran in one call, whose tensors are stacked."""

    def __init__(self, tensors: dict[str, Any], index: int) -> None:
        super().__init__({name: _At(value, index) for name, value in tensors.items()})

    @property
    def tensors(self) -> dict[str, Any]:
        stacked = super().tensors.items()
        return {n: v.stacked[v.place] if isinstance(v, _At) else v for n, v in stacked}

    def _read(self, value: Any) -> Any:
        if not isinstance(value, _At):  # put there by a callback
            return on_host(value)
        return on_host(ops.convert_to_numpy(value.stacked)[value.place])


class _At(NamedTuple):
    stacked: Any
    place: int


def on_host(value: Any) -> Any:
    """A float, or a NumPy array, of a tensor; anything else as it is."""
    if not hasattr(value, "shape"):
        return value
    try:
        array = np.asarray(value)  # a fifth of what `float` of an array of JAX's takes
    except (TypeError, ValueError, RuntimeError):
        array = ops.convert_to_numpy(value)
    return array if array.shape else float(array)
