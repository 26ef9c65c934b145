"""Keras callbacks under `Trainer.fit` hear and do what they hear and do under Keras's `fit`.

Tolerance: a few float32 roundings over a few epochs of SGD, as in `test_fit.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts
from tests.helpers import assert_same, host, normal
from tests.twins import assert_logs, assert_twins, lone, mlp, regression, twins

EXACT = 5e-6
X, Y = normal(16, 6, seed=1), normal(16, 2, seed=2)  # four batches of four
VALIDATION = normal(8, 6, seed=4), normal(8, 2, seed=5)
Call = tuple[str, Any, dict[str, float] | None]

HOOKS = [
    f"on_{hook}"
    for hook in (
        "train_begin", "train_end", "epoch_begin", "epoch_end", "train_batch_begin",
        "train_batch_end", "test_begin", "test_end", "test_batch_begin", "test_batch_end",
        "predict_begin", "predict_end", "predict_batch_begin", "predict_batch_end",
    )
]  # fmt: skip


class Recorder(keras.callbacks.Callback):
    """Writes down every call, and the learning rate and iterations at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.iterations: list[int] = []
        for hook in HOOKS:
            setattr(self, hook, self.hook(hook))

    def hook(self, name: str) -> Callable[..., None]:
        def note(number: Any = None, logs: Any = None) -> None:
            if logs is None and isinstance(number, dict):
                number, logs = None, number  # hooks of a whole run take logs only
            numbers = None if logs is None else {k: v for k, v in logs.items() if k != "outputs"}
            self.calls.append((name, number, numbers))
            self.iterations.append(int(host(self.model.optimizer.iterations)))

        return note


def assert_heard(got: list[Call], wanted: list[Call]) -> None:
    """The same hooks with the same numbers and names, in the same order."""
    assert [call[:2] for call in got] == [call[:2] for call in wanted]
    for (name, number, a), (_, _, b) in zip(got, wanted, strict=True):
        if name.startswith("on_predict"):
            continue
        assert (a or {}).keys() == (b or {}).keys(), (name, number)
        assert_logs(a or {}, b or {}, EXACT)


def run(
    theirs: keras.Model, trainer: ts.Trainer, make: Callable[[], list[Any]], **options: Any
) -> tuple[Any, Any, list[Any], list[Any]]:
    """Fits both, each with callbacks of its own: histories, then callbacks, ours first."""
    options = {"batch_size": 4, "epochs": 3, "shuffle": False, **options}
    mine, other = make(), make()
    wanted = theirs.fit(X, Y, verbose=0, callbacks=other, **options)
    got = trainer.fit(X, Y, progress=False, callbacks=mine, **options)
    assert got.epoch == wanted.epoch
    assert set(got.history) == set(wanted.history)
    for name, values in wanted.history.items():
        np.testing.assert_allclose(got.history[name], values, EXACT, EXACT, err_msg=name)
    return got, wanted, mine, other


@pytest.mark.parametrize("validation", [False, True])
def test_hooks_of_fit(validation: bool) -> None:
    options = {"validation_data": VALIDATION, "validation_freq": 2} if validation else {}
    _, _, [mine], [other] = run(*twins(mlp, regression), lambda: [Recorder()], **options)
    assert_heard(mine.calls, other.calls)
    assert mine.iterations == other.iterations
    assert mine.params["epochs"] == other.params["epochs"] == 3
    assert mine.params["steps"] == other.params["steps"] == 4


def test_hooks_of_evaluate_and_predict() -> None:
    theirs, trainer = twins(mlp, regression)
    mine, other = Recorder(), Recorder()
    theirs.evaluate(X, Y, batch_size=4, verbose=0, callbacks=[other])
    trainer.evaluate(X, Y, batch_size=4, callbacks=[mine])
    theirs.predict(X, batch_size=4, verbose=0, callbacks=[other])
    trainer.predict(X, batch_size=4, callbacks=[mine])
    assert_heard(mine.calls, other.calls)


def test_callback_sees_the_model_itself() -> None:
    theirs, trainer = twins(mlp, regression)
    _, _, [mine], _ = run(theirs, trainer, lambda: [Recorder()], epochs=1)
    assert mine.model is trainer.model


