"""Paths in PyTorch's guards: their values in a call, and their names in the user's code.

s._modules['l']._parameters['bias']  -->  s.l.bias
G['cfg'].step                        -->  global cfg.step
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Mapping
from typing import Any, cast

from trainstep._explain.signature import array_text

UNKNOWN = object()
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])(.*?)\1\]")
_ITEM = re.compile(r"(?:list|dict|tuple)\.__getitem__\(([^()]+), ([^()]+)\)")
_GLOBAL = re.compile(r"G\[['\"](.*?)['\"]\]")
_FROM_TENSOR = re.compile(
    r"___stack\d+|___[a-z_]+\d*"
)  # values that the part before a graph break computed
_WIDE = 60


class Scope:
    """The values visible in a frame. Lives only during its compilation.

    Args:
        code: The code of the frame.
        arguments: The argument names of the user's whole function, also for a part of it.
        local: Its local variables.
        module_globals: Its globals.
        names: The user's terms for some of the names.
    """

    def __init__(
        self,
        code: types.CodeType,
        arguments: frozenset[str],
        local: Mapping[str, Any],
        module_globals: dict[str, Any],
        names: Mapping[str, str],
    ) -> None:
        self.code, self.arguments, self.names = code, arguments, names
        self._local, self.module_globals = local, module_globals

    def value(self, path: str) -> Any:
        """The value at a path; `UNKNOWN` if finding it would run user code."""
        path = _ITEM.sub(r"\1[\2]", path)
        try:
            return self._follow(ast.parse(path.strip(), mode="eval").body)
        except (SyntaxError, KeyError, IndexError, TypeError, ValueError):
            return UNKNOWN

    def _follow(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id="G"):
                return self.module_globals
            case ast.Name(id=name):
                return self._local[name]
            case ast.Attribute(value=owner, attr=name):
                held = self._follow(owner)
                return held.__dict__ if name == "__dict__" else _attribute(held, name)
            case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
                held, index = self._follow(owner), cast(Any, key)
                if isinstance(held, (dict, list, tuple)):
                    return held[index]
        raise KeyError(ast.dump(node))

    def kind(self, path: str) -> str:
        """The kind of cause for a value at a path."""
        root = re.split(r"[.\[]", path.strip().lstrip("("))[0]
        if _FROM_TENSOR.match(root):
            return "item"
        if root == "G" or root in self.code.co_freevars:
            return "capture"
        value = self.value(path)
        by_value = "number" if type(value) in (int, float, complex) else "static"
        if root in self.arguments:
            return "capture" if "." in path else by_value
        return "item" if by_value == "number" and "." not in path else "capture"

    def is_module(self, path: str) -> bool:
        """Whether a path is an attribute of a module; PyTorch never makes those dynamic."""
        owner, _, name = path.rpartition(".")
        return bool(name) and hasattr(self.value(owner), "_parameters")


def _attribute(held: Any, name: str) -> Any:
    """An attribute, without running a property."""
    own = getattr(held, "__dict__", {})
    if name in own:
        return own[name]
    for group in ("_modules", "_parameters", "_buffers"):
        if name in own.get(group, ()):
            return own[group][name]
    for each in type(held).__mro__:
        if name in each.__dict__:
            found = each.__dict__[name]
            if hasattr(type(found), "__get__"):
                raise KeyError(name)
            return found
    raise KeyError(name)


def in_user_terms(path: str, scope: Scope) -> str:
    """A path, written as in the user's code."""
    path = _ITEM.sub(r"\1[\2]", path.strip())
    path = _MEMBER.sub(lambda m: f"[{m[2]}]" if m[2].isdigit() else f".{m[2]}", path)
    path = _GLOBAL.sub(r"global \1", path)
    path = _FROM_TENSOR.sub("a number from a tensor", path)
    root = re.match(r"\w+(?:\[\d+\])?", path)
    if root is not None and root[0] in scope.names:
        return scope.names[root[0]] + path[root.end() :]
    if root is not None and (short := re.match(r"\w+", path)) and short[0] in scope.names:
        return scope.names[short[0]] + path[short.end() :]
    return path


def display(value: Any) -> str:
    """A short text for a value."""
    if value is UNKNOWN:
        return "a different value"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return array_text(tuple(shape), str(dtype).removeprefix("torch."))
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        text = repr(value)
        return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."
    return type(value).__name__
