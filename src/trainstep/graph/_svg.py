"""A graph as an SVG picture: a row for each depth, boxes, and lines from what is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from trainstep.graph._draw import Box

_HIGH, _GAP, _ROW, _EDGE = 44, 24, 92, 20
_LETTER = 7.3  # the width of a letter
_FILLS = {"placeholder": "#dbeafe", "fed": "#dbeafe", "variable": "#dcfce7", "gradients": "#fef3c7"}
_DOES, _PLAIN = "#fee2e2", "#f3f4f6"
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#111827}"
    ".kind{fill:#4b5563}path{fill:none;stroke:#6b7280}.after{stroke-dasharray:4 3}"
    "rect{stroke:#9ca3af}.fetched{stroke:#111827;stroke-width:2}"
)


class _Placed:
    def __init__(self, box: Box, row: int) -> None:
        self.box, self.row = box, row
        self.second = f"{box.kind if box.kind != box.name else ''} {box.told}".strip()
        self.takers: list[_Placed] = []
        self.wide = 16 + _LETTER * max(len(box.name), len(self.second))
        self.x = self.y = 0.0

    def wanted(self, centre: float) -> float:
        """Where it would best be, in its row."""
        middles = [each.middle for each in self.takers]
        return sum(middles) / len(middles) if middles else centre

    @property
    def middle(self) -> float:
        return self.x + self.wide / 2


def picture(boxes: Sequence[Box]) -> str:
    """The text of an SVG file.

    Args:
        boxes: What to show, each after those that it takes values of.
    """
    placed = _rows(boxes)
    rows: dict[int, list[_Placed]] = {}
    for each in placed.values():
        rows.setdefault(each.row, []).append(each)
    wide = max((_width(row) for row in rows.values()), default=0.0)
    for number in sorted(rows, reverse=True):  # each above those that take it
        row = sorted(rows[number], key=lambda each: each.wanted(wide / 2))
        x = _EDGE + (wide - _width(row)) / 2
        for each in row:
            each.x, each.y = x, _EDGE + number * _ROW
            x += each.wide + _GAP
    lines = [_line(placed[id(a)], each, "") for each in placed.values() for a in each.box.inputs]
    lines += [
        _line(placed[id(a)], each, "after") for each in placed.values() for a in each.box.after
    ]
    size = f"{wide + 2 * _EDGE:.0f}", f"{len(rows) * _ROW + _EDGE:.0f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
            f'viewBox="0 0 {size[0]} {size[1]}">',
            f"<style>{_STYLE}</style>",
            *lines,
            *(_drawn(each) for each in placed.values()),
            "</svg>",
            "",
        ]
    )


def _rows(boxes: Sequence[Box]) -> dict[int, _Placed]:
    """Boxes in rows, each as near as can be to those that take it."""
    placed: dict[int, _Placed] = {}
    for box in boxes:
        above = [placed[id(each)] for each in (*box.inputs, *box.after)]
        placed[id(box)] = _Placed(box, 1 + max((each.row for each in above), default=-1))
        for each in above:
            each.takers.append(placed[id(box)])
    for each in reversed(placed.values()):
        if each.takers:
            each.row = min(taker.row for taker in each.takers) - 1
    return placed


def _width(row: Sequence[_Placed]) -> float:
    return sum(each.wide for each in row) + _GAP * (len(row) - 1)


def _line(a: _Placed, b: _Placed, kind: str) -> str:
    top, bottom = a.y + _HIGH, b.y
    half = (top + bottom) / 2
    curve = f"{a.middle:.1f} {half} {b.middle:.1f} {half} {b.middle:.1f} {bottom}"
    way = f"M{a.middle:.1f} {top} C{curve}"
    return f'<path class="{kind}" d="{way}"/>'


def _drawn(each: _Placed) -> str:
    box = each.box
    does = box.told.startswith("sets ") or not box.told
    fill = _FILLS.get(box.kind, _DOES if does else _PLAIN)
    kind = ' class="fetched"' if box.is_fetched else ""
    at = f'x="{each.x:.1f}" y="{each.y}" width="{each.wide:.1f}" height="{_HIGH}"'
    return (
        f"<g><title>{escape(box.name)}</title>"
        f'<rect{kind} {at} rx="6" fill="{fill}"/>'
        f'<text x="{each.x + 8:.1f}" y="{each.y + 18}">{escape(box.name)}</text>'
        f'<text class="kind" x="{each.x + 8:.1f}" y="{each.y + 34}">{escape(each.second)}</text>'
        "</g>"
    )
