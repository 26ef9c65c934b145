"""Streams of batches of dynamic sizes, and their contenders; for `benchmarks.sizes`.

`python -m benchmarks.streams ENGINE STREAM CONTENDER [--quick]` trains one contender on one stream
in a process of its own and prints the result as a line of JSON.

- "rows": batches of 1 to 256 rows, uniformly distributed, for the MLP 784-128-10.
- "lengths": batches of 16 sequences of tokens for a convolution. The sequences of a batch have one
  length, log-normal over the batches: its median is 100, and it is clipped to 8 to 512.

All batches are made in advance, from a seed. "ours, foreground" has `background=False`.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import engines, load
from benchmarks.settings import Step, read_loss

if TYPE_CHECKING:
    import keras

STREAMS = ("rows", "lengths")
CONTENDERS = ("by hand", "ours", "ours, foreground", "Keras")
# The number of batches, of those that Keras gets, and the largest number of distinct sizes.
FULL, QUICK = (1000, 300, 1000), (60, 20, 8)
SETTLED = 10  # the first steps, which do not count as stalls
PIXELS, CLASSES = 784, 10
TOKENS, WIDTH, SEQUENCES = 200, 16, 16

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Contender:
    """A step, its number of programs, and its share of padding."""

    step: Step
    programs: Callable[[], int]
    padding: Callable[[], float]


@dataclass(frozen=True)
class Run:
    """The result of a contender; every step read its loss."""

    seconds: list[float]  # of each step
    losses: list[float]
    programs: int
    padding: float
    others: float  # the share of the machine that other processes used meanwhile

    def stall(self) -> tuple[float, float]:
        """Returns the longest step after the first few, in seconds and in medians."""
        settled = self.seconds[SETTLED:]
        return max(settled), max(settled) / statistics.median(settled)


def batches(stream: str, count: int, distinct: int) -> Iterator[Batch]:
    """Yields the batches of a stream, of at most so many distinct sizes."""
    random = np.random.default_rng(0)
    if stream == "rows":
        sizes = random.integers(1, 257, distinct)
        x = random.normal(size=(4096, PIXELS)).astype(np.float32)
        y = random.normal(size=(4096, CLASSES)).astype(np.float32)
        for size in random.permutation(np.resize(sizes, count)):
            start = random.integers(len(x) - size)
            yield x[start : start + size], y[start : start + size]
    else:
        sizes = np.clip(random.lognormal(np.log(100), 0.6, distinct), 8, 512).astype(int)
        for size in random.permutation(np.resize(sizes, count)):
            tokens = random.integers(0, TOKENS, (SEQUENCES, size), dtype=np.int32)
            yield tokens, random.normal(size=(SEQUENCES, 1)).astype(np.float32)


def run(engine: str, stream: str, contender: str, quick: bool) -> Run:
    """Trains one contender on one stream in this process; the engine must have been chosen."""
    count, of_keras, distinct = QUICK if quick else FULL
    made = list(batches(stream, count, distinct))[: of_keras if contender == "Keras" else count]
    trained = contenders(engine, stream)[contender]()
    seconds, losses, watch = [], [], load.Watch()
    for x, y in made:
        start = time.perf_counter()
        losses.append(read_loss(trained.step(x, y)))
        seconds.append(time.perf_counter() - start)
    return Run(seconds, losses, trained.programs(), trained.padding(), watch.others())


# Keras chooses its engine when it is imported, so only these functions import it.


def contenders(engine: str, stream: str) -> dict[str, Callable[[], Contender]]:
    """Returns the functions that make the contenders, in the order of their names."""
    import trainstep as ts

    native = importlib.import_module(f"benchmarks.sized_{engine}")
    makers = (
        lambda: native.build(stream, model(stream).get_weights()),
        lambda: ours(stream, ts.Shapes()),
        lambda: ours(stream, ts.Shapes(background=False)),
        lambda: of_keras(stream),
    )
    return dict(zip(CONTENDERS, makers, strict=True))


def model(stream: str) -> "keras.Model":
    """Returns the model of a stream, with the same initial weights at every call."""
    import keras
    from keras import layers

    from benchmarks.models import mlp

    keras.utils.set_random_seed(0)
    if stream == "rows":
        return mlp(PIXELS, 128, CLASSES)
    return keras.Sequential(
        [
            layers.Input((None,), dtype="int32"),
            layers.Embedding(TOKENS, WIDTH),
            layers.Conv1D(WIDTH, 5, padding="same", activation="relu"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )


def ours(stream: str, shapes: object) -> Contender:
    """Returns our Trainer; sequence lengths are declared dynamic, rows are so by default."""
    import trainstep as ts
    from benchmarks.steps import recipe

    dynamic = {"x": 1} if stream == "lengths" else None
    trainer = ts.Trainer(model(stream), **recipe(), shapes=shapes, dynamic=dynamic)
    step = trainer._functions.step("train")  # a Trainer has no public numbers of one step
    return Contender(trainer.train_on_batch, lambda: step.program_count, lambda: step.padding)


def of_keras(stream: str) -> Contender:
    """Returns Keras's own step, with default settings and without padding."""
    import keras

    from benchmarks.steps import recipe

    trained = model(stream)
    trained.compile(**recipe())
    plain, traces, shapes = trained.train_step, 0, set()

    def counted(*args: object) -> object:
        nonlocal traces
        traces += 1
        return plain(*args)

    trained.train_step = counted

    def step(x: np.ndarray, y: np.ndarray) -> object:
        shapes.add(x.shape)
        return trained.train_on_batch(x, y)[0]

    def programs() -> int:
        if keras.backend.backend() == "torch":  # eager: the count is of steps, not of programs
            return 0
        return max(traces, len(shapes)) if trained.jit_compile else traces  # XLA: one per shape

    return Contender(step, programs, lambda: 0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=engines.ENGINES)
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    engines.choose(options.engine)
    print(json.dumps(asdict(run(**vars(options)))))
