"""The values of a batch, which reach the host only when somebody looks."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any

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

    def __getitem__(self, name: str) -> Any:
        return on_host(super().__getitem__(name))

    # With an `__iter__` of its own, Python copies a dict through `__getitem__`.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return on_host(super().get(name, default))

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return dict(self).items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return dict(self).values()

    def pop(self, name: str, *default: Any) -> Any:
        return on_host(super().pop(name, *default))

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class LogsAt(Logs):
    """The values of one step of several that ran in one call, whose tensors are stacked."""

    def __init__(self, tensors: dict[str, Any], index: int) -> None:
        super().__init__(tensors)
        self._index = index

    @property
    def tensors(self) -> dict[str, Any]:
        return {name: value[self._index] for name, value in super().tensors.items()}

    def __getitem__(self, name: str) -> Any:
        stacked = ops.convert_to_numpy(dict.__getitem__(self, name))
        return on_host(stacked[self._index])


def on_host(value: Any) -> Any:
    """A float, or a NumPy array, of a tensor."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return ops.convert_to_numpy(value) if hasattr(value, "shape") else value
