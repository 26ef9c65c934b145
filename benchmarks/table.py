"""Writes texts as a Rich table and as a Markdown table. Imports no engine."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Headers, and lines of as many texts; columns of numbers are aligned right.

    A dash stands for a missing number.
    """

    headers: Sequence[str]
    lines: Sequence[Sequence[str]]

    def numeric(self) -> list[bool]:
        """Returns, for each column, whether it has only numbers."""
        columns = zip(*self.lines, strict=True)
        return [all(map(is_number, column)) for column in columns]

    def rich(self, title: str) -> RichTable:
        """Returns the table for a terminal."""
        table = RichTable(title=title)
        for header, numeric in zip(self.headers, self.numeric(), strict=True):
            table.add_column(header, justify="right" if numeric else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """Returns the table for a file."""
        rules = ["---:" if numeric else "---" for numeric in self.numeric()]
        lines = [self.headers, rules, *self.lines]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def is_number(text: str) -> bool:
    """Whether a text is a number, or a dash for one."""
    return text == "-" or text.lstrip("-")[:1].isdigit()


def console() -> Console:
    """Returns the console for tables: as wide as the terminal, or in a file as the table."""
    return Console(width=None if sys.stdout.isatty() else 140)
