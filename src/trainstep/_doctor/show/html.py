"""Builds HTML and escapes all text automatically.

`tag` escapes its arguments and returns a `Markup`, which an outer `tag` does not escape again. No
caller escapes by hand, so none can forget to.
"""

from __future__ import annotations

import html
import re

_VOID = {"meta"}
Attribute = str | int | float | bool | None


class Markup(str):
    """Finished HTML, which needs no escaping."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Text as HTML; control characters are written as escapes."""
    if isinstance(text, Markup):
        return text
    shown = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return Markup(html.escape("".join(shown)))


def joined(*parts: str) -> Markup:
    """Joins parts, escaping those that are not HTML yet."""
    return Markup("".join(escaped(part) for part in parts))


def coded(text: str) -> Markup:
    """Text with the parts between backticks marked as code."""
    parts = re.split("`([^`]+)`", text)
    return joined(*(tag("code", part) if odd % 2 else part for odd, part in enumerate(parts)))


def tag(name: str, /, *inside: str, **attributes: Attribute) -> Markup:
    """An element: `tag("p", "a < b", class_="note")`.

    Args:
        name: The name of the element.
        inside: Texts and elements.
        attributes: An underscore becomes a hyphen; a trailing one is dropped. True: an attribute
            without a value. None and False: no attribute.
    """
    start = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{joined(*inside)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{escaped(str(value))}"'
