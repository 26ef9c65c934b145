"""One of several processes that take a step together: prints its seconds, network by network."""

import os
import statistics

import trainstep as ts
from benchmarks import timing
from benchmarks.devices import CASES, step_of


def main() -> None:
    """Join the others, and measure."""
    me = ts.initialize()
    calls = int(os.environ["BENCHMARK_CALLS"])
    for case in CASES:
        step = step_of(case, "Mirrored", None)
        seconds = [timing.time_each(step, float, 1) for _ in range(calls)]
        if me.is_first:
            print(statistics.median(seconds), flush=True)


if __name__ == "__main__":
    main()
