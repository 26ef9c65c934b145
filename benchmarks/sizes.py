"""Trains on batches of dynamic sizes: ours, a loop written by hand for them, and Keras.

`python -m benchmarks.sizes [--engine jax|tensorflow|torch] [--quick]`

`benchmarks.streams` describes the streams of batches. Every contender trains on the same batches in
a process of its own, without the disk cache, and reads the loss at every step; all times include
compilation. The loop by hand suits the engine: on JAX a jitted step with a mask, its batches padded
to a power of two; on TensorFlow a `tf.function` with unknown dimensions; on torch an eager loop.
Keras gets only the first batches, because it may compile for each size.

"worst step" is the longest step after the first 10. "loss off by" is the largest relative
difference in loss from the loop by hand, to check that all contenders do the same work. Training
amplifies rounding: over 1,000 steps, a change of the last bit of the first weights changes losses
by up to a few percent, if batches have only a few rows. Keras's Adam on TensorFlow treats a token
that occurs several times in a batch differently, so its losses differ more on "lengths".

On JAX there is one more table: the step with a mask, in a bucket of 32 rows, against the step
without a mask, which accepts 32 rows only.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

from benchmarks import load, table, timing
from benchmarks.engines import ENGINES, main
from benchmarks.settings import BATCH, read_loss
from benchmarks.streams import CONTENDERS, FULL, QUICK, STREAMS, Run

NO_CACHE = {"TRAINSTEP_CACHE": "off", "JAX_ENABLE_COMPILATION_CACHE": "false"}
PART = 20  # rows in the bucket of 32


def run_here(engine: str, quick: bool) -> None:
    """Measures one engine and prints its tables."""
    os.environ.update(NO_CACHE)
    name, console = ENGINES[engine], table.console()
    for stream in STREAMS:
        runs = {contender: run(engine, stream, contender, quick) for contender in CONTENDERS}
        console.print(compared(runs, *(QUICK if quick else FULL)[:2]).rich(f"{name}: {stream}"))
    if engine == "jax":
        title = f"{name}: a step in a bucket of {BATCH} / a step for {BATCH}, loss read each step"
        console.print(masked(timing.QUICK if quick else timing.FULL).rich(title))


def run(engine: str, stream: str, contender: str, quick: bool) -> Run:
    """Trains one contender on one stream in a new process."""
    command = [sys.executable, "-m", "benchmarks.streams", engine, stream, contender]
    done = subprocess.run(
        [*command, *["--quick"] * quick], check=True, stdout=subprocess.PIPE, text=True
    )
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def compared(runs: Mapping[str, Run], count: int, first: int) -> table.Table:
    """Returns the contenders on one stream; `first` is the number of batches that all train on."""
    headers = [
        "contender",
        f"first {first}, s",
        f"all {count}, s",
        f"Keras / it, first {first}",
        "programs",
        "padding",
        "worst step, ms",
        "worst / median",
        f"loss off by, first {first}",
        "all",
        "other load",
    ]
    lines = []
    for name, run in runs.items():
        start = sum(run.seconds[:first])
        worst, times_median = run.stall()
        has_all, off = len(run.seconds) == count, differences(run, runs["by hand"])
        lines.append(
            [
                name,
                f"{start:.2f}",
                f"{sum(run.seconds):.2f}" if has_all else "-",
                f"{sum(runs['Keras'].seconds[:first]) / start:.2f}",
                str(run.programs),
                f"{run.padding:.0%}",
                f"{1000 * worst:.1f}",
                f"{times_median:.1f}",
                f"{max(off[:first]):.0e}" if name != "by hand" else "-",
                f"{max(off):.0e}" if has_all and name != "by hand" else "-",
                f"{run.others:.0%}",
            ]
        )
    return table.Table(headers, lines)


def differences(run: Run, reference: Run) -> list[float]:
    """Returns the relative differences between the losses of two runs, at their common steps."""
    pairs = zip(run.losses, reference.losses, strict=False)
    return [abs(loss - right) / abs(right) for loss, right in pairs]


def masked(plan: timing.Plan) -> table.Table:
    """Returns the cost of a mask in a step of the same size, on JAX."""
    # Keras chooses its engine when it is imported.
    import trainstep as ts
    from benchmarks import steps
    from benchmarks.models import CASES

    bucket = ts.Shapes("bucket", grid=(BATCH,), background=False)
    lines = []
    for case in CASES.values():
        x, y = case.batch()
        calls = {
            "exact": partial(steps.trainer(case, shapes="exact").train_on_batch, x, y),
            "full": partial(steps.trainer(case, shapes=bucket).train_on_batch, x, y),
            "part": partial(steps.trainer(case, shapes=bucket).train_on_batch, x[:PART], y[:PART]),
        }
        for call in calls.values():
            read_loss(call())  # compiles outside of the measurement of other load
        watch = load.Watch()
        times = timing.measure(calls, read_loss, plan)
        exact, full, part = (statistics.median(times[name].each) for name in calls)
        values = f"{full / exact:.2f}", f"{part / exact:.2f}", f"{watch.others():.0%}"
        lines.append([case.name, *values])
    return table.Table(["network", f"{BATCH} rows", f"{PART} rows", "other load"], lines)


if __name__ == "__main__":
    main("sizes", __doc__, run_here)
