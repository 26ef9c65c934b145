"""HTML in which everything is text unless it was made here.

`tag` escapes what it is given, and gives a `Markup`, which the next `tag` leaves as it is: nothing
of a report has to be escaped by hand, and nothing can be forgotten.
"""

from __future__ import annotations

import html
import re

_VOID = {"meta"}
Attribute = str | int | float | bool | None


class Markup(str):
    """HTML that is finished."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Text as HTML shows it; characters that steer something are spelled out."""
    if isinstance(text, Markup):
        return text
    shown = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return Markup(html.escape("".join(shown)))


def joined(*parts: str) -> Markup:
    """Several parts, one after the other."""
    return Markup("".join(escaped(part) for part in parts))


def coded(text: str) -> Markup:
    """Text in which what stands between backticks is code."""
    parts = re.split("`([^`]+)`", text)
    return joined(*(tag("code", part) if odd % 2 else part for odd, part in enumerate(parts)))


def tag(name: str, /, *inside: str, **attributes: Attribute) -> Markup:
    """An element: `tag("p", "a < b", class_="note")`.

    Args:
        name: Of the element.
        inside: Text, and elements.
        attributes: An underscore stands for a hyphen, and one at the end for nothing. True is an
            attribute without a value; None and False are none.
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
