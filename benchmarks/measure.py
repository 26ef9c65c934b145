"""Measures all networks on the engine that Keras runs on, as ratios of time."""

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import keras

from benchmarks import load, steps, timing
from benchmarks.models import CASES, Case
from benchmarks.settings import Step, read_loss

# Ours: the step of a `trainstep.function`, and the `train_on_batch` of a `trainstep.Trainer`.
CONTENDERS = ("ours", "Trainer")

# In a quick run, only these have torch variants by inductor, which compiles slowly.
QUICK_INDUCTOR = ("MLP 20-10-1", "MLP 784-128-10")


@dataclass(frozen=True)
class Column:
    """The ratios of the contenders on one network, for one way of reading the loss."""

    to_native: float
    keras_to: float
    native: str  # the fastest hand-written variant
    mode: str  # the fastest mode of ours


@dataclass(frozen=True)
class Row:
    """One network and one contender of ours: the loss read at every step, or only at the end."""

    network: str
    contender: str
    each: Column
    end: Column
    others: float  # the share of the machine that other processes used meanwhile


def rows(quick: bool, say: Callable[[str], None]) -> Iterator[Row]:
    """Measures the networks one after the other, all contenders of a network interleaved.

    `say` reports the progress.
    """
    plan = timing.QUICK if quick else timing.FULL
    for case in CASES.values():
        contenders = contenders_of(case, inductor=not quick or case.name in QUICK_INDUCTOR)
        say(f"{case.name}: {', '.join(contenders)}")
        x, y = case.batch()
        calls = {name: partial(step, x, y) for name, step in contenders.items()}
        watch = load.Watch()
        times = timing.measure(calls, read_loss, plan)
        others = watch.others()
        each = {name: statistics.median(of.each) for name, of in times.items()}
        end = {name: statistics.median(of.end) for name, of in times.items()}
        for ours in CONTENDERS:
            yield Row(case.name, ours, column(ours, each), column(ours, end), others)


def medians(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns the medians of the rows that several processes have measured."""
    return [
        replace(
            same[0],
            each=median([row.each for row in same]),
            end=median([row.end for row in same]),
            others=max(row.others for row in same),
        )
        for same in zip(*runs, strict=True)
    ]


def median(columns: Sequence[Column]) -> Column:
    """Returns the medians of ratios, and the variants that were the fastest most often."""
    return Column(
        to_native=statistics.median(column.to_native for column in columns),
        keras_to=statistics.median(column.keras_to for column in columns),
        native=statistics.mode(column.native for column in columns),
        mode=statistics.mode(column.mode for column in columns),
    )


def contenders_of(case: Case, inductor: bool) -> dict[str, Step]:
    """Returns the steps to compare: "native: ...", "ours: ...", "Trainer: ..." and "keras"."""
    engine = keras.backend.backend()
    native = importlib.import_module(f"benchmarks.native_{engine}")
    options = {"inductor": inductor} if engine == "torch" else {}
    variants = native.variants(case.name, case.model().get_weights(), **options)
    modes = steps.modes(inductor)
    return {
        **{f"native: {name}": step for name, step in variants.items()},
        **{f"ours: {mode}": steps.ours(case, mode) for mode in modes},
        **{f"Trainer: {mode}": steps.trainer(case, optimize=mode).train_on_batch for mode in modes},
        "keras": steps.train_on_batch(case),
    }


def column(contender: str, seconds: Mapping[str, float]) -> Column:
    """Compares the best of a contender with the best hand-written step, and Keras with it."""
    native = fastest(seconds, "native: ")
    best = fastest(seconds, f"{contender}: ")
    return Column(
        to_native=seconds[best] / seconds[native],
        keras_to=seconds["keras"] / seconds[best],
        native=native.removeprefix("native: "),
        mode=best.removeprefix(f"{contender}: "),
    )


def fastest(seconds: Mapping[str, float], prefix: str) -> str:
    """Returns the name of the fastest contender among those with a prefix."""
    return min((name for name in seconds if name.startswith(prefix)), key=seconds.__getitem__)
