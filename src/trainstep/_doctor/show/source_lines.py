"""The user's lines with some context, read when the report is displayed."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence

from trainstep._doctor.records import Site
from trainstep._doctor.show.html import Markup, joined, tag
from trainstep._doctor.show.words import place

_AROUND = 2


def sources(sites: Sequence[Site]) -> Markup:
    """A listing per file with the lines of the sites marked."""
    files: dict[str, dict[int, str]] = {}
    for site in sites:
        if site.file:
            files.setdefault(site.file, {})[site.line] = site.text.strip()
    return joined(*(_listing(file, noted) for file, noted in files.items()))


def _listing(file: str, noted: dict[int, str]) -> Markup:
    first, *others = sorted(noted)
    name = ", ".join((place(Site(file, first)), *map(str, others)))
    lines = _lines(file, noted)
    if not lines:
        return tag("p", tag("code", name), " (the file is not readable)")
    return tag(
        "figure",
        tag("figcaption", tag("code", name)),
        tag("pre", *_numbered(lines, set(noted)), tabindex=0, aria_label=f"source at {name}"),
        class_="source",
    )


def _numbered(lines: dict[int, str], marked: set[int]) -> Iterator[Markup]:
    width = len(str(max(lines)))
    before = min(lines) - 1
    for number, line in lines.items():
        if number != before + 1:
            yield joined("  ...\n")
        gutter = f"{'>' if number in marked else ' '} {number:>{width}}  "
        content = joined(tag("span", gutter, class_="number"), line)
        yield joined(tag("mark", content) if number in marked else content, "\n")
        before = number


def _lines(file: str, noted: dict[int, str]) -> dict[int, str]:
    """Lines by number; only the recorded ones if the file has changed since."""
    linecache.checkcache(file)
    there = dict(enumerate((line.rstrip() for line in linecache.getlines(file)), 1))
    known = {number: there.get(number, "").strip() for number in noted}
    if any(text != known[number] for number, text in noted.items() if text) or "" in known.values():
        return {number: noted[number] for number in sorted(noted) if noted[number]}
    near = {line + away for line in noted for away in range(-_AROUND, _AROUND + 1)}
    shown = {number: there[number] for number in sorted(near) if number in there}
    indent = min((len(line) - len(line.lstrip()) for line in shown.values() if line), default=0)
    return {number: line[indent:] for number, line in shown.items()}
