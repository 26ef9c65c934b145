"""Small variables that share an array: the same numbers, whoever looks at them, and whenever.

ROUNDING: no number is computed in another way, but XLA may fuse a step otherwise around a pack (it
does so for norms, which read every gradient), and then rounds the last bit otherwise: 9e-8 was seen
of the number after 26 steps of Adam.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("only JAX's variables are packed", allow_module_level=True)

from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from trainstep._engines.jax.tricks import packed_variables
from trainstep._engines.jax.tricks.packed_variables import pack_of

ROUNDING = {"rtol": 2e-7, "atol": 2e-7}
X, Y = normal(8, 4), normal(8, 1, seed=1)


def model_of(*sizes: int) -> Any:
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(size, activation="tanh") for size in sizes]
    return keras.Sequential([layers.Input((4,)), *hidden, layers.Dense(1)])


def trainer_of(model: Any = None, **more: Any) -> ts.Trainer:
    adam = keras.optimizers.Adam(1e-2)
    return ts.Trainer(model or model_of(6), adam, "mse", metrics=["mae"], **more)


def slots_of(trainer: ts.Trainer) -> list[Any]:
    return [v for v in trainer.optimizer.variables if "momentum" in v.name or "velocity" in v.name]


def state_of(trainer: ts.Trainer) -> list[np.ndarray]:
    metrics = [v for metric in trainer.metrics for v in metric.variables]
    return values_of([*trainer.model.variables, *trainer.optimizer.variables, *metrics])


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs something with every variable in an array of its own."""

    def run(function: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(packed_variables, "_LARGEST", 0)
            return function()

    return run


def test_small_slots_and_metrics_of_a_trainer_are_packed_and_weights_are_not() -> None:
    trainer = trainer_of()
    trainer.train_on_batch(X, Y)

    metrics = [v for m in trainer.metrics for v in m.variables]
    of_optimizer = [pack_of(v) for v in (*slots_of(trainer), trainer.optimizer.iterations)]
    of_metrics = [pack_of(v) for v in (*metrics, trainer._recipe.reset_each_batch)]

    assert len(set(map(id, of_optimizer))) == len(set(map(id, of_metrics))) == 1
    assert None not in (of_optimizer[0], of_metrics[0])
    assert of_optimizer[0] is not of_metrics[0]
    others = [*trainer.model.variables, trainer.optimizer.learning_rate]
    assert all(pack_of(v) is None and type(v) is keras.Variable for v in others)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adam"])
def test_keras_fits_on_after_a_trainer(name: str) -> None:
    """Its `fit` takes every value away for a while, and gives it back."""

    def run(trained_by: Any) -> list[np.ndarray]:
        model = model_of(6)
        model.compile(keras.optimizers.get(name), "mse", metrics=["mae"])
        trained_by(model).train_on_batch(X, Y)
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        trained_by(model).train_on_batch(X, Y)
        return values_of([*model.variables, *model.optimizer.variables])

    assert_same(run(ts.Trainer), run(lambda model: model), rtol=1e-6, atol=1e-6)


def test_the_count_of_an_optimizer_is_pickled_as_a_plain_variable() -> None:
    trainer = trainer_of()
    trainer.train_on_batch(X, Y)
    count = trainer.optimizer.iterations
    assert pack_of(count) is not None

    again = pickle.loads(pickle.dumps(count))

    assert type(again) is keras.Variable
    assert (int(again.value), again.path, again.dtype) == (1, count.path, count.dtype)


def test_what_another_thread_assigns_while_a_pack_is_made_is_kept() -> None:
    variables = [keras.Variable(float(i), trainable=False) for i in range(3)]
    pack = packed_variables.Pack(variables, threading.RLock())
    variables[1].assign(7.0)

    pack.install()

    assert [float(v.value) for v in variables] == [0.0, 7.0, 2.0]


def test_numbers_of_every_kind_keep_their_bits() -> None:
    given = [
        np.array([np.nan, -0.0, 1e-42, np.inf], "float32"),
        np.array([0, -1, 2**31 - 1, -(2**31)], "int32"),
        np.array([0, 1, 2**32 - 1], "uint32"),
        np.array([[True], [False]]),
    ]
    variables = [keras.Variable(x, dtype=str(x.dtype), trainable=False) for x in given]
    packed_variables.pack(variables, {id(v): "some" for v in variables})
    pack = pack_of(variables[0])

    @ts.function
    def turned(step):
        for v in variables:
            v.assign(ops.flip(v.value, axis=0))
        return [v.value + 0 if v.dtype != "bool" else v.value for v in variables]

    def bits(arrays: Any) -> list[bytes]:
        return [np.asarray(x).tobytes() for x in arrays]

    assert bits(v.value for v in variables) == bits(given)
    assert [str(v.value.dtype) for v in variables] == [str(x.dtype) for x in given]
    turned(1)
    assert bits(v.value for v in variables) == bits(x[::-1].copy() for x in given)
    turned(1)
    assert all(pack_of(v) is pack for v in variables)
    for variable, x in zip(variables, given, strict=True):
        variable.assign(x[::-1].copy())
    assert bits(v.value for v in variables) == bits(x[::-1].copy() for x in given)


def test_a_learning_rate_that_is_set_and_looked_at_between_steps(apart: Any) -> None:
    def run() -> list[Any]:
        trainer, seen = trainer_of(), []
        for rate in (0.1, 0.01, 0.5):
            trainer.optimizer.learning_rate = rate
            trainer.train_on_batch(X, Y)
            seen.append(np.float32(trainer.optimizer.learning_rate))
            seen.append(np.asarray(trainer.optimizer.iterations.value))
        assert seen[1::2] == [1, 2, 3]
        assert seen[1].dtype == np.int32
        return [*seen, *state_of(trainer)]

    assert_same(run(), apart(run), **ROUNDING)


def test_large_slots_and_metrics_of_a_function_have_arrays_of_their_own() -> None:
    model, optimizer = model_of(300), keras.optimizers.Adam()
    mae = keras.metrics.MeanAbsoluteError()

    @ts.function
    def step(x, y):
        def loss_of():
            y_pred = model(x)
            mae.update_state(y, y_pred)
            return ops.mean((y_pred - y) ** 2)

        _, gradients = ts.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)

    step(X, Y)

    packed = {v.path for v in optimizer.variables if pack_of(v) is not None}
    sizes = {v.path: v.value.size for v in optimizer.variables if v is not optimizer.learning_rate}
    assert packed == {path for path, size in sizes.items() if size <= 1024}
    assert 1200 in sizes.values()
    assert all(pack_of(v) is None for v in mae.variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"accumulate": 2},
        {"nan_policy": "skip"},
        {"clip_norm": 0.1},
        {"shapes": ts.Shapes(background=False)},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_numbers_are_those_of_variables_apart(apart: Any, how: Any, steps_per_call: int) -> None:
    def run() -> list[np.ndarray]:
        trainer = trainer_of(**how)
        x, y = normal(100, 4), normal(100, 1, seed=2)  # 12 batches of 8, and one of 4
        options = {"batch_size": 8, "shuffle": False, "progress": False}
        trainer.fit(x, y, epochs=2, steps_per_call=steps_per_call, **options)
        trainer.evaluate(x, y)
        return state_of(trainer)

    assert_same(run(), apart(run), **ROUNDING)


