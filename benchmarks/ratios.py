"""The measured rows of `benchmarks.compare` as tables, one for each contender of ours."""

from collections.abc import Sequence

from benchmarks.measure import CONTENDERS, Row
from benchmarks.table import Table

# {} is the contender.
HEADERS = (
    "network",
    "{} / hand-written, loss read each step",
    "{} / hand-written, loss read at the end",
    "Keras / {}, loss read each step",
    "Keras / {}, loss read at the end",
    "best hand-written",
    "best mode of {}",
    "other load",
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns the tables of one engine."""
    return [
        Table(
            [header.format(contender) for header in HEADERS],
            [cells(row) for row in rows if row.contender == contender],
        )
        for contender in CONTENDERS
    ]


def cells(row: Row) -> list[str]:
    """Returns the texts of one row, in the order of the headers."""
    return [
        row.network,
        f"{row.each.to_native:.2f}",
        f"{row.end.to_native:.2f}",
        f"{row.each.keras_to:.2f}",
        f"{row.end.keras_to:.2f}",
        both(row.each.native, row.end.native),
        both(row.each.mode, row.end.mode),
        f"{row.others:.0%}",
    ]


def both(each: str, end: str) -> str:
    """Returns the winner of each way of reading the loss, once if they are the same."""
    return each if each == end else f"{each}; {end}"
