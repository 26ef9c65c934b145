"""A benchmark measured by several processes, one after the other.

The memory layout of a process changes the times of small networks by a few percent, so one process
is a sample of one. Imports no engine.
"""

import argparse
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.engines import run_on

R = TypeVar("R")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the number of processes to the command line."""
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="medians of so many")
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)  # a result, for the parent


def measured(
    benchmark: str,
    options: argparse.Namespace,
    measure: Callable[[], R],
    merge: Callable[[Sequence[R]], R],
) -> R | None:
    """Returns the results of this process, or of several; None if the parent reads them."""
    if options.processes > 1:
        return merge(_of_others(benchmark, options))
    result = measure()
    if options.keep is None:
        return result
    options.keep.write_bytes(pickle.dumps(result))
    return None


def _of_others(benchmark: str, options: argparse.Namespace) -> list[R]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.processes):
            kept = Path(folder, str(index))
            run_on(options.engine, benchmark, "--keep", str(kept), *["--quick"] * options.quick)
            results.append(pickle.loads(kept.read_bytes()))
    return results