def test_weights_are_current_at_every_batch() -> None:
    """`get_weights` in a hook gives the weights after that batch, and they stay what they were."""

    def make() -> list[Any]:
        class Weights(keras.callbacks.Callback):
            def __init__(self) -> None:
                super().__init__()
                self.seen: list[list[np.ndarray]] = []

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.seen.append(self.model.get_weights())

        return [Weights()]

    _, _, [mine], [other] = run(*twins(mlp, regression), make, epochs=2)
    assert len(mine.seen) == len(other.seen) == 8
    for got, wanted in zip(mine.seen, other.seen, strict=True):
        assert_same(got, wanted, EXACT, EXACT)


def test_learning_rate_set_in_the_middle_of_an_epoch() -> None:
    def make() -> list[Any]:
        def halve(batch: int, logs: Any = None) -> None:
            if batch == 1:
                rate.model.optimizer.learning_rate = 0.5 * float(
                    host(rate.model.optimizer.learning_rate)
                )

        rate = keras.callbacks.LambdaCallback(on_train_batch_end=halve)
        return [rate]

    theirs, trainer = twins(mlp, regression)
    run(theirs, trainer, make)
    assert float(host(trainer.optimizer.learning_rate)) == pytest.approx(0.05 / 8)
    assert_twins(trainer, theirs, EXACT)
    assert trainer.trace_count == 1


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_stop_training(hook: str) -> None:
    def make() -> list[Any]:
        calls: list[int] = []

        def stop(number: int, logs: Any = None) -> None:
            calls.append(number)
            if len(calls) == 2:
                callback.model.stop_training = True

        callback = keras.callbacks.LambdaCallback(**{hook: stop})
        return [callback, Recorder()]

    theirs, trainer = twins(mlp, regression)
    _, _, mine, other = run(theirs, trainer, make, validation_data=VALIDATION)
    assert_heard(mine[1].calls, other[1].calls)
    assert_twins(trainer, theirs, EXACT)
    run(theirs, trainer, lambda: [], epochs=1)  # a stop is for one fit
    assert_twins(trainer, theirs, EXACT)


def test_early_stopping() -> None:
    def make() -> list[Any]:
        stop = keras.callbacks.EarlyStopping(
            "val_loss", patience=1, restore_best_weights=True, mode="max"
        )
        return [stop]

    theirs, trainer = twins(mlp, regression)
    got, _, [mine], [other] = run(theirs, trainer, make, epochs=8, validation_data=VALIDATION)
    assert len(got.epoch) < 8  # it did stop
    assert (mine.stopped_epoch, mine.best_epoch) == (other.stopped_epoch, other.best_epoch)
    assert_twins(trainer, theirs, EXACT)
    run(theirs, trainer, lambda: [], epochs=1)  # and goes on from the restored weights
    assert_twins(trainer, theirs, EXACT)


@pytest.mark.slow
def test_model_checkpoint(tmp_path: Path) -> None:
    theirs, trainer = twins(mlp, regression)
    places = iter([tmp_path / "ours", tmp_path / "theirs"])

    def make() -> list[Any]:
        place = next(places)
        place.mkdir()
        checkpoint = keras.callbacks.ModelCheckpoint
        return [
            checkpoint(place / "e{epoch}.weights.h5", save_weights_only=True),
            checkpoint(place / "b{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3),
            checkpoint(place / "best.keras", monitor="loss", save_best_only=True),
        ]

    run(theirs, trainer, make, epochs=2)
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert len(names) == 5  # two epochs, two of eight batches, the best
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    for name in names:
        loaded = []
        for place in ("ours", "theirs"):
            path = tmp_path / place / name
            if name.endswith(".keras"):
                loaded.append(keras.models.load_model(path))
            else:
                loaded.append(mlp())
                loaded[-1].load_weights(path)
        assert_same(loaded[0].weights, loaded[1].weights, EXACT, EXACT)
    best = keras.models.load_model(tmp_path / "ours" / "best.keras")
    assert_same(best.optimizer.variables, trainer.optimizer.variables, EXACT, EXACT)


def test_learning_rate_scheduler() -> None:
    def make() -> list[Any]:
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)),
            Recorder(),
        ]

    theirs, trainer = twins(mlp, regression)
    got, _, mine, other = run(theirs, trainer, make)
    assert got.history["learning_rate"] == pytest.approx([0.05, 0.025, 0.05 / 6])
    assert_heard(mine[1].calls, other[1].calls)
    assert_twins(trainer, theirs, EXACT)


