"""Lines of a terminal: wrapped, indented, and coloured if that is wished.

A line is plain text with a style for its first characters, so that nothing in it can be taken for
markup, and colour changes no character.
"""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass

_NARROWEST = 20  # for text, however deep it is indented


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    style: str
    upto: int  # how many characters have the style


class Paper:
    """What is written on, from top to bottom.

    Args:
        width: No line is longer, but for a single word that is.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._lines: list[_Line] = []

    def write(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """A paragraph."""
        for line in self._wrapped(text, " " * indent, " " * indent):
            self._lines.append(_Line(line, style, len(line)))

    def label(self, label: str, text: str, *, indent: int, hang: int, style: str = "bold") -> None:
        """A paragraph to the right of its label, which alone has the style; none without text."""
        if not text:
            return
        start = " " * indent + label.ljust(hang)
        styles = [style]
        for line in self._wrapped(text, start, " " * (indent + hang)):
            self._lines.append(_Line(line, styles.pop() if styles else "", indent + len(label)))

    def one(self, text: str, *, indent: int = 0) -> None:
        """A single line, cut where it is too long."""
        room = max(self._width - indent, _NARROWEST)
        text = text if len(text) <= room else text[: room - 3].rstrip() + "..."
        self._lines.append(_Line(" " * indent + text, "", 0))

    def gap(self) -> None:
        """An empty line, unless there is one already."""
        if self._lines and self._lines[-1].text:
            self._lines.append(_Line("", "", 0))

    def heading(self, text: str) -> None:
        """A heading, set off from what is above."""
        self.gap()
        self.write(text, style="bold")

    def plain(self) -> str:
        """The text."""
        return "\n".join(line.text for line in self._lines) + "\n"

    def colored(self) -> str:
        """The text, with the terminal's codes for styles."""
        from rich.console import Console
        from rich.text import Text

        out = io.StringIO()
        console = Console(
            file=out,
            force_terminal=True,
            color_system="standard",
            no_color=False,
            legacy_windows=False,
        )
        for line in self._lines:
            text = Text(line.text)
            if line.style:
                text.stylize(line.style, 0, line.upto)
            console.print(text, soft_wrap=True, highlight=False)
        return out.getvalue()

    def _wrapped(self, text: str, first: str, rest: str) -> list[str]:
        width = max(self._width, len(rest) + _NARROWEST)
        return textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,  # a path in two lines cannot be clicked
            break_on_hyphens=False,
        )
