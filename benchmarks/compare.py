"""Compare our steps with Keras's `train_on_batch` and with the best hand-written step.

`python -m benchmarks.compare [--engine jax|tensorflow|torch] [--quick] [--markdown FILE]`

Only ratios of time are printed. Above 1, "ours / hand-written" says how much slower ours is, and
"Keras / ours" how much faster. Ours is the step of a `trainstep.function`; a second table, from the
same run, has the `train_on_batch` of a `trainstep.Trainer` in its place. Where a contender has
variants, its fastest counts, and is named. Keras's `train_on_batch` reads the loss at every step by
itself, in both columns. On torch, all the contenders run on one thread, unless OMP_NUM_THREADS says
otherwise. "other load" is the share of the machine that other processes used during the row: above
some 10%, measure again.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import table
from benchmarks.engines import ENGINES, choose, run_on


def run_here(engine: str, quick: bool, markdown: Path | None) -> None:
    """Measure one engine in this process and print its tables."""
    choose(engine)
    # Keras chooses its engine when it is imported, so no sooner than here.
    from benchmarks import measure, ratios

    console, name = table.console(), ENGINES[engine]
    rows = list(measure.rows(quick, lambda text: console.print(f"{engine}: {text}", style="dim")))
    tables = ratios.tables(rows)
    console.print(*(each.rich(name) for each in tables))
    if markdown is not None:
        markdown.write_text("\n".join([f"## {name}\n", *(each.markdown() for each in tables)]))


def run_all(quick: bool, markdown: Path | None) -> None:
    """Measure the engines one after the other, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        sections = [Path(folder, engine) for engine in ENGINES]
        for engine, section in zip(ENGINES, sections, strict=True):
            run_on(engine, "compare", "--markdown", str(section), *["--quick"] * quick)
        if markdown is not None:
            markdown.write_text("\n".join(section.read_text() for section in sections))


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less torch inductor")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables here")
    options = parser.parse_args()
    if options.engine:
        run_here(options.engine, options.quick, options.markdown)
    else:
        run_all(options.quick, options.markdown)


if __name__ == "__main__":
    main()
