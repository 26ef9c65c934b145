"""The lines of a source that assign to what has gone stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainstep._doctor.hooks.assignments import assignment_lines

pytestmark = pytest.mark.plain

SOURCE = """\
rate = 0.5
config = {"rate": 1}
table = [1, 2]


class Loss:
    def __init__(self):
        self.margin: float = rate


def later(loss):
    global rate
    rate += 1
    loss.margin, other = 2.0, rate
    config["rate"] = 2
    table.append(3)
    table[0] = 4
    for rate in range(3):
        print(rate == 2, config["name"])
"""


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("global `rate`", [1, 13, 18]),
        ("`self.margin`", [8, 14]),
        ("global `config['rate']`", [15]),
        ("global `table`", [3, 16, 17]),
        ("closure variable `absent`", []),
    ],
)
def test_lines_that_assign(label: str, lines: list[int], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)

    told = assignment_lines(label, str(file))

    assert [int(each.rpartition(":")[2]) for each in told.split(", ") if each] == lines


def test_no_more_than_a_few_are_told(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("rate = 1\n" * 9)

    assert assignment_lines("global `rate`", str(file)).endswith("train.py:4 and 5 more")


def test_a_file_that_is_no_python_has_none(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("rate =\n")

    assert assignment_lines("global `rate`", str(file)) == ""
