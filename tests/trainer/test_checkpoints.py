"""A run that was stopped ends like one that was not: to the bit, on the same engine."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts


class Stop(Exception):
    """Ends a run."""


class StopAt(keras.callbacks.Callback):
    """Raises after so many batches, or sends a signal."""

    def __init__(self, count: int, signal_: int | None = None) -> None:
        super().__init__()
        self.left, self.signal = count, signal_

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            if self.signal is None:
                raise Stop
            os.kill(os.getpid(), self.signal)


def trainer_of(built: bool = True) -> ts.Trainer:
    keras.utils.set_random_seed(7)
    first = [layers.Input((4,))] if built else []
    model = keras.Sequential(
        [*first, layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 20))
    return ts.Trainer(model, optimizer=optimizer, loss="mse", metrics=["mae"], clip_norm=1.0)


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(43, 4)).astype("float32"), rng.normal(size=(43, 1)).astype("float32")


def fit(trainer: ts.Trainer, directory: Path | None, every: int | None = 2, **more: Any) -> Any:
    kept = None if directory is None else ts.Checkpoints(directory, every=every)
    x, y = data()
    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "progress": False, **more}
    return trainer.fit(x, y, checkpoints=kept, **options)


def state(trainer: ts.Trainer) -> list[Any]:
    found = [*trainer.model.variables, *trainer.optimizer.variables]
    return [ops.convert_to_numpy(v.value) for v in found]


def assert_same(one: ts.Trainer, other: ts.Trainer) -> None:
    for a, b in zip(state(one), state(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stop_at", "built"), [(4, False), (6, True), (9, True)])
def test_a_stopped_run_goes_on(tmp_path: Path, stop_at: int, built: bool) -> None:
    """Six batches an epoch, the last one short; stopped before, at and after the end of one."""
    whole = trainer_of(built)
    history = fit(whole, None, validation_data=data())
    with pytest.raises(Stop):
        fit(trainer_of(built), tmp_path, callbacks=[StopAt(stop_at)])
    np.random.random(5)  # whatever happened since
    again = trainer_of(built)
    rest = fit(again, tmp_path, validation_data=data())
    assert_same(whole, again)
    if rest.history:
        for name, values in rest.history.items():
            assert values == history.history[name][-len(values) :], name


@pytest.mark.slow
def test_several_steps_in_a_call(tmp_path: Path) -> None:
    whole = trainer_of()
    fit(whole, None, steps_per_call=2)
    with pytest.raises(Stop):
        fit(trainer_of(), tmp_path, steps_per_call=2, callbacks=[StopAt(9)])
    again = trainer_of()
    fit(again, tmp_path, steps_per_call=2)
    assert_same(whole, again)


@pytest.mark.slow
def test_a_run_that_ended_trains_no_more(tmp_path: Path) -> None:
    trainer = trainer_of()
    fit(trainer, tmp_path)
    again = trainer_of()
    again.train_on_batch(*(a[:8] for a in data()))  # of another size, other programs would come
    history = fit(again, tmp_path)
    assert history.history == {}
    fit(again, tmp_path, epochs=4)
    whole = trainer_of()
    fit(whole, None, epochs=4)
    assert_same(whole, again)


@pytest.mark.slow
def test_a_run_that_ended_has_its_state(tmp_path: Path) -> None:
    whole, again = trainer_of(), trainer_of(built=False)
    fit(whole, tmp_path)
    fit(again, tmp_path)
    assert_same(whole, again)


def rows(count: int = 0) -> Iterator[Any]:
    """Batches in a random order; so many of them, or without an end."""
    x, y = data()
    rng = np.random.default_rng(1)
    for _ in range(count) if count else itertools.count():
        chosen = rng.integers(0, 43, 8)
        yield x[chosen], y[chosen]


class Shuffled(keras.utils.PyDataset):  # type: ignore[misc]
    """A data set whose epochs have orders of their own."""

    def __init__(self) -> None:
        # Keras's worker of the run that is stopped would go on, and draw from Python's generator.
        super().__init__(workers=0)
        self._batches, self._rng = list(rows(4)), np.random.default_rng(2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]

    def on_epoch_end(self) -> None:
        self._rng.shuffle(self._batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "steps"), [(data, 3), (rows, 4), (Shuffled, None)], ids=["arrays", "rows", "set"]
)
def test_epochs_that_depend_on_those_before(
    tmp_path: Path, source: Callable[[], Any], steps: int | None
) -> None:
    def run(trainer: ts.Trainer, directory: Path | None, **more: Any) -> None:
        kept = None if directory is None else ts.Checkpoints(directory, every=1)
        batch_size = 8 if steps == 3 else None
        options: dict[str, Any] = {"epochs": 4, "progress": False, **more}
        trainer.fit(
            source(), steps_per_epoch=steps, batch_size=batch_size, checkpoints=kept, **options
        )

    whole = trainer_of()
    run(whole, None)
    with pytest.raises(Stop):
        run(trainer_of(), tmp_path, callbacks=[StopAt(6)])
    again = trainer_of()  # which seeds Python's generator: Keras orders its data sets by that one
    np.random.random(5)
    run(again, tmp_path)
    assert_same(whole, again)


@pytest.mark.slow
def test_what_only_the_step_knows_is_saved(tmp_path: Path) -> None:
    """A variable of the loss, and the seed that Keras keeps for draws without one."""

    def made() -> ts.Trainer:
        trainer = trainer_of()
        count = keras.Variable(0.0)

        def loss(y: Any, predicted: Any) -> Any:
            count.assign_add(1.0)
            noise = keras.random.normal(ops.shape(y))
            return ops.mean(ops.square(y - predicted + 0.1 * noise)) / count.value

        return ts.Trainer(trainer.model, optimizer="adam", loss=loss)

    whole = made()
    fit(whole, None)
    with pytest.raises(Stop):
        fit(made(), tmp_path, callbacks=[StopAt(8)])
    again = made()
    fit(again, tmp_path)
    assert_same(whole, again)


@pytest.mark.slow
def test_a_layer_that_is_thawed(tmp_path: Path) -> None:
    """Its slots are not in the checkpoint of the epoch before."""
    x, y = (a[:40] for a in data())

    class Thaw(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].trainable = epoch >= 1

    def run(trainer: ts.Trainer, epochs: int, directory: Path | None) -> None:
        kept = None if directory is None else ts.Checkpoints(directory)
        options: dict[str, Any] = {"batch_size": 8, "progress": False}
        trainer.fit(x, y, epochs=epochs, callbacks=[Thaw()], checkpoints=kept, **options)

    whole, again = trainer_of(), trainer_of()
    run(whole, 3, None)
    run(trainer_of(), 1, tmp_path)
    run(again, 3, tmp_path)
    assert_same(whole, again)


@pytest.mark.slow
def test_generators_are_passed_over(tmp_path: Path) -> None:
    x, y = data()

    def batches() -> Any:
        return ((x[k : k + 8], y[k : k + 8]) for k in range(0, 43, 8))

    def run(trainer: ts.Trainer, directory: Path | None, **more: Any) -> None:
        kept = None if directory is None else ts.Checkpoints(directory, every=1)
        trainer.fit(batches, epochs=2, checkpoints=kept, progress=False, **more)

    whole, again = trainer_of(), trainer_of()
    run(whole, None)
    with pytest.raises(Stop):
        run(trainer_of(), tmp_path, callbacks=[StopAt(8)])
    run(again, tmp_path)
    assert_same(whole, again)


@pytest.mark.slow
def test_sigterm_saves_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        fit(trainer_of(), tmp_path, every=None, callbacks=[StopAt(8, signal.SIGTERM)])
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    manifest = json.loads((tmp_path / "step-8" / "manifest.json").read_text())
    assert (manifest["epoch"], manifest["epoch_step"]) == (1, 2)
    whole, again = trainer_of(), trainer_of()
    fit(whole, None)
    fit(again, tmp_path)
    assert_same(whole, again)


@pytest.mark.slow
def test_sigterm_after_the_last_step_stops(tmp_path: Path) -> None:
    class Last(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as stopped:
        fit(trainer_of(), tmp_path, every=None, callbacks=[Last()])
    assert stopped.value.code == 143
    assert (tmp_path / "step-18").is_dir()


def test_by_hand(tmp_path: Path) -> None:
    trainer, other = trainer_of(), trainer_of()
    saved = ts.Checkpoints(tmp_path)
    assert saved.load(trainer) is None
    trainer.train_on_batch(*data())
    saved.save(trainer)
    expected = state(trainer)
    trainer.train_on_batch(*data())
    other.train_on_batch(*data())
    for each in (trainer, other):
        saved.load(each)
        for a, b in zip(expected, state(each), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_broken_ones_are_passed_over(tmp_path: Path) -> None:
    trainer = trainer_of()
    fit(trainer, tmp_path, every=1)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-18", "step-18.1"]
    file = tmp_path / "step-18.1" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / ".step-99-1").mkdir()
    position = ts.Checkpoints(tmp_path).load(trainer_and_built())
    assert position is not None
    assert (position.epoch, position.step, position.total) == (2, 6, 18)
    (tmp_path / "step-18" / "manifest.json").write_text("{")
    assert ts.Checkpoints(tmp_path).load(trainer_and_built()) is None


@pytest.mark.slow
def test_a_broken_one_does_not_cost_a_new_one(tmp_path: Path) -> None:
    kept = ts.Checkpoints(tmp_path, keep=1)
    x, y = data()
    trainer_of().fit(x, y, epochs=2, checkpoints=kept, progress=False)
    (tmp_path / "step-4" / "manifest.json").write_text("{")
    trainer_of().fit(x, y, epochs=1, checkpoints=kept, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-4"]
    position = kept.load(trainer_and_built())
    assert position is not None
    assert position.total == 2


def test_a_place_that_cannot_be_written_to_is_known_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = trainer_of()
    with pytest.raises(FileExistsError):
        fit(trainer, tmp_path / "file")
    assert trainer.trace_count == 0


def trainer_and_built() -> ts.Trainer:
    trainer = trainer_of()
    trainer.train_on_batch(*data())
    return trainer


@pytest.mark.slow
def test_one_of_another_trainer_is_refused(tmp_path: Path) -> None:
    ts.Checkpoints(tmp_path).save(trainer_and_built())
    model = keras.Sequential([layers.Input((4,)), layers.Dense(6), layers.Dense(1)])
    other = ts.Trainer(model, optimizer="sgd", loss="mse")
    other.train_on_batch(*data())
    before = state(other)
    with pytest.raises(
        ts.CheckpointError, match=r"does not match this trainer[\s\S]*dense[\s\S]*to fix:"
    ):
        ts.Checkpoints(tmp_path).load(other)
    for a, b in zip(before, state(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_one_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """The slots of these two have the same shapes."""
    model = trainer_of().model
    one = ts.Trainer(model, optimizer=keras.optimizers.SGD(momentum=0.9), loss="mse")
    other = ts.Trainer(model, optimizer="rmsprop", loss="mse")
    for trainer in (one, other):
        trainer.train_on_batch(*data())
    ts.Checkpoints(tmp_path).save(one)
    with pytest.raises(ts.CheckpointError, match=r"expected: RMSprop\n +got: +SGD"):
        ts.Checkpoints(tmp_path).load(other)


def test_wrong_arguments() -> None:
    with pytest.raises(ts.ArgumentError, match=r"argument `every`"):
        ts.Checkpoints("x", every=0)
    with pytest.raises(ts.ArgumentError, match=r"argument `keep`"):
        ts.Checkpoints("x", keep=0)


def test_small_floats(tmp_path: Path) -> None:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(2, dtype="bfloat16")])
    trainer = ts.Trainer(model, optimizer="sgd", loss="mse")
    x, _ = data()
    trainer.train_on_batch(x, x[:, :2])
    model.layers[0].kernel.assign(ops.ones((4, 2), "bfloat16") * 1.5)
    saved = ts.Checkpoints(tmp_path)
    saved.save(trainer)
    expected = ops.convert_to_numpy(ops.cast(model.layers[0].kernel.value, "float32"))
    model.layers[0].kernel.assign(ops.zeros((4, 2), "bfloat16"))
    saved.load(trainer)
    found = ops.convert_to_numpy(ops.cast(model.layers[0].kernel.value, "float32"))
    np.testing.assert_array_equal(found, expected)
