"""Binds the arguments of a call to the parameters of a function.

`bind` converts `args` and `kwargs` to one tuple of values in the order of the parameters, with
defaults, so that `f(x, y)` and `f(y=y, x=x)` are the same call. `call` is the inverse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MISSING = object()


class Parameters:
    """The parameters of one function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._signature = inspect.signature(fn)
        parameters = list(self._signature.parameters.values())
        self.names = tuple(p.name for p in parameters)
        self._kinds = tuple(p.kind for p in parameters)
        self._plain = all(kind in _POSITIONAL for kind in self._kinds)
        self._defaults = [
            _MISSING if p.default is inspect.Parameter.empty else p.default for p in parameters
        ]
        self._by_name = inspect.Parameter.POSITIONAL_ONLY not in self._kinds

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Returns one value per parameter; `*args` is a tuple and `**kwargs` a dict."""
        if self._plain:
            if not kwargs and len(args) == len(self.names):
                return args
            if self._by_name and (values := self._bind_plain(args, kwargs)) is not None:
                return values
        bound = self._signature.bind(*args, **kwargs)  # raises Python's own TypeError
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.names)

    def _bind_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The common case without `inspect`, which is ten times slower; None: use `inspect`."""
        values = list(args)
        used = 0
        for name, default in zip(self.names[len(args) :], self._defaults[len(args) :], strict=True):
            if name in kwargs:
                values.append(kwargs[name])
                used += 1
            elif default is _MISSING:
                return None
            else:
                values.append(default)
        return values if used == len(kwargs) and len(values) == len(self.names) else None

    def call(self, fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Calls `fn` with one value per parameter."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind, value in zip(self.names, self._kinds, values, strict=True):
            if kind in _POSITIONAL:
                args.append(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            else:
                kwargs[name] = value
        return fn(*args, **kwargs)
