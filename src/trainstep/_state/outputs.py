"""The output structure of a step: split into tensors during tracing, rebuilt at every call.

A variable is returned as its value. Numbers, strings and other objects that are no tensors are
constants of the program. An object that was passed as an argument is referred to weakly, so that
returning a model does not keep it alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import keras

from trainstep._common.codegen import Source, define
from trainstep._common.errors import ArgumentError
from trainstep._common.structure import like, ordered, structure


class CheckedOutput:
    """An output that `check(value, *tensors)` returns at every call, unless it raises."""

    __slots__ = ("check", "tensors", "value")

    def __init__(self, value: Any, check: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.value, self.check, self.tensors = value, check, tensors


class Build:
    """Builds the output structure from the tensors of a call.

    Attributes:
        source: The expression of the structure, given a sequence `outs`.
        is_checked: Whether the structure contains a `CheckedOutput`.
    """

    def __init__(self, source: Source, *, is_checked: bool) -> None:
        self.source, self.is_checked = source, is_checked

    @cached_property
    def of(self) -> Callable[[Sequence[Any]], Any]:
        """The function that builds the structure from `outs`."""
        return define("build(outs)", f"return {self.source.text}", self.source.names)


def take_out(
    value: Any, is_tensor: Callable[[Any], bool], arguments: Sequence[Any]
) -> tuple[list[Any], Build]:
    """Splits a step's result into its tensors and a `Build` that inserts others."""
    writer = _Writer(is_tensor, arguments)
    text = writer.expression(value)
    return writer.tensors, Build(Source(text, writer.names), is_checked=writer.is_checked)


class _Writer:
    """Generates the expression of a structure, and collects its tensors and constants."""

    def __init__(self, is_tensor: Callable[[Any], bool], arguments: Sequence[Any]) -> None:
        self.tensors: list[Any] = []
        self.names: dict[str, Any] = {"like": like}
        self.is_checked = False
        self._is_tensor = is_tensor
        self._arguments = arguments

    def expression(self, value: Any) -> str:
        """The expression that builds such a value from the tensors in `outs`."""
        if isinstance(value, keras.Variable):
            value = value.value
        if self._is_tensor(value):
            self.tensors.append(value)
            return f"outs[{len(self.tensors) - 1}]"
        if isinstance(value, CheckedOutput):
            self.is_checked = True
            texts = [self.expression(each) for each in (value.value, *value.tensors)]
            return f"{self._name(value.check)}({', '.join(texts)})"
        children = structure(value)
        if children is None:
            return self._constant(value)
        texts = [self.expression(child) for _, child in children]
        if type(value) is tuple:
            return f"({''.join(f'{text}, ' for text in texts)})"
        if type(value) is list:
            return f"[{', '.join(texts)}]"
        if type(value) is dict:
            by_name = dict(zip(ordered(value), texts, strict=True))
            return f"{{{', '.join(f'{self._name(n)}: {by_name[n]}' for n in value)}}}"
        empty = self._name(like(value, [None] * len(children)))
        return f"like({empty}, [{', '.join(texts)}])"

    def _name(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _constant(self, value: Any) -> str:
        if any(value is argument for argument in self._arguments):
            try:
                return f"{self._name(weakref.ref(value))}()"
            except TypeError:
                return self._name(value)
        inside = (
            value
            if isinstance(value, (set, frozenset, deque))
            else vars(value).values()
            if hasattr(value, "__dict__")
            else ()
        )
        if any(map(self._is_tensor, inside)):
            raise ArgumentError(
                "function",
                "return value",
                "tensors in tuples, lists, dicts, named tuples or dataclasses",
                f"a {type(value).__name__} with tensors inside",
                "return the tensors in one of those",
            )
        return self._name(value)
