"""Measure all the networks on the engine that Keras runs on, as ratios of time."""

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import keras

from benchmarks import load, steps, timing
from benchmarks.models import CASES, Case
from benchmarks.settings import Step

# Those whose torch variants go through the inductor, slow to build, in a quick run.
QUICK_INDUCTOR = ("MLP 20-10-1", "MLP 784-128-10")


@dataclass(frozen=True)
class Column:
    """How the contenders compare on one network, for one way of reading the loss."""

    ours_to_native: float
    keras_to_ours: float
    native: str  # the fastest hand-written variant
    mode: str  # our fastest mode


@dataclass(frozen=True)
class Row:
    """One network: the loss read at every step, and read only at the end."""

    network: str
    each: Column
    end: Column
    others: float  # the share of the machine that other processes used meanwhile


def rows(quick: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """Measure the networks one after the other; `say` tells the progress."""
    plan = timing.QUICK if quick else timing.FULL
    for case in CASES.values():
        contenders = contenders_of(case, inductor=not quick or case.name in QUICK_INDUCTOR)
        say(f"{case.name}: {', '.join(contenders)}")
        x, y = case.batch()
        calls = {name: partial(step, x, y) for name, step in contenders.items()}
        watch = load.Watch()
        times = timing.measure(calls, float, plan)
        others = watch.others()
        each = {name: statistics.median(of.each) for name, of in times.items()}
        end = {name: statistics.median(of.end) for name, of in times.items()}
        yield Row(case.name, column(each), column(end), others)


def contenders_of(case: Case, inductor: bool) -> dict[str, Step]:
    """The steps to compare, as "native: ...", "ours: ..." and "keras"."""
    engine = keras.backend.backend()
    native = importlib.import_module(f"benchmarks.native_{engine}")
    options = {"inductor": inductor} if engine == "torch" else {}
    variants = native.variants(case.name, case.model().get_weights(), **options)
    modes = steps.ours_by_mode(case, inductor)
    return {
        **{f"native: {name}": step for name, step in variants.items()},
        **{f"ours: {mode}": step for mode, step in modes.items()},
        "keras": steps.train_on_batch(case),
    }


def column(seconds: Mapping[str, float]) -> Column:
    """Compare the best of ours with the best hand-written step, and Keras with ours."""
    native = fastest(seconds, "native: ")
    ours = fastest(seconds, "ours: ")
    return Column(
        ours_to_native=seconds[ours] / seconds[native],
        keras_to_ours=seconds["keras"] / seconds[ours],
        native=native.removeprefix("native: "),
        mode=ours.removeprefix("ours: "),
    )


def fastest(seconds: Mapping[str, float], prefix: str) -> str:
    """The name of the fastest contender among those with a prefix."""
    return min((name for name in seconds if name.startswith(prefix)), key=seconds.__getitem__)
