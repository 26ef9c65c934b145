"""Finds the lines of the source that assign to a captured value."""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Iterator

from trainstep._common import user_code

_MAX_LINES = 4  # in one report
_ENTRY = re.compile(r"\[(.+)\]\W*$")
_LAST = re.compile(r"(\w+)\W*$")
_IN_PLACE = {
    "append",
    "extend",
    "insert",
    "update",
    "pop",
    "fill",
    "add",
    "clear",
    "remove",
    "sort",
}


def assignment_lines(label: str, file: str) -> str:
    """The lines that assign to a value, as text.

    Args:
        label: The name of the value: `rate`, `Loss.margin`, `config['rate']`.
        file: The file that reads it. The script's main file is searched as well.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    found = [
        user_code.name(each, line)
        for each in dict.fromkeys(filter(None, (file, main)))
        for line in sorted(set(_lines(label, each)))
    ]
    more = f" and {len(found) - _MAX_LINES} more" if len(found) > _MAX_LINES else ""
    return ", ".join(found[:_MAX_LINES]) + more


def _lines(label: str, file: str) -> Iterator[int]:
    entry, last = _ENTRY.search(label), _LAST.search(label)
    for target in _assigned_in(file):
        if entry is not None:
            match = isinstance(target, ast.Subscript) and ast.unparse(target.slice) == entry[1]
        else:
            match = last is not None and _named(target) == last[1]
        if match:
            yield target.lineno


def _named(target: ast.expr) -> str:
    """The name or attribute that an assignment changes, wholly or in part."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else ""


@functools.lru_cache(maxsize=32)
def _assigned_in(file: str) -> tuple[ast.expr, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(_assigned_expressions(tree))


def _assigned_expressions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            yield node  # type: ignore[misc]  # a name, attribute or item
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _IN_PLACE
        ):
            yield node.func.value