@pytest.mark.slow
def test_who_looks_at_a_slot_gets_an_array_that_no_step_changes(apart: Any) -> None:
    def run() -> list[Any]:
        trainer, seen = trainer_of(), []
        for _ in range(3):
            trainer.train_on_batch(X, Y)
            seen.append([v.value for v in slots_of(trainer)])
        return [host(x) for values in seen for x in values]

    assert_same(run(), apart(run), **ROUNDING)


@pytest.mark.slow
def test_a_value_that_is_assigned_is_what_the_next_step_begins_with(apart: Any) -> None:
    def run() -> list[np.ndarray]:
        trainer = trainer_of()
        trainer.train_on_batch(X, Y)
        slot = slots_of(trainer)[1]
        slot.assign(slot + 1.0)
        slots_of(trainer)[0].assign(np.ones(slots_of(trainer)[0].shape))
        trainer.train_on_batch(X, Y)
        return state_of(trainer)

    assert_same(run(), apart(run), **ROUNDING)


@pytest.mark.slow
def test_a_frozen_layer_keeps_its_slots_and_goes_on_with_them(apart: Any) -> None:
    def run() -> list[np.ndarray]:
        trainer = trainer_of(model_of(6, 5))
        for frozen in (False, True, False):
            trainer.model.layers[0].trainable = not frozen
            trainer.train_on_batch(X, Y)
        return state_of(trainer)

    assert_same(run(), apart(run), **ROUNDING)


