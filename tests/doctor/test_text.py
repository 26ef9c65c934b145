"""A report in a terminal: what stands where, what is folded, and that nothing is taken for markup."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainstep._doctor.records import Site
from trainstep._doctor.report import Report
from trainstep._doctor.show import words
from trainstep._doctor.show.text import text
from trainstep._explain.causes import FINDINGS

from . import sample_reports as samples

pytestmark = pytest.mark.plain
Sample = Callable[[], Report]
every = pytest.mark.parametrize("sample", samples.ALL, ids=lambda sample: sample.__name__)


def in_order(shown: str, *parts: str) -> None:
    """Each part is there, after the one before it."""
    at = 0
    for part in parts:
        found = shown.find(part, at)
        assert found >= 0, f"{part!r} is not where it should be in:\n{shown}"
        at = found + len(part)


def part_of(shown: str, heading: str) -> str:
    """What stands under a heading."""
    (found,) = [part for part in shown.split("\n\n") if part.startswith(heading)]
    return found


def test_a_clean_run_says_first_that_there_is_nothing_to_report() -> None:
    shown = text(samples.clean(), width=200)

    assert shown.splitlines()[0] == (
        "Nothing to report: 2 functions were traced once, as needed; "
        "1 function was traced once per mode."
    )
    assert "avoidable" not in shown
    assert "costliest" not in shown


def test_a_script_that_traced_nothing_says_so() -> None:
    assert text(samples.empty()).startswith("Nothing to report: no function was traced.\n")


def test_a_clean_run_in_which_something_was_traced_again_does_not_call_that_needed() -> None:
    report = samples.by_shape()
    report.findings.clear()

    first = text(report, width=200).splitlines()[0]

    assert first == "Nothing to report: 2 functions were traced again, 6.48 s."


def test_the_headline_has_counts_seconds_share_and_what_was_avoidable() -> None:
    lines = text(samples.by_shape()).splitlines()

    assert lines[:3] == [
        "6 traces of 2 functions, plus 36 small programs: 13.3 s, 22% of the run (60.0 s).",
        "Avoidable: 4 of them, 6.48 s.",
        "2 findings.",
    ]


def test_compilations_without_a_trace_are_told_apart() -> None:
    report = samples.report(
        samples.function(samples.event(1, 1), samples.retrace(2, 3, 9, what="compile"), calls=5),
        findings=[samples.finding("compilations", "compiled for 2 shapes")],
    )

    shown = text(report)

    assert shown.startswith("1 trace and 1 compilation of 1 function: 3.24 s")
    assert "traced once and compiled once without a trace in 5 calls" in shown
    assert "compiled without a trace: x: float32[32,4] -> float32[9,4] (since #1)" in shown


def test_what_runs_uncompiled_is_the_very_first_line_though_not_the_first_finding() -> None:
    report = samples.limit()
    assert report.findings[0].kind != "recompile-limit"

    first, second, *_ = text(report).splitlines()

    assert first == (
        "NO LONGER COMPILED: `train_step` at train.py:41: recompiled 8 times, which is the limit"
    )
    assert second.startswith("8 traces of 1 function")


def test_the_parts_are_in_the_order_of_their_weight() -> None:
    in_order(
        text(samples.by_shape()),
        "6 traces of 2 functions",
        "The costliest",
        "1.  `train_step` (tensorflow, train.py:12): 4.86 s avoidable of 6.48 s, traced 4 times",
        "2.  `test_function` (tensorflow, made by Keras): 1.62 s avoidable",
        "\n`train_step`",
        "\n`test_function`",
        "Small programs",
        "What doctor could not see",
        "- calls of `train_step` inside other functions are not counted",
        "To paste into an issue",
    )


def test_the_costliest_are_three_and_the_avoidable_weigh_more_than_the_costly() -> None:
    report = samples.many()
    dear = samples.event(1, 2, seconds={"compile": 500.0})
    report.functions.append(samples.function(dear, name="dear"))

    told = part_of(text(report), "The three costliest").splitlines()[1:]

    assert [line.split("`")[1] for line in told] == ["train_step", "dear", "helper_1"]


def test_a_finding_says_what_where_why_what_it_means_and_the_cure() -> None:
    in_order(
        text(samples.by_shape()),
        "`train_step` (tensorflow, train.py:12)\n",
        "  traced 4 times in 8 calls: 4.86 s avoidable of 6.48 s\n",
        "  traced inside it: `normalize` 4 times\n",
        "  retraces: `x` came in 4 shapes (3 times, 4.86 s)\n",
        "      at:      train.py:41: `loss = train_step(x, y)`\n",
        "      cause:   shape\n",
        "      means:   each of them ran the Python and the compiler again\n",
        "      to fix:  give `tf.function` an `input_signature` whose size is None where it varies",
        "  #1   at 0.50 s, train.py:41: `loss = train_step(x, y)`\n",
        "       needed: the first (train)\n",
        "  #2   at 4.00 s, ",
        "       x: float32[32,4] -> float32[30,4] (since #1)\n",
        "       1.62 s: trace 0.30 s, lower 20 ms, compile 1.20 s, first run 0.10 s\n",
    )


def test_validation_inside_fit_and_the_disk_cache_are_told() -> None:
    shown = text(samples.by_shape(), width=140)

    assert "validation_data=(xv, yv))`, via fit\n" in shown
    assert "validation_data=(xv, yv))`, via validation inside fit\n" in shown
    assert "from disk cache 1.20 s" in shown
    assert shown.count("from disk cache") == 1
    assert "TensorFlow then traced a relaxed version: x float32[None,4]" in shown


def test_a_stale_value_has_both_values_and_the_line_that_noticed() -> None:
    shown = text(samples.stale())

    assert "values:  1.0 when traced, 2.0 now; noticed at train.py:44: `scale = 2.0`" in shown
    assert FINDINGS["stale"].happens in shown


def test_findings_that_differ_in_their_lines_alone_are_told_once() -> None:
    shown = text(samples.side_effects())

    assert shown.count("side-effects:") == 1
    in_order(
        shown,
        "at:      train.py:15: `print(15)`\n",
        "train.py:19: `print(19)`\n",
        "... and 2 more lines",
    )
    assert "train.py:20" not in shown


def test_findings_that_differ_are_told_each() -> None:
    shown = text(samples.graph_breaks())

    in_order(shown, "graph-breaks: `print` cannot", "graph-breaks: data-dependent branch")


def test_what_belongs_to_no_function_belongs_to_the_script() -> None:
    in_order(text(samples.side_effects()), "\nThe script\n", "eager: a gradient was taken 40 times")


def test_a_run_that_was_cut_off_says_so_and_invents_neither_length_nor_share() -> None:
    shown = text(samples.killed())

    assert "was cut off" in shown.splitlines()[3]
    assert "of the run" not in shown
    assert "%" not in shown
    assert "cost unknown" in shown
    assert "failed: RESOURCE_EXHAUSTED: Out of memory" in shown
    assert re.search(r"^  run +cut off$", shown, re.M)


def test_a_run_that_ended_in_an_error_says_so() -> None:
    report = samples.clean()
    report.error = "ValueError: no data"

    shown = text(report)

    assert "The run ended with an error: ValueError: no data" in shown
    assert re.search(r"^  run +60.0 s, ended with ValueError: no data$", shown, re.M)


def test_sixty_traces_of_one_kind_are_folded_and_another_kind_is_not() -> None:
    shown = text(samples.many())

    numbers = re.findall(r"^  #(\d+) ", shown, re.M)
    assert numbers == ["1", "2", "3", "61"]
    assert "  ... and 57 more like it, 92.3 s, the last at 54.0 s\n" in shown
    assert len(shown.splitlines()) < 60


def test_one_trace_too_many_is_shown_and_not_folded() -> None:
    assert "more like it" not in text(samples.by_shape())  # three of a kind


def test_a_cure_that_no_finding_says_is_still_said_and_none_is_said_twice() -> None:
    shown = text(samples.many())

    assert "to fix:  each dtype needs a program: convert to one dtype before the call" in shown
    assert shown.count("input_signature") == 1


def test_functions_of_several_processes_are_told_apart_and_no_share_is_told() -> None:
    shown = text(samples.processes())

    assert shown.startswith("3 traces of 2 functions: 4.86 s in 2 processes.\n")
    in_order(
        shown,
        "\n`train_step` (tensorflow, train.py:12, process 11)\n  traced twice",
        "Nothing to change",
    )
    assert "process 12): traced once" in part_of(shown, "Nothing to change")
    assert "%" not in shown


def test_two_functions_of_one_name_are_told_apart() -> None:
    report = samples.processes()
    there = Site("other.py", 3, "step(z)")
    other = samples.function(samples.event(1, 5, called=there), calls=77, process=11, group="2")
    report.functions.insert(0, other)
    report.findings.append(samples.finding("leaks", "got out", there, process=11, group="2"))

    in_order(text(report), "retraces: ", "#2 ", "in 77 calls", "leaks: got out")


def test_of_small_programs_the_costliest_five_have_a_line_each() -> None:
    lines = part_of(text(samples.by_shape()), "Small programs").splitlines()

    assert lines[1] == "      8 x   0.80 s  train.py:28: `x8 = x + 8` (add)"
    assert len(lines) == 7
    assert lines[-1] == "  ... and 3 more lines"


def test_the_block_for_an_issue_is_last_and_has_command_and_versions() -> None:
    report = samples.clean()
    report.command = ["python", "train.py", "--name", "two words"]

    block = text(report).split("To paste into an issue\n")[1]

    assert "  command    python train.py --name 'two words'\n" in block
    assert "  python     3.11.9\n  platform   Linux-x86_64\n" in block
    assert "  jax        0.10.1\n" in block
    assert "\n\n" not in block


def test_a_note_of_several_processes_is_told_once() -> None:
    report = samples.by_shape()
    report.notes *= 3

    assert text(report).count("are not counted") == 1


def test_a_path_below_here_is_relative_and_one_elsewhere_is_a_bare_name() -> None:
    below = Site(str(Path.cwd() / "sub" / "train.py"), 4, "f(x)")

    assert words.where(below) == f"{os.path.join('sub', 'train.py')}:4: `f(x)`"
    assert words.where(Site("/elsewhere/train.py", 4, "f(x)")) == "train.py:4: `f(x)`"


def test_every_kind_of_finding_has_a_severity() -> None:
    assert all(words.severity(kind)[1] != "to check" for kind in FINDINGS)


@every
@pytest.mark.parametrize("width", [50, 80, 100, 140])
def test_no_line_is_longer_than_the_width_unless_it_is_one_word(sample: Sample, width: int) -> None:
    for line in text(sample(), width=width).splitlines():
        words_of_it = line.split()
        assert len(line) <= width or max(map(len, words_of_it)) > width - 20, line


@every
def test_colour_changes_no_character(sample: Sample) -> None:
    colored = text(sample(), color=True)

    assert "\x1b[1m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == text(sample())


def test_nothing_is_taken_for_markup_and_nothing_steers_the_terminal() -> None:
    shown = text(samples.hostile(), width=200)

    assert "`<script>[bold]f\\x07`" in shown
    assert "# [red]\\x1b[31m`" in shown
    assert "to fix:  [link=x]<script>[/link]" in shown
    assert not [c for c in shown if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0 s"), (0.0042, "4 ms"), (0.0996, "0.10 s"), (1.234, "1.23 s"), (9.999, "10.0 s"),
     (119.9, "119.9 s"), (119.99, "2 min"), (125, "2 min 5 s"), (7300, "2 h 1 min")],
)  # fmt: skip
def test_seconds(value: float, told: str) -> None:
    assert words.seconds(value) == told
