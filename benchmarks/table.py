"""Write the measured ratios as a Rich table and as a Markdown table."""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.measure import Row

HEADERS = (
    "network",
    "ours / hand-written, loss read each step",
    "ours / hand-written, loss read at the end",
    "Keras / ours, loss read each step",
    "Keras / ours, loss read at the end",
    "best hand-written",
    "our best mode",
    "other load",
)


def cells(row: Row) -> list[str]:
    """The texts of one row, under the headers."""
    return [
        row.network,
        f"{row.each.ours_to_native:.2f}",
        f"{row.end.ours_to_native:.2f}",
        f"{row.each.keras_to_ours:.2f}",
        f"{row.end.keras_to_ours:.2f}",
        both(row.each.native, row.end.native),
        both(row.each.mode, row.end.mode),
        f"{row.others:.0%}",
    ]


def both(each: str, end: str) -> str:
    """The winner of each way of reading the loss, once if it is the same."""
    return each if each == end else f"{each}; {end}"


def rich_table(title: str, rows: Sequence[Row]) -> Table:
    """The ratios of one engine, for the terminal."""
    table = Table(title=title)
    for i, header in enumerate(HEADERS):
        table.add_column(header, justify="right" if 1 <= i <= 4 else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown(title: str, rows: Sequence[Row]) -> str:
    """The ratios of one engine, as a section of Markdown."""
    rules = ["---:" if 1 <= i <= 4 else "---" for i in range(len(HEADERS))]
    lines = [HEADERS, rules, *(cells(row) for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {title}\n\n{text}\n"
