"""The user's line with a few around it, read when the report is shown."""

from __future__ import annotations

import linecache

from trainstep._doctor._html import Markup, joined, tag
from trainstep._doctor._records import Site
from trainstep._doctor._words import place

_AROUND = 2


def source(site: Site) -> Markup:
    """The line of a site, marked, among its neighbours; nothing if it is of no file."""
    if not site.file:
        return joined()
    numbered = _lines(site)
    if not numbered:
        return tag("p", tag("code", place(site)), " (the file cannot be read)")
    last = str(numbered[-1][0])
    lines = [_line(number, text, number == site.line, len(last)) for number, text in numbered]
    return tag(
        "figure",
        tag("figcaption", tag("code", place(site))),
        tag("pre", *lines, tabindex=0, aria_label=f"source at {place(site)}"),
        class_="source",
    )


def _line(number: int, text: str, marked: bool, width: int) -> Markup:
    gutter = tag("span", f"{'>' if marked else ' '} {number:>{width}}  ", class_="number")
    line = joined(gutter, text)
    return joined(tag("mark", line) if marked else line, "\n")


def _lines(site: Site) -> list[tuple[int, str]]:
    """Lines by number; the one that was noted alone if the file has changed since."""
    linecache.checkcache(site.file)
    lines = [line.rstrip("\r\n") for line in linecache.getlines(site.file)]
    noted = site.text.strip()
    there = lines[site.line - 1].strip() if 0 < site.line <= len(lines) else None
    if there is None or (noted and there != noted):
        return [(site.line, noted)] if noted else []
    first = max(site.line - _AROUND, 1)
    found = lines[first - 1 : site.line + _AROUND]
    indent = min((len(line) - len(line.lstrip()) for line in found if line.strip()), default=0)
    return [(first + i, line[indent:]) for i, line in enumerate(found)]
