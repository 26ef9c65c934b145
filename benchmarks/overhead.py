"""Call overhead: our call minus the bare call of the engine, in microseconds.

`python -m benchmarks.overhead [--engine jax|tensorflow|torch] [--quick]`

For a `trainstep.function` over 10, 100 and 1000 variables, and for the `train_on_batch` of a
`trainstep.Trainer`. The arguments are tensors of the engine, and each result is read.

One line is the comparison of captured values. Two more results are ratios: the time of tracing with
and without finding captured values, and, on each network, the time of a Trainer with and without
skipping non-finite batches.
"""

import statistics
from collections.abc import Iterator
from functools import partial

from benchmarks import table, timing
from benchmarks.engines import ENGINES, main
from benchmarks.settings import read_loss

COUNTS = (10, 100, 1000)
NETWORK = "MLP 20-10-1"
LARGE = "MLP 64 x 31 layers"


def run_here(engine: str, quick: bool) -> None:
    """Measures one engine in this process and prints its tables."""
    plan = timing.QUICK if quick else timing.FULL
    above = partial(microseconds_above, plan=plan)
    by_count = {n: above(*adders_of(n)) for n in COUNTS}
    slope = (by_count[COUNTS[-1]] - by_count[COUNTS[0]]) / (COUNTS[-1] - COUNTS[0])
    lines = [
        *([f"function, {n} variables", f"{each:.1f}"] for n, each in by_count.items()),
        ["function, per variable", f"{slope:.3f}"],
        [f"Trainer.train_on_batch, {NETWORK}", f"{above(*train_on_batch()):.1f}"],
        ["ten numbers around a step, compared", f"{above(*ten_numbers()):.2f}"],
    ]
    title = f"{ENGINES[engine]}: above the bare call, on this machine"
    table.console().print(table.Table(["call", "microseconds per call"], lines).rich(title))
    table.console().print(
        f"tracing {LARGE}, values around it and side effects watched / not: {tracing(quick):.2f}"
    )
    title = f'{ENGINES[engine]}: Trainer(nan_policy="skip") / Trainer'
    headers = ["network", "loss read each step", "loss read at the end"]
    table.console().print(table.Table(headers, list(skipping(plan))).rich(title))


# Keras chooses its engine when it is imported, so only these functions import it.


def adders_of(n: int) -> tuple[timing.Call, timing.Call]:
    """Returns our call and the bare call, which add to `n` variables."""
    import keras

    from benchmarks import adders

    x = keras.ops.ones(adders.SIZE)
    return partial(adders.ours(n), x), partial(adders.bare_of_engine(n), x)


def train_on_batch() -> tuple[timing.Call, timing.Call]:
    """Returns the call of a Trainer and the bare call, which train the smallest network."""
    import keras

    from benchmarks import bare, steps
    from benchmarks.models import CASES

    case = CASES[NETWORK]
    x, y = map(keras.ops.convert_to_tensor, case.batch())
    trainer = steps.trainer(case)
    return partial(trainer.train_on_batch, x, y), partial(bare.train_on_batch(case, x, y), x, y)


def ten_numbers() -> tuple[timing.Call, timing.Call]:
    """Returns a step with ten captured values, compared at each call, and one that ignores them."""
    import keras

    from benchmarks import around

    x = keras.ops.ones(())
    return partial(around.step("retrace"), x), partial(around.step("ignore"), x)


def tracing(quick: bool) -> float:
    """Returns the time of a trace with captured values, divided by one without; a median."""
    from benchmarks import around
    from benchmarks.models import CASES

    case = CASES[LARGE]
    around.trace_seconds(case, watched=True)
    return statistics.median(
        around.trace_seconds(case, watched=True) / around.trace_seconds(case, watched=False)
        for _ in range(3 if quick else 9)
    )


def skipping(plan: timing.Plan) -> Iterator[list[str]]:
    """Yields, per network, the time of a Trainer that skips, divided by a plain one."""
    import keras

    from benchmarks import steps
    from benchmarks.models import CASES

    for case in CASES.values():
        x, y = map(keras.ops.convert_to_tensor, case.batch())
        trainers = {p: steps.trainer(case, nan_policy=p) for p in (None, "skip")}
        calls = {str(p): partial(each.train_on_batch, x, y) for p, each in trainers.items()}
        times = timing.measure(calls, read_loss, plan)
        skip, plain = times["skip"], times["None"]
        yield [case.name, ratio(skip.each, plain.each), ratio(skip.end, plain.end)]


def ratio(ours: list[float], other: list[float]) -> str:
    """Returns the median, over the rounds, of one time divided by the other."""
    return f"{statistics.median(a / b for a, b in zip(ours, other, strict=True)):.2f}"


def microseconds_above(ours: timing.Call, bare: timing.Call, plan: timing.Plan) -> float:
    """Returns the median, over the rounds, of our time minus the bare time."""
    times = timing.measure({"ours": ours, "bare": bare}, read_loss, plan)
    pairs = zip(times["ours"].each, times["bare"].each, strict=True)
    return statistics.median(ours - bare for ours, bare in pairs) * 1e6


if __name__ == "__main__":
    main("overhead", __doc__, run_here)
