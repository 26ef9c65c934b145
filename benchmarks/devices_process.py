"""One of several processes that run a step together: prints its seconds for each network."""

import os
import statistics

import trainstep as ts
from benchmarks import timing
from benchmarks.devices import CASES, step_of


def main() -> None:
    """Joins the other processes and measures."""
    me = ts.initialize()
    calls = int(os.environ["BENCHMARK_CALLS"])
    for case in CASES:
        step = step_of(case, "Mirrored", None)
        seconds = [timing.time_each(step, float, 1) for _ in range(calls)]
        if me.is_first:
            print(statistics.median(seconds), flush=True)


if __name__ == "__main__":
    main()
