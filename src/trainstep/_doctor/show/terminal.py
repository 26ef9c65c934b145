"""Text for a terminal: wrapped, indented, optionally coloured.

A line is plain text plus a style for its first characters, so text is never parsed as markup and
colour changes no character.
"""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass

_NARROWEST = 20  # width left for text, at any indent


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    style: str
    upto: int  # the number of styled characters


class TerminalText:
    """Collects lines from top to bottom.

    Args:
        width: The maximum line length; only a single longer word exceeds it.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._lines: list[_Line] = []

    def write(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """Adds a paragraph."""
        for line in self._wrapped(text, " " * indent, " " * indent):
            self._lines.append(_Line(line, style, len(line)))

    def label(self, label: str, text: str, *, indent: int, hang: int, style: str = "bold") -> None:
        """Adds a paragraph beside a styled label; nothing if the text is empty."""
        if not text:
            return
        start = " " * indent + label.ljust(hang)
        styles = [style]
        for line in self._wrapped(text, start, " " * (indent + hang)):
            self._lines.append(_Line(line, styles.pop() if styles else "", indent + len(label)))

    def single_line(self, text: str, *, indent: int = 0) -> None:
        """Adds one line, cut to the width."""
        room = max(self._width - indent, _NARROWEST)
        text = text if len(text) <= room else text[: room - 3].rstrip() + "..."
        self._lines.append(_Line(" " * indent + text, "", 0))

    def blank_line(self) -> None:
        """Adds an empty line, unless the last one is empty."""
        if self._lines and self._lines[-1].text:
            self._lines.append(_Line("", "", 0))

    def heading(self, text: str) -> None:
        """Adds a heading after an empty line."""
        self.blank_line()
        self.write(text, style="bold")

    def plain(self) -> str:
        """The text."""
        return "\n".join(line.text for line in self._lines) + "\n"

    def colored(self) -> str:
        """The text with ANSI codes for the styles."""
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
            break_long_words=False,  # a path on two lines is not clickable
            break_on_hyphens=False,
        )
