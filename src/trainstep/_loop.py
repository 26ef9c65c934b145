"""Epochs, batches, validation and callbacks, in the order in which Keras has them.

The loop knows nothing of arrays or engines: a feed gives batches, a runner takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainstep._callbacks import Callbacks
from trainstep._data import Batch, Feed
from trainstep._errors import ArgumentError
from trainstep._logs import Logs
from trainstep._progress import Progress

Values = dict[str, Any]


class Runner(Protocol):
    """What runs batches."""

    def run(self, batch: Batch) -> Logs:
        """Runs one batch."""
        ...

    def run_many(self, count: int, batches: Batch) -> Sequence[Logs]:
        """Runs several batches, stacked, in one call; gives the values after each."""
        ...


def run_epoch(
    kind: str,
    runner: Runner,
    feed: Feed,
    *,
    callbacks: Callbacks,
    progress: Progress,
    group: int = 1,
) -> tuple[int, Logs]:
    """Runs the batches of one epoch; gives their number and the values after the last."""
    model = progress.model
    listens = callbacks.listens(kind)
    step, values = 0, Logs()
    for count, batch in feed.epoch(group):
        if count == 1:
            if listens:
                callbacks.batch_begin(kind, step)
            values = runner.run(batch)
            if listens:
                callbacks.batch_end(kind, step, values)
        else:
            results = runner.run_many(count, batch)
            values = results[-1]
            if listens:
                for offset, each in enumerate(results):
                    callbacks.batch_begin(kind, step + offset)
                    callbacks.batch_end(kind, step + offset, each)
        step += count
        progress.step(step, values)
        if kind == "train" and model.stop_training:
            break
    return step, values


def fit(
    trainer: Any,
    runner: Runner,
    feed: Feed,
    *,
    epochs: range,
    group: int,
    callbacks: Callbacks,
    progress: Progress,
    validate: Callable[[], Values] | None,
    validate_at: Callable[[int], bool],
) -> None:
    """Trains for some epochs."""
    model = trainer.model
    model.stop_training = False
    logs: Values = {}
    callbacks.tell("train_begin", {})
    epochs = range(getattr(model, "_initial_epoch", None) or epochs.start, epochs.stop)
    for epoch in epochs:
        trainer.reset_metrics()
        callbacks.tell("epoch_begin", epoch, {})
        progress.start_epoch(epoch, feed.steps)
        steps, values = run_epoch(
            "train", runner, feed, callbacks=callbacks, progress=progress, group=group
        )
        if steps == 0:
            if epoch == epochs.start:
                raise no_data("Trainer.fit")
            progress.note("the data ended; pass a function that makes the generator anew")
            break
        logs = dict(values)
        if validate is not None and validate_at(epoch):
            logs.update({f"val_{name}": value for name, value in validate().items()})
        progress.end_epoch(logs)
        callbacks.tell("epoch_end", epoch, logs)
        if model.stop_training:
            break
    callbacks.tell("train_end", logs)


def evaluate(
    trainer: Any, runner: Runner, feed: Feed, callbacks: Callbacks, progress: Progress
) -> Values:
    """The loss and metrics over a data set."""
    trainer.reset_metrics()
    callbacks.tell("test_begin", {})
    steps, values = run_epoch("test", runner, feed, callbacks=callbacks, progress=progress)
    if steps == 0:
        raise no_data("Trainer.evaluate")
    logs = dict(values)
    callbacks.tell("test_end", logs)
    return logs


def predict(
    step: Callable[[Any], Any], feed: Feed, callbacks: Callbacks, progress: Progress
) -> list[Any]:
    """The outputs of every batch, on the device."""
    outputs = []
    callbacks.tell("predict_begin", {})
    progress.start_epoch(0, feed.steps)
    for count, (_, (x, _, _)) in enumerate(feed.epoch(1)):
        callbacks.batch_begin("predict", count)
        outputs.append(step(x))
        callbacks.batch_end("predict", count, {"outputs": outputs[-1]})
        progress.step(count + 1, Logs())
    if not outputs:
        raise no_data("Trainer.predict")
    callbacks.tell("predict_end", {})
    return outputs


def no_data(function: str) -> ArgumentError:
    """A source of batches that has none."""
    return ArgumentError(
        function,
        "x",
        "data that yields at least one batch",
        "data that yields nothing",
        "if it is a generator, it may be used up already: make a new one, or pass a function that "
        "returns one",
    )