@pytest.mark.slow
def test_other_functions_read_and_write_packed_slots(apart: Any) -> None:
    def run() -> list[Any]:
        trainer = trainer_of()
        trainer.train_on_batch(X, Y)
        slots = slots_of(trainer)
        norms = ts.function(lambda: [ops.norm(v) for v in slots])

        @ts.function
        def halve():
            slots[1].assign(slots[1] / 2)

        before = norms()
        halve()
        trainer.train_on_batch(X, Y)
        return [*map(host, before), *map(host, norms()), *state_of(trainer)]

    assert_same(run(), apart(run), **ROUNDING)


def test_a_slot_that_another_program_has_read_before_stays_by_itself() -> None:
    trainer = trainer_of()
    trainer.optimizer.build(trainer.model.trainable_variables)
    first, *others = slots_of(trainer)
    look = ts.function(lambda: first.value)
    look()

    trainer.train_on_batch(X, Y)

    assert pack_of(first) is None
    assert all(pack_of(v) is not None for v in others)
    assert np.array_equal(host(look()), host(first))
    assert host(first).any()


def test_copies_and_pickles_are_plain_variables() -> None:
    trainer = trainer_of()
    trainer.train_on_batch(X, Y)
    slot = slots_of(trainer)[1]

    for twin in (copy.copy(slot), copy.deepcopy(slot)):
        assert type(twin) is keras.Variable
        assert np.array_equal(host(twin), host(slot))
    assert isinstance(slot, keras.Variable)
    assert str(host(slot)[0])[:4] in repr(slot)
    assert np.array_equal(pickle.loads(pickle.dumps(host(slot))), host(slot))


def test_a_saved_model_is_loaded_with_its_slots(tmp_path: Path) -> None:
    trainer = trainer_of()
    for _ in range(3):
        trainer.train_on_batch(X, Y)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    again = ts.Trainer(loaded)

    assert_same(values_of(loaded.optimizer.variables), values_of(trainer.optimizer.variables), 0, 0)
    trainer.train_on_batch(X, Y)
    again.train_on_batch(X, Y)
    assert_same(values_of(loaded.variables), values_of(trainer.model.variables), 0, 0)
    # Into packed ones:
    loaded.save_weights(tmp_path / "state.weights.h5")
    trainer.train_on_batch(X, Y)
    trainer.model.load_weights(tmp_path / "state.weights.h5")
    assert_same(values_of(trainer.optimizer.variables), values_of(loaded.optimizer.variables), 0, 0)


@pytest.mark.slow
def test_keras_trains_on_with_packed_slots(apart: Any) -> None:
    def run() -> list[np.ndarray]:
        model = model_of(6)
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
        trainer = ts.Trainer(model)
        for _ in range(2):
            trainer.train_on_batch(X, Y)
            model.train_on_batch(X, Y)
        return state_of(trainer)

    assert_same(run(), apart(run), **ROUNDING)


