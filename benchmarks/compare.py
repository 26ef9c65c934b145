"""Compare our steps with Keras's `train_on_batch` and with the best hand-written step.

`python -m benchmarks.compare [--engine jax|tensorflow|torch] [--processes N] [--quick]
[--markdown FILE]`

Only ratios of time are printed. Above 1, "ours / hand-written" says how much slower ours is, and
"Keras / ours" how much faster. Ours is the step of a `trainstep.function`; a second table, from the
same run, has the `train_on_batch` of a `trainstep.Trainer` in its place. Where a contender has
variants, its fastest counts, and is named. Keras's `train_on_batch` reads the loss at every step by
itself, in both columns. On torch, all the contenders run on one thread, unless OMP_NUM_THREADS says
otherwise. "other load" is the share of the machine that other processes used during the row: above
some 10%, measure again. With `--processes`, each ratio is the median of those of so many processes,
one after the other: how memory lies in a process moves the small networks by some percent.
"""

import argparse
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.engines import ENGINES, choose, run_on


def run_here(
    engine: str, quick: bool, markdown: Path | None, processes: int, keep: Path | None
) -> None:
    """Measure one engine, in this process or in several others, and print its tables."""
    choose(engine)
    # Keras chooses its engine when it is imported, so no sooner than here.
    from benchmarks import measure, ratios

    console, name = table.console(), ENGINES[engine]
    if processes > 1:
        rows = measure.medians(list(rows_of_others(engine, quick, processes)))
    else:
        say = lambda text: console.print(f"{engine}: {text}", style="dim")  # noqa: E731
        rows = list(measure.rows(quick, say))
    if keep is not None:
        keep.write_bytes(pickle.dumps(rows))
        return
    tables = ratios.tables(rows)
    console.print(*(each.rich(name) for each in tables))
    if markdown is not None:
        markdown.write_text("\n".join([f"## {name}\n", *(each.markdown() for each in tables)]))


def rows_of_others(engine: str, quick: bool, processes: int) -> Iterator[list[Any]]:
    """What so many processes measure, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for index in range(processes):
            kept = Path(folder, str(index))
            run_on(engine, "compare", "--keep", str(kept), *["--quick"] * quick)
            yield pickle.loads(kept.read_bytes())


def run_all(quick: bool, markdown: Path | None, processes: int) -> None:
    """Measure the engines one after the other, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        sections = [Path(folder, engine) for engine in ENGINES]
        for engine, section in zip(ENGINES, sections, strict=True):
            options = "--markdown", str(section), "--processes", str(processes)
            run_on(engine, "compare", *options, *["--quick"] * quick)
        if markdown is not None:
            markdown.write_text("\n".join(section.read_text() for section in sections))


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less torch inductor")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables here")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="medians of so many")
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)  # the rows, for the parent
    options = parser.parse_args()
    if options.engine:
        run_here(options.engine, options.quick, options.markdown, options.processes, options.keep)
    else:
        run_all(options.quick, options.markdown, options.processes)


if __name__ == "__main__":
    main()
