"""The training loop: epochs, batches, validation and callbacks, in the order of Keras.

A `Feed` yields batches and a `Runner` runs them. The loop itself knows neither arrays nor engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

from trainstep._common.errors import ArgumentError
from trainstep._data.protocol import Batch, Feed, iterate_batches
from trainstep._trainer.callbacks import Callbacks, StopFlag
from trainstep._trainer.logs import Logs
from trainstep._trainer.progress import Progress
from trainstep._trainer.resumed_run import CheckpointedRun

Values = dict[str, Any]


class Runner(Protocol):
    """Runs batches through the compiled steps of one kind."""

    logs_are_metrics: bool  # whether `metric_values` returns all that a batch reports

    def batch_call(self, count: int) -> Callable[[Batch], Values]:
        """Returns a function that runs one batch, or a stack of `count`, and returns its values."""
        ...

    def batch_loop(self, count: int) -> Callable[[Iterable[Batch], StopFlag], int]:
        """Returns a function that runs many batches, or stacks of `count`, without their values.

        It ends early once the flag is set, and returns the number of calls.
        """
        ...

    def logs(self, values: Values, count: int) -> Sequence[Logs]:
        """Returns the values after each of the `count` batches of a call."""
        ...

    def prepare(self, batch: Batch, count: int) -> None:
        """Builds and compiles everything that a call needs, and runs nothing."""
        ...

    def metric_values(self) -> Values:
        """Returns the current values of the metrics."""
        ...

    def epoch_logs(self, last: Logs) -> Values:
        """Returns the values of an epoch, given those after its last batch."""
        ...


def run_epoch(
    kind: str,
    runner: Runner,
    feed: Feed,
    *,
    callbacks: Callbacks,
    progress: Progress,
    steps_per_call: int = 1,
    run: CheckpointedRun | None = None,
) -> tuple[int, Logs]:
    """Runs the batches of one epoch; returns their number and the values after the last one."""
    listens = callbacks.listens(kind)
    observed = listens or progress.shows_steps
    stop = StopFlag.of(progress.model, kind)
    step, size, values = 0, 1, Values()
    for count, batches, length in feed.epoch(steps_per_call):
        call, size = runner.batch_call(count), count
        if not observed and run is None:
            # Only the values after the last batch are read. If the length is known, all batches but
            # that one go through a loop that skips the outputs.
            without_values = islice(batches, max(length - 1, 0) if runner.logs_are_metrics else 0)
            calls = runner.batch_loop(count)(without_values, stop)
            if calls:
                values = Values()
            if not (calls and stop.is_set()):
                last, values = _run_unobserved(call, batches, stop, values)
                calls += last
            step += calls * size
            if stop.is_set():
                return step, _last_logs(runner, values, size)
            continue
        for batch in batches:
            if run is not None and run.should_skip(runner, batch, step, size):
                step += size
                continue
            if listens and size == 1:
                callbacks.batch_begin(kind, step)
            values = call(batch)
            step += size
            if observed:
                if listens:
                    _notify_batches(kind, step - size, runner.logs(values, size), callbacks)
                progress.step(step, lambda: runner.logs(values, size)[-1])  # noqa: B023
            if run is not None:
                run.end_step(step, size)
            if stop.is_set():
                return step, runner.logs(values, size)[-1]
    return step, _last_logs(runner, values, size) if step else Logs()


def _last_logs(runner: Runner, values: Values, size: int) -> Logs:
    """Returns the values after the last batch; without outputs, those of the metrics."""
    return runner.logs(values, size)[-1] if values else Logs(runner.metric_values())


def _run_unobserved(
    call: Callable[[Batch], Any], batches: Iterable[Batch], stop: StopFlag, values: Any
) -> tuple[int, Any]:
    """Runs batches until they end or the flag is set; returns their number and the last values."""
    attributes, name = stop  # not `stop.is_set()`: on a small network, a frame per batch counts
    calls = 0
    for batch in batches:
        values = call(batch)
        calls += 1
        if attributes.get(name):
            break
    return calls, values


def _notify_batches(kind: str, step: int, logs: Sequence[Logs], callbacks: Callbacks) -> None:
    """Calls the batch hooks of batches that have run; in a stack, also their begin hooks."""
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
    steps_per_call: int,
    callbacks: Callbacks,
    progress: Progress,
    validate: Callable[[], Values] | None,
    validate_at: Callable[[int], bool],
    run: CheckpointedRun | None = None,
) -> None:
    """Trains for some epochs."""
    model = trainer.model
    model.stop_training = False
    logs: Values = {}
    callbacks.notify("train_begin", {})
    # The callback `BackupAndRestore` sets `_initial_epoch` in `on_train_begin`.
    epochs = range(getattr(model, "_initial_epoch", None) or epochs.start, epochs.stop)
    if run is not None:
        epochs = run.remaining_epochs(epochs, runner, feed, steps_per_call)
    for epoch in epochs:
        trainer.reset_metrics()
        if run is not None:
            run.begin_epoch(epoch)
        callbacks.notify("epoch_begin", epoch, {})
        progress.start_epoch(epoch, feed.steps)
        steps, values = run_epoch(
            "train",
            runner,
            feed,
            callbacks=callbacks,
            progress=progress,
            steps_per_call=steps_per_call,
            run=run,
        )
        if steps == 0:
            if epoch == epochs.start:
                raise no_data_error("Trainer.fit")
            progress.note("the generator is exhausted; pass a function that returns a new one")
            break
        logs = runner.epoch_logs(values)
        if validate is not None and validate_at(epoch):
            logs.update({f"val_{name}": value for name, value in validate().items()})
        progress.end_epoch(logs)
        callbacks.notify("epoch_end", epoch, dict(logs))  # a copy: callbacks may add to it
        if run is not None:
            run.end_epoch()
        if model.stop_training:
            break
    callbacks.notify("train_end", logs)


def evaluate(
    trainer: Any, runner: Runner, feed: Feed, callbacks: Callbacks, progress: Progress
) -> Values:
    """Returns the loss and metrics over a data set."""
    trainer.model.stop_evaluating = False
    trainer.reset_metrics()
    callbacks.notify("test_begin", {})
    steps, values = run_epoch("test", runner, feed, callbacks=callbacks, progress=progress)
    if steps == 0:
        raise no_data_error("Trainer.evaluate")
    logs = dict(values)
    callbacks.notify("test_end", logs)
    return logs


def predict(
    step: Callable[[Any], Any], feed: Feed, callbacks: Callbacks, progress: Progress
) -> list[Any]:
    """Returns the outputs of every batch, on the device."""
    outputs = []
    progress.model.stop_predicting = False
    stop = StopFlag.of(progress.model, "predict")
    callbacks.notify("predict_begin", {})
    progress.start_epoch(0, feed.steps)
    for count, (x, _, _) in enumerate(iterate_batches(feed.epoch(1))):
        callbacks.batch_begin("predict", count)
        outputs.append(step(x))
        callbacks.batch_end("predict", count, {"outputs": outputs[-1]})
        progress.step(count + 1, Logs)
        if stop.is_set():
            break
    if not outputs:
        raise no_data_error("Trainer.predict")
    callbacks.notify("predict_end", {})
    return outputs


def no_data_error(function: str) -> ArgumentError:
    """The error for a source that yields no batch."""
    return ArgumentError(
        function,
        "x",
        "data that yields at least one batch",
        "data that yields nothing",
        "a generator may be exhausted already: make a new one, or pass a function that returns one",
    )