def test_a_function_on_the_host_may_look_at_a_slot() -> None:
    trainer, seen = trainer_of(), []
    trainer.train_on_batch(X, Y)
    slot = slots_of(trainer)[1]

    def look(loss):
        seen.append(host(slot).copy())
        return loss

    @ts.function
    def step(x, y):
        logs = trainer.train_on_batch(x, y)
        return ts.callback(look, logs["loss"], returns=ts.Spec(()))

    before = host(slot)
    step(X, Y)

    assert np.array_equal(seen[-1], before)
    assert not np.array_equal(host(slot), before)


def test_threads_read_slots_of_completed_steps_while_another_trains() -> None:
    trainer = trainer_of()
    trainer.train_on_batch(X, Y)
    slots, errors = slots_of(trainer), []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                assert all(np.isfinite(host(v)).all() for v in slots)
        except Exception as error:  # whatever it is, the test is about
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        trainer.train_on_batch(X, Y)
    done.set()
    for thread in threads:
        thread.join()

    assert not errors


@pytest.mark.slow
def test_a_layout_takes_packs_apart_and_training_goes_on(apart: Any) -> None:
    def run() -> list[np.ndarray]:
        model = model_of(6)
        trainer = trainer_of(model)
        trainer.train_on_batch(X, Y)
        spread = ts.Trainer(model, strategy=ts.Mirrored())
        spread.train_on_batch(X, Y)
        trainer.train_on_batch(X, Y)
        assert all(pack_of(v) is None and type(v) is keras.Variable for v in slots_of(trainer))
        return state_of(trainer)

    assert_same(run(), apart(run), **ROUNDING)


@pytest.mark.slow
def test_a_dropped_model_takes_its_packs_along() -> None:
    trainer = trainer_of()
    trainer.train_on_batch(X, Y)
    packs = [weakref.ref(pack_of(v)) for v in slots_of(trainer)]

    del trainer
    gc.collect()

    assert not any(ref() for ref in packs)


@pytest.mark.slow
def test_many_slots_fill_several_packs(monkeypatch: pytest.MonkeyPatch, apart: Any) -> None:
    monkeypatch.setattr(packed_variables, "_MOST", 40)

    def run() -> tuple[int, list[np.ndarray]]:
        trainer = trainer_of(model_of(6, 6))
        for _ in range(2):
            trainer.train_on_batch(X, Y)
        return len({id(pack_of(v)) for v in slots_of(trainer)}), state_of(trainer)

    packs, packed = run()

    assert packs > 2
    assert_same(packed, apart(run)[1], **ROUNDING)


# Metrics that start anew ----------------------------------------------------------------------


class Counting(keras.metrics.Metric):
    """Counts its resets in Python, and starts from 10."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.resets = 0
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(1.0)

    def result(self):
        return self.total.value

    def reset_state(self):
        self.resets += 1
        self.total.assign(10.0)


def test_a_metric_of_the_users_is_reset_by_itself_at_every_epoch() -> None:
    counting = Counting()
    trainer = ts.Trainer(model_of(6), "adam", "mse", metrics=[counting], side_effects="allow")

    history = trainer.fit(X, Y, batch_size=4, epochs=3, progress=False).history

    # Before the first epoch, Keras has not looked at the metrics yet, and resets none.
    assert history["counting"] == [2.0, 12.0, 12.0]
    assert counting.resets >= 2


def test_a_reset_sets_every_metric_to_its_start_and_leaves_the_rest() -> None:
    trainer = trainer_of()
    trainer.fit(X, Y, progress=False)
    slots = values_of(slots_of(trainer))

    trainer.reset_metrics()

    assert not any(host(v).any() for m in trainer.metrics for v in m.variables)
    assert_same(values_of(slots_of(trainer)), slots, 0, 0)


def test_a_model_that_resets_metrics_itself_is_asked_to() -> None:
    class Own(keras.Sequential):
        asked = 0

        def reset_metrics(self):
            Own.asked += 1
            super().reset_metrics()

    trainer = ts.Trainer(Own([layers.Input((4,)), layers.Dense(1)]), "adam", "mse")
    trainer.fit(X, Y, epochs=2, progress=False)

    assert Own.asked == 2
