"""A graph as an SVG picture: a row of boxes for each depth, and arrows from inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from trainstep.graph._draw import Box

_HEIGHT, _GAP, _ROW, _EDGE = 44, 24, 92, 20
_LETTER = 7.3  # the width of a letter, in pixels
_FILLS = {"placeholder": "#dbeafe", "fed": "#dbeafe", "variable": "#dcfce7", "gradients": "#fef3c7"}
_DOES, _PLAIN = "#fee2e2", "#f3f4f6"
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#111827}"
    ".kind{fill:#4b5563}path{fill:none;stroke:#6b7280}.after{stroke-dasharray:4 3}"
    "rect{stroke:#9ca3af}.fetched{stroke:#111827;stroke-width:2}"
)


class _PlacedBox:
    def __init__(self, box: Box, row: int) -> None:
        self.box, self.row = box, row
        self.second = f"{box.kind if box.kind != box.name else ''} {box.detail}".strip()
        self.consumers: list[_PlacedBox] = []
        self.width = 16 + _LETTER * max(len(box.name), len(self.second))
        self.x = self.y = 0.0

    def wanted(self, centre: float) -> float:
        """Its preferred horizontal position: above the middle of its consumers."""
        middles = [each.middle for each in self.consumers]
        return sum(middles) / len(middles) if middles else centre

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def picture(boxes: Sequence[Box]) -> str:
    """Returns the text of an SVG file.

    Args:
        boxes: The boxes, in topological order.
    """
    placed = _rows(boxes)
    rows: dict[int, list[_PlacedBox]] = {}
    for each in placed.values():
        rows.setdefault(each.row, []).append(each)
    width = max((_row_width(row) for row in rows.values()), default=0.0)
    for number in sorted(
        rows, reverse=True
    ):  # the last row first: a box is placed above its consumers
        row = sorted(rows[number], key=lambda each: each.wanted(width / 2))
        x = _EDGE + (width - _row_width(row)) / 2
        for each in row:
            each.x, each.y = x, _EDGE + number * _ROW
            x += each.width + _GAP
    lines = [
        _arrow_svg(placed[id(a)], each, "") for each in placed.values() for a in each.box.inputs
    ]
    lines += [
        _arrow_svg(placed[id(a)], each, "after") for each in placed.values() for a in each.box.after
    ]
    size = f"{width + 2 * _EDGE:.0f}", f"{len(rows) * _ROW + _EDGE:.0f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
            f'viewBox="0 0 {size[0]} {size[1]}">',
            f"<style>{_STYLE}</style>",
            *lines,
            *(_box_svg(each) for each in placed.values()),
            "</svg>",
            "",
        ]
    )


def _rows(boxes: Sequence[Box]) -> dict[int, _PlacedBox]:
    """Assigns boxes to rows, each as close as possible to its consumers."""
    placed: dict[int, _PlacedBox] = {}
    for box in boxes:
        above = [placed[id(each)] for each in (*box.inputs, *box.after)]
        placed[id(box)] = _PlacedBox(box, 1 + max((each.row for each in above), default=-1))
        for each in above:
            each.consumers.append(placed[id(box)])
    for each in reversed(placed.values()):
        if each.consumers:
            each.row = min(consumer.row for consumer in each.consumers) - 1
    return placed


def _row_width(row: Sequence[_PlacedBox]) -> float:
    return sum(each.width for each in row) + _GAP * (len(row) - 1)


def _arrow_svg(a: _PlacedBox, b: _PlacedBox, kind: str) -> str:
    top, bottom = a.y + _HEIGHT, b.y
    half = (top + bottom) / 2
    curve = f"{a.middle:.1f} {half} {b.middle:.1f} {half} {b.middle:.1f} {bottom}"
    way = f"M{a.middle:.1f} {top} C{curve}"
    return f'<path class="{kind}" d="{way}"/>'


def _box_svg(each: _PlacedBox) -> str:
    box = each.box
    does = box.detail.startswith("sets ") or not box.detail
    fill = _FILLS.get(box.kind, _DOES if does else _PLAIN)
    kind = ' class="fetched"' if box.is_fetched else ""
    at = f'x="{each.x:.1f}" y="{each.y}" width="{each.width:.1f}" height="{_HEIGHT}"'
    return (
        f"<g><title>{escape(box.name)}</title>"
        f'<rect{kind} {at} rx="6" fill="{fill}"/>'
        f'<text x="{each.x + 8:.1f}" y="{each.y + 18}">{escape(box.name)}</text>'
        f'<text class="kind" x="{each.x + 8:.1f}" y="{each.y + 34}">{escape(each.second)}</text>'
        "</g>"
    )
