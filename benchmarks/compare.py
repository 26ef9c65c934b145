"""Compares our steps with Keras's `train_on_batch` and with the best hand-written step.

`python -m benchmarks.compare [--engine jax|tensorflow|torch] [--processes N] [--quick]
[--markdown FILE]`

It prints ratios of time only. Above 1, ours is slower by "ours / hand-written" and faster by "Keras
/ ours". Ours is the step of a `trainstep.function`; a second table, from the same run, has the
`train_on_batch` of a `trainstep.Trainer` instead. If a contender has variants, the fastest counts,
and the table names it. Keras's `train_on_batch` reads the loss at every step in both columns. On
torch, all contenders run on one thread, unless OMP_NUM_THREADS is set. "other load" is the share of
the machine that other processes used during the row: above 10 %, measure again. With `--processes`,
each ratio is the median of several processes, run one after the other: the memory layout of a
process changes the times of small networks by a few percent.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import processes, table
from benchmarks.engines import ENGINES, choose, run_on


def run_here(options: argparse.Namespace) -> None:
    """Measures one engine, in this process or in several others, and prints its tables."""
    choose(options.engine)
    # Keras chooses its engine when it is imported, so these imports come after the choice.
    from benchmarks import measure, ratios

    console, name = table.console(), ENGINES[options.engine]
    say = lambda text: console.print(f"{options.engine}: {text}", style="dim")  # noqa: E731
    rows = processes.measured(
        "compare", options, lambda: list(measure.rows(options.quick, say)), measure.medians
    )
    if rows is None:
        return
    tables = ratios.tables(rows)
    console.print(*(each.rich(name) for each in tables))
    if options.markdown is not None:
        texts = [f"## {name}\n", *(each.markdown() for each in tables)]
        options.markdown.write_text("\n".join(texts))


def run_all(quick: bool, markdown: Path | None, count: int) -> None:
    """Measures the engines one after the other, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        sections = [Path(folder, engine) for engine in ENGINES]
        for engine, section in zip(ENGINES, sections, strict=True):
            options = "--markdown", str(section), "--processes", str(count)
            run_on(engine, "compare", *options, *["--quick"] * quick)
        if markdown is not None:
            markdown.write_text("\n".join(section.read_text() for section in sections))


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less torch inductor")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables here")
    processes.add_options(parser)
    options = parser.parse_args()
    if options.engine:
        run_here(options)
    else:
        run_all(options.quick, options.markdown, options.processes)


if __name__ == "__main__":
    main()
