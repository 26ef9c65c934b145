"""What a call of ours costs above the bare call of the engine, for 10, 100 and 1000 variables.

`python -m benchmarks.overhead [--engine jax|tensorflow|torch] [--quick]`
"""

import argparse
import statistics
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks import timing
from benchmarks.engines import ENGINES, choose, run_on

COUNTS = (10, 100, 1000)


def run_here(engine: str, quick: bool) -> None:
    """Measure one engine in this process and print its table."""
    choose(engine)
    plan = timing.QUICK if quick else timing.FULL
    above = {n: microseconds_above(n, plan) for n in COUNTS}
    slope = (above[COUNTS[-1]] - above[COUNTS[0]]) / (COUNTS[-1] - COUNTS[0])
    table = Table(title=f"{ENGINES[engine]}: above the bare call, on this machine")
    table.add_column("variables", justify="right")
    table.add_column("microseconds per call", justify="right")
    for n, microseconds in above.items():
        table.add_row(str(n), f"{microseconds:.1f}")
    table.add_row("per variable", f"{slope:.3f}")
    Console().print(table)


def microseconds_above(n: int, plan: timing.Plan) -> float:
    """The median, over the rounds, of the time of ours less that of the bare call."""
    # Keras chooses its engine when it is imported, so no sooner than here.
    import keras

    from benchmarks import adders

    x = keras.ops.ones(adders.SIZE)
    calls = {"ours": partial(adders.ours(n), x), "bare": partial(adders.bare(n), x)}
    times = timing.measure(calls, float, plan)
    pairs = zip(times["ours"].each, times["bare"].each, strict=True)
    return statistics.median(ours - bare for ours, bare in pairs) * 1e6


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    if options.engine:
        run_here(options.engine, options.quick)
    else:
        for engine in ENGINES:
            run_on(engine, "overhead", *["--quick"] * options.quick)


if __name__ == "__main__":
    main()