def test_reduce_on_plateau() -> None:
    def make() -> list[Any]:
        return [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, mode="max")]

    theirs, trainer = twins(mlp, regression)
    got, _, _, _ = run(theirs, trainer, make, epochs=4)
    assert got.history["learning_rate"][-1] < 0.05  # it did reduce
    assert_twins(trainer, theirs, EXACT)


def test_csv_logger(tmp_path: Path) -> None:
    places = iter([tmp_path / "ours.csv", tmp_path / "theirs.csv"])
    run(
        *twins(mlp, regression),
        lambda: [keras.callbacks.CSVLogger(next(places))],
        validation_data=VALIDATION,
    )
    ours, theirs = (
        list(csv.reader((tmp_path / f"{name}.csv").open())) for name in ("ours", "theirs")
    )
    assert ours[0] == theirs[0]
    np.testing.assert_allclose(
        np.array(ours[1:], "float64"), np.array(theirs[1:], "float64"), EXACT, EXACT
    )


def test_terminate_on_nan() -> None:
    """Stops at the batch that made the loss infinite."""

    def make() -> list[Any]:
        def explode(batch: int, logs: Any = None) -> None:
            if batch == 1:
                bomb.model.layers[-1].bias.assign(np.full(2, np.inf, "float32"))

        bomb = keras.callbacks.LambdaCallback(on_train_batch_end=explode)
        return [bomb, keras.callbacks.TerminateOnNaN(), Recorder()]

    histories = []
    theirs, trainer = twins(mlp, regression)
    mine, other = make(), make()
    options = {"batch_size": 4, "epochs": 3, "shuffle": False}
    histories.append(trainer.fit(X, Y, progress=False, callbacks=mine, **options))
    histories.append(theirs.fit(X, Y, verbose=0, callbacks=other, **options))
    assert histories[0].epoch == histories[1].epoch == [0]
    batches = [[c[:2] for c in calls[2].calls] for calls in (mine, other)]
    assert batches[0] == batches[1]
    assert ("on_train_batch_end", 2) in batches[0]
    assert ("on_train_batch_end", 3) not in batches[0]


def test_backup_and_restore(tmp_path: Path) -> None:
    """A fit that was interrupted goes on as if it had not been."""
    wanted = lone(mlp, regression)
    whole = wanted.fit(X, Y, batch_size=4, epochs=3, shuffle=False, progress=False)

    def interrupt(epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    options = {"batch_size": 4, "epochs": 3, "shuffle": False, "progress": False}
    first = lone(mlp, regression)
    with pytest.raises(KeyboardInterrupt):
        first.fit(X, Y, callbacks=[backup, stop], **options)
    second = lone(mlp, regression)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    history = second.fit(X, Y, callbacks=[backup], **options)
    assert history.epoch == [2]
    np.testing.assert_allclose(history.history["loss"], whole.history["loss"][2:], EXACT)
    assert_twins(second, wanted.model, EXACT)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="Keras's callback writes with TensorFlow")
    theirs, trainer = twins(mlp, regression)
    places = iter([tmp_path / "ours", tmp_path / "theirs"])
    run(theirs, trainer, lambda: [keras.callbacks.TensorBoard(next(places))], epochs=2)
    kinds = [
        {path.parent.name for path in (tmp_path / place).rglob("events*")}
        for place in ("ours", "theirs")
    ]
    assert kinds[0] == kinds[1]
    assert "train" in kinds[0]


def test_callback_list_and_own_history() -> None:
    """A single callback and a ready `CallbackList` are taken as Keras takes them."""
    trainer = lone(mlp, regression)
    single = Recorder()
    trainer.fit(X, Y, batch_size=4, callbacks=single, progress=False)
    assert len(single.calls) == 4 * 2 + 4
    recorder = Recorder()
    ready = keras.callbacks.CallbackList(
        [recorder], add_history=True, model=trainer.model, epochs=2, steps=4, verbose=0
    )
    history = trainer.fit(X, Y, batch_size=4, epochs=2, callbacks=ready, progress=False)
    assert history.epoch == [0, 1]
    assert len(recorder.calls) == 2 * (4 * 2 + 2) + 2


def test_history_is_the_models() -> None:
    trainer = lone(mlp, regression)
    history = trainer.fit(X, Y, batch_size=4, epochs=2, progress=False)
    assert isinstance(history, keras.callbacks.History)
    assert history.model is trainer.model
    assert trainer.model.history is history
