"""Write texts as a Rich table and as a Markdown table. Imports no engine."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Headers, and lines of as many texts; where all of a column are numbers, they stand right.

    A dash is a number that there is not.
    """

    headers: Sequence[str]
    lines: Sequence[Sequence[str]]

    def numeric(self) -> list[bool]:
        """Whether a column has only numbers, for each."""
        columns = zip(*self.lines, strict=True)
        return [all(map(is_number, column)) for column in columns]

    def rich(self, title: str) -> RichTable:
        """For the terminal."""
        table = RichTable(title=title)
        for header, numeric in zip(self.headers, self.numeric(), strict=True):
            table.add_column(header, justify="right" if numeric else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """For a file."""
        rules = ["---:" if numeric else "---" for numeric in self.numeric()]
        lines = [self.headers, rules, *self.lines]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def is_number(text: str) -> bool:
    """Whether a text is a number, or stands in for one."""
    return text == "-" or text.lstrip("-")[:1].isdigit()


def console() -> Console:
    """Where tables are printed: as wide as the terminal, or as a table needs in a file."""
    return Console(width=None if sys.stdout.isatty() else 140)
