"""Epochs, batches, validation and callbacks, in the order in which Keras has them.

The loop knows nothing of arrays or engines: a feed gives batches, a runner takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from trainstep._common.errors import ArgumentError
from trainstep._data.protocol import Batch, Feed, iterate_batches
from trainstep._trainer.callbacks import Callbacks
from trainstep._trainer.logs import Logs
from trainstep._trainer.progress import Progress
from trainstep._trainer.resumed_run import Run

Values = dict[str, Any]


class Runner(Protocol):
    """What runs batches."""

    tells_later: bool  # `now` has all the values that the last batch has

    def calls(self, count: int) -> Callable[[Batch], Values]:
        """What runs one batch, or a stack of `count` in one call; gives the values, as they are."""
        ...

    def loop(self, count: int) -> Callable[[Iterable[Batch], Mapping[str, Any], str], int]:
        """What runs one after the other, and gives their number: nobody reads their values.

        It stops after one that has set the second argument's entry of the name in the third.
        """
        ...

    def logs(self, values: Values, count: int) -> Sequence[Logs]:
        """The values after each of the `count` batches of a call."""
        ...

    def prepare(self, batch: Batch, count: int) -> None:
        """Builds all that such a call needs, and runs nothing."""
        ...

    def now(self) -> Values:
        """The values of the metrics as they stand."""
        ...

    def of_epoch(self, last: Logs) -> Values:
        """The values of an epoch, of those after its last batch."""
        ...


def run_epoch(
    kind: str,
    runner: Runner,
    feed: Feed,
    *,
    callbacks: Callbacks,
    progress: Progress,
    group: int = 1,
    run_of: Run | None = None,
) -> tuple[int, Logs]:
    """Runs the batches of one epoch; gives their number and the values after the last."""
    listens = callbacks.listens(kind)
    watched = listens or progress.live
    flags, stop = vars(progress.model), "stop_training" if kind == "train" else "stop_evaluating"
    step, size, values = 0, 1, Values()
    for count, batches, length in feed.epoch(group):
        run, size = runner.calls(count), count
        if not watched and run_of is None:
            # Only the values after the last batch are read, if it can be told which that is.
            ahead = islice(batches, max(length - 1, 0) if runner.tells_later else 0)
            calls = runner.loop(count)(ahead, flags, stop)
            if calls:
                values = Values()
            if not (calls and flags.get(stop)):
                last, values = _run_unwatched(run, batches, flags, stop, values)
                calls += last
            step += calls * size
            if flags.get(stop):
                return step, _after(runner, values, size)
            continue
        for batch in batches:
            if run_of is not None and run_of.passes(runner, batch, step, size):
                step += size
                continue
            if listens and size == 1:
                callbacks.batch_begin(kind, step)
            values = run(batch)
            step += size
            if watched:
                if listens:
                    _tell(kind, step - size, runner.logs(values, size), callbacks)
                progress.step(step, lambda: runner.logs(values, size)[-1])  # noqa: B023
            if run_of is not None:
                run_of.stepped(step, size)
            if flags.get(stop):
                return step, runner.logs(values, size)[-1]
    return step, _after(runner, values, size) if step else Logs()


def _after(runner: Runner, values: Values, size: int) -> Logs:
    """The values after the last batch; its own are not known if it was run silently, or before."""
    return runner.logs(values, size)[-1] if values else Logs(runner.now())


def _run_unwatched(
    run: Callable[[Batch], Any], batches: Iterable[Batch], flags: Values, stop: str, values: Any
) -> tuple[int, Any]:
    """Runs batches until their end, or until it is to stop; on small networks, each line counts."""
    calls = 0
    for batch in batches:
        values = run(batch)
        calls += 1
        if flags.get(stop):
            break
    return calls, values


def _tell(kind: str, step: int, logs: Sequence[Logs], callbacks: Callbacks) -> None:
    """Tells callbacks of batches that have run; of the begin of several, only now."""
    for offset, each in enumerate(logs):
        if len(logs) > 1:
            callbacks.batch_begin(kind, step + offset)
        callbacks.batch_end(kind, step + offset, each)


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
    run_of: Run | None = None,
) -> None:
    """Trains for some epochs."""
    model = trainer.model
    model.stop_training = False
    logs: Values = {}
    callbacks.tell("train_begin", {})
    epochs = range(getattr(model, "_initial_epoch", None) or epochs.start, epochs.stop)
    if run_of is not None:
        epochs = run_of.remaining(epochs, runner, feed, group)
    for epoch in epochs:
        trainer.reset_metrics()
        if run_of is not None:
            run_of.begins(epoch)
        callbacks.tell("epoch_begin", epoch, {})
        progress.start_epoch(epoch, feed.steps)
        steps, values = run_epoch(
            "train",
            runner,
            feed,
            callbacks=callbacks,
            progress=progress,
            group=group,
            run_of=run_of,
        )
        if steps == 0:
            if epoch == epochs.start:
                raise no_data("Trainer.fit")
            progress.note("the data ended; pass a function that makes the generator anew")
            break
        logs = runner.of_epoch(values)
        if validate is not None and validate_at(epoch):
            logs.update({f"val_{name}": value for name, value in validate().items()})
        progress.end_epoch(logs)
        callbacks.tell("epoch_end", epoch, dict(logs))  # theirs to add to
        if run_of is not None:
            run_of.ended()
        if model.stop_training:
            break
    callbacks.tell("train_end", logs)


def evaluate(
    trainer: Any, runner: Runner, feed: Feed, callbacks: Callbacks, progress: Progress
) -> Values:
    """The loss and metrics over a data set."""
    trainer.model.stop_evaluating = False
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
    progress.model.stop_predicting = False
    callbacks.tell("predict_begin", {})
    progress.start_epoch(0, feed.steps)
    for count, (x, _, _) in enumerate(iterate_batches(feed.epoch(1))):
        callbacks.batch_begin("predict", count)
        outputs.append(step(x))
        callbacks.batch_end("predict", count, {"outputs": outputs[-1]})
        progress.step(count + 1, Logs)
        if vars(progress.model).get("stop_predicting"):
            break
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
