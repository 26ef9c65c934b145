"""Compares the `fit` of our Trainer with a loop over the bare step, and with Keras's `fit`.

`python -m benchmarks.fit [--engine jax|tensorflow|torch] [--processes N] [--quick]`

One epoch of 1,000 batches of 32 from shuffled arrays in memory, without callbacks, every contender
in its default mode. The bare step is a `trainstep.function`; its loop runs over batches that were
cut in advance, and reads the loss at the end. The step updates one metric and returns the loss;
"with metrics", it also computes the mean of the loss and returns both, as an epoch of `fit` does.
"with a bar" draws a progress bar as in a terminal.

On JAX there is a second table: 16 steps in one call, against a hand-written `jax.lax.scan` over
stacked batches, which does not shuffle; ours with and without shuffling.

With `--processes`, each ratio is the median of several processes, run one after the other.
"""

import argparse
import contextlib
import io
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from unittest import mock

from benchmarks import load, processes, table, timing
from benchmarks.engines import ENGINES, choose, run_on
from benchmarks.settings import BATCH, Step, read_loss

NETWORKS = ("MLP 20-10-1", "MLP 784-128-10")
STEPS = 1000
GROUP = 16
GROUPS = 63

# The contenders on a network, and the two contenders of each ratio, by its name.
Contenders = Callable[[str], Mapping[str, timing.Call]]
Ratios = Mapping[str, tuple[str, str]]

EPOCH_RATIOS = {
    "fit / bare step": ("fit", "bare"),
    "fit / bare step with metrics": ("fit", "metrics"),
    "fit with a bar / bare step": ("bar", "bare"),
    "Keras fit / fit": ("keras", "fit"),
}
GROUP_RATIOS = {
    "fit, in order / lax.scan": ("fit", "scan"),
    "fit, shuffled / lax.scan": ("shuffled", "scan"),
}


class Line(NamedTuple):
    """The ratios on one network."""

    network: str
    ratios: list[float]
    others: float  # the share of the machine that other processes used meanwhile


def run_here(options: argparse.Namespace) -> None:
    """Measures one engine, in this process or in several others, and prints its tables."""
    choose(options.engine)
    plan = timing.QUICK if options.quick else timing.FULL
    name, console = ENGINES[options.engine], table.console()
    wanted = [("an epoch", epoch, EPOCH_RATIOS)]
    if options.engine == "jax":
        wanted.append((f"{GROUP} steps in a call", groups, GROUP_RATIOS))

    def measure() -> list[list[Line]]:
        return [lines(contenders, of, plan) for _, contenders, of in wanted]

    found = processes.measured("fit", options, measure, medians)
    for (title, _, of), rows in zip(wanted, found or [], strict=False):
        headers = ["network", *of, "other load"]
        texts = [
            [row.network, *(f"{ratio:.2f}" for ratio in row.ratios), f"{row.others:.0%}"]
            for row in rows
        ]
        console.print(table.Table(headers, texts).rich(f"{name}: {title}"))


def lines(contenders: Contenders, wanted: Ratios, plan: timing.Plan) -> list[Line]:
    """Measures the networks one after the other."""
    found = []
    for network in NETWORKS:
        calls = contenders(network)
        for call in calls.values():
            call()  # compiles outside of the measurement of other load
        watch = load.Watch()
        seconds = timing.medians_of_long(calls, plan)
        values = [seconds[above] / seconds[below] for above, below in wanted.values()]
        found.append(Line(network, values, watch.others()))
    return found


def medians(runs: Sequence[list[list[Line]]]) -> list[list[Line]]:
    """Returns the medians of the lines that several processes have measured."""
    return [
        [
            Line(
                same[0].network,
                [
                    statistics.median(each)
                    for each in zip(*(row.ratios for row in same), strict=True)
                ],
                max(row.others for row in same),
            )
            for same in zip(*of_table, strict=True)
        ]
        for of_table in zip(*runs, strict=True)
    ]


# Keras chooses its engine when it is imported, so only these functions import it.


def epoch(network: str) -> dict[str, timing.Call]:
    """Returns the contenders that train on batches one by one."""
    from benchmarks import steps
    from benchmarks.models import CASES

    case = CASES[network]
    x, y = case.batch(STEPS)
    cut = [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]
    model = steps.keras_model(case)
    fits = [partial(steps.trainer(case).fit, x, y, batch_size=BATCH) for _ in range(2)]
    return {
        "bare": partial(loop, steps.ours(case, "auto"), cut),
        "metrics": partial(loop, steps.ours(case, "auto", tells_epoch=True), cut),
        "fit": partial(fits[0], progress=False),
        "bar": partial(in_terminal, partial(fits[1], progress=True)),
        "keras": partial(model.fit, x, y, batch_size=BATCH, verbose=0),
    }


def groups(network: str) -> dict[str, timing.Call]:
    """Returns the contenders that train on several batches in one call, on JAX."""
    from benchmarks import native_jax, steps
    from benchmarks.models import CASES

    case = CASES[network]
    x, y = case.batch(GROUP * GROUPS)
    stacked = zip(*(a.reshape(GROUPS, GROUP, BATCH, *a.shape[1:]) for a in (x, y)), strict=True)
    scan = native_jax.build(case.name, case.model().get_weights(), many=True)
    options = {"batch_size": BATCH, "steps_per_call": GROUP, "progress": False}
    fits = [partial(steps.trainer(case).fit, x, y, **options) for _ in range(2)]
    return {
        "scan": partial(loop, scan, list(stacked)),
        "fit": partial(fits[0], shuffle=False),
        "shuffled": partial(fits[1], shuffle=True),
    }


def loop(step: Step, batches: list[tuple]) -> None:
    """Runs a step on all batches, and reads the last loss."""
    loss = None
    for x, y in batches:
        loss = step(x, y)
    read_loss(loss)


def in_terminal(call: timing.Call) -> None:
    """Calls a function that draws a progress bar only in a terminal, as if in one."""
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.dict(os.environ, FORCE_COLOR="1"):
        call()


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, help="only this one")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    processes.add_options(parser)
    options = parser.parse_args()
    if options.engine:
        run_here(options)
        return
    for engine in ENGINES:
        more = ["--processes", str(options.processes), *["--quick"] * options.quick]
        run_on(engine, "fit", *more)


if __name__ == "__main__":
    main()
