"""The structure that a step returns: tensors taken out while tracing, put back at every call.

A variable comes back as its value. Numbers, strings and other objects that are no tensors are
constants of the program. An object
that came in as an argument is held weakly, so that returning a model does not keep it alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras

from trainstep._arguments import like, ordered, structure
from trainstep._errors import ArgumentError

Build = Callable[[Sequence[Any]], Any]


def take_out(
    value: Any, is_tensor: Callable[[Any], bool], arguments: Sequence[Any]
) -> tuple[list[Any], Build]:
    """The tensors of a step's result, and the function that puts others in their place."""
    tensors: list[Any] = []
    build = _builder(value, is_tensor, arguments, tensors)
    return tensors, build


def _builder(
    value: Any, is_tensor: Callable[[Any], bool], arguments: Sequence[Any], tensors: list[Any]
) -> Build:
    if isinstance(value, keras.Variable):
        value = value.value
    if is_tensor(value):
        index = len(tensors)
        tensors.append(value)
        return lambda outs: outs[index]
    children = structure(value)
    if children is None:
        return _constant(value, is_tensor, arguments)
    if type(value) is tuple and children and all(is_tensor(child) for _, child in children):
        start = len(tensors)
        tensors.extend(value)
        stop = len(tensors)
        return lambda outs: tuple(outs[start:stop])
    builders = [_builder(child, is_tensor, arguments, tensors) for _, child in children]
    if type(value) is dict:
        by_name = dict(zip(ordered(value), builders, strict=True))
        pairs = [(name, by_name[name]) for name in value]
        return lambda outs: {name: build(outs) for name, build in pairs}
    empty = like(value, [None] * len(children))
    return lambda outs: like(empty, [build(outs) for build in builders])


def _constant(value: Any, is_tensor: Callable[[Any], bool], arguments: Sequence[Any]) -> Build:
    if any(value is argument for argument in arguments):
        try:
            ref = weakref.ref(value)
        except TypeError:
            return lambda outs: value
        return lambda outs: ref()
    inside = (
        value
        if isinstance(value, (set, frozenset, deque))
        else vars(value).values()
        if hasattr(value, "__dict__")
        else ()
    )
    if any(map(is_tensor, inside)):
        raise ArgumentError(
            "function",
            "return value",
            "tensors in tuples, lists, dicts, named tuples or dataclasses",
            f"a {type(value).__name__} with tensors inside",
            "return the tensors in one of those",
        )
    return lambda outs: value
