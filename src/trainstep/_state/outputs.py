"""The structure that a step returns: tensors taken out while tracing, put back at every call.

A variable comes back as its value. Numbers, strings and other objects that are no tensors are
constants of the program. An object that came in as an argument is held weakly, so that returning a
model does not keep it alive.
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


class Judged:
    """A result that is handed out by a judge, who looks at some tensors first and may raise."""

    __slots__ = ("judge", "tensors", "value")

    def __init__(self, value: Any, judge: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.value, self.judge, self.tensors = value, judge, tensors


class Build:
    """Puts the tensors of a call where those of the trace were.

    Attributes:
        source: The expression that does it, of a sequence `outs`.
        is_judged: Whether somebody looks at them at every call.
    """

    def __init__(self, source: Source, *, is_judged: bool) -> None:
        self.source, self.is_judged = source, is_judged

    @cached_property
    def of(self) -> Callable[[Sequence[Any]], Any]:
        """The function that does it."""
        return define("build(outs)", f"return {self.source.text}", self.source.names)


def take_out(
    value: Any, is_tensor: Callable[[Any], bool], arguments: Sequence[Any]
) -> tuple[list[Any], Build]:
    """The tensors of a step's result, and what puts others in their place."""
    writer = _Writer(is_tensor, arguments)
    text = writer.expression(value)
    return writer.tensors, Build(Source(text, writer.names), is_judged=writer.is_judged)


class _Writer:
    """Writes the expression of a structure, and collects its tensors and constants."""

    def __init__(self, is_tensor: Callable[[Any], bool], arguments: Sequence[Any]) -> None:
        self.tensors: list[Any] = []
        self.names: dict[str, Any] = {"like": like}
        self.is_judged = False
        self._is_tensor = is_tensor
        self._arguments = arguments

    def expression(self, value: Any) -> str:
        """The expression that makes a value like this one of the tensors in `outs`."""
        if isinstance(value, keras.Variable):
            value = value.value
        if self._is_tensor(value):
            self.tensors.append(value)
            return f"outs[{len(self.tensors) - 1}]"
        if isinstance(value, Judged):
            self.is_judged = True
            texts = [self.expression(each) for each in (value.value, *value.tensors)]
            return f"{self._name(value.judge)}({', '.join(texts)})"
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
