"""Where the source assigns to a value: what has changed was changed there, or in code unseen."""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Iterator

from trainstep._common import user_code

_MOST = 4  # lines that are told
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


def assigned(label: str, file: str) -> str:
    """The lines that assign to something.

    Args:
        label: What it is called: `rate`, `Loss.margin`, `config['rate']`.
        file: The file in which it is read. That of the script is looked through as well.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    found = [
        user_code.name(each, line)
        for each in dict.fromkeys(filter(None, (file, main)))
        for line in sorted(set(_lines(label, each)))
    ]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def _lines(label: str, file: str) -> Iterator[int]:
    entry, last = _ENTRY.search(label), _LAST.search(label)
    for target in _targets(file):
        if entry is not None:
            match = isinstance(target, ast.Subscript) and ast.unparse(target.slice) == entry[1]
        else:
            match = last is not None and _named(target) == last[1]
        if match:
            yield target.lineno


def _named(target: ast.expr) -> str:
    """The name or the attribute that is assigned to, as a whole or in a part."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else ""


@functools.lru_cache(maxsize=32)
def _targets(file: str) -> tuple[ast.expr, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(_of(tree))


def _of(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            yield node  # type: ignore[misc]  # a name, an attribute or an entry
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _IN_PLACE
        ):
            yield node.func.value
