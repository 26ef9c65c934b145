"""A failed call changes nothing; what others hold is theirs; threads and Ctrl-C see whole steps."""

from __future__ import annotations

import _thread
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts


def values(variables: Iterable[Any]) -> list[np.ndarray]:
    return [np.array(ops.convert_to_numpy(v.value), copy=True) for v in variables]


def assert_same(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def assert_alive(variables: Iterable[Any]) -> None:
    for v in variables:
        deleted = getattr(v.value, "is_deleted", None)
        assert deleted is None or not deleted(), f"{v.path} holds a deleted buffer"


def fails_on_negative(x: Any) -> Any:
    """`x`, computed by an operation of the engine that fails at run time if an entry is negative."""
    if keras.backend.backend() == "jax":
        import jax

        def check(a: Any) -> np.ndarray:
            if (np.asarray(a) < 0).any():
                raise ValueError("negative input")
            return np.asarray(a)

        return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.control_dependencies([tf.debugging.assert_non_negative(x)]):
            return tf.identity(x)
    import torch

    table = torch.zeros(1, dtype=x.dtype)
    return x + torch.index_select(table, 0, (x < 0).any().to(torch.int64).reshape(1))


class Rig:
    """A model with batch-norm, dropout, a metric and Adam: every kind of state in one step."""

    def __init__(self, fail_at: str = "end") -> None:
        self.model = keras.Sequential(
            [
                keras.layers.Dense(2),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=3),
                keras.layers.Dense(1),
            ]
        )
        self.optimizer = keras.optimizers.Adam(0.1)
        self.metric = keras.metrics.MeanSquaredError()
        self.noise = keras.random.SeedGenerator(5)
        self.raising = False

        @ts.function
        def step(x: Any, y: Any, mode: str = "good") -> Any:
            if fail_at == "start":
                x = fails_on_negative(x)

            def loss_of() -> Any:
                p = self.model(keras.random.dropout(x, 0.1, seed=self.noise), training=True)
                self.metric.update_state(y, p)
                return ops.mean((p - y) ** 2)

            loss, grads = ts.value_and_grad(loss_of, lambda: self.model.trainable_variables)()
            self.optimizer.apply(grads, self.model.trainable_variables)
            if mode == "raise" or self.raising:
                raise ZeroDivisionError("in the middle of tracing")
            if fail_at == "end":
                loss = loss + 0 * ops.sum(fails_on_negative(x))
            return loss

        self.step = step

    @property
    def state(self) -> list[Any]:
        seeds = [
            layer.seed_generator.state
            for layer in self.model.layers
            if hasattr(layer, "seed_generator")
        ]
        return [
            *self.model.variables,
            *self.optimizer.variables,
            *self.metric.variables,
            self.noise.state,
            *seeds,
        ]


X = np.linspace(0.0, 1.0, 32, dtype="float32").reshape(8, 4)
Y = np.linspace(-1.0, 1.0, 8, dtype="float32").reshape(8, 1)


# ------------------------------------------------------------------ failure changes nothing


def test_exception_in_the_middle_of_tracing_changes_nothing() -> None:
    rig = Rig("never")
    rig.step(X, Y)
    before = values(rig.state)

    with pytest.raises(ZeroDivisionError, match="in the middle of tracing"):
        rig.step(X, Y, mode="raise")

    assert_alive(rig.state)
    assert_same(before, values(rig.state))
    assert rig.step.trace_count == 1
    assert np.isfinite(float(rig.step(X, Y)))
    assert int(rig.optimizer.iterations.value) == 2
    assert float(rig.metric.count.value) == 16


def test_exception_while_the_model_builds_itself_leaves_a_model_that_trains() -> None:
    rig = Rig("never")
    rig.raising = True
    seed = values([rig.noise.state])

    with pytest.raises(ZeroDivisionError, match="in the middle of tracing"):
        rig.step(X, Y)

    assert_alive(rig.state)
    assert_same(seed, values([rig.noise.state]))
    assert int(rig.optimizer.iterations.value) == 0
    assert float(rig.metric.count.value) == 0
    rig.raising = False
    assert np.isfinite(float(rig.step(X, Y)))
    assert int(rig.optimizer.iterations.value) == 1
    assert float(rig.metric.count.value) == 8
    assert all(np.isfinite(v).all() for v in values(rig.state))


def test_keyboard_interrupt_while_tracing_changes_nothing() -> None:
    total = keras.Variable(0.0)
    interrupted = [True]

    @ts.function
    def step(x: Any) -> Any:
        total.assign_add(ops.sum(x))
        if interrupted[0]:
            raise KeyboardInterrupt
        return total.value

    with pytest.raises(KeyboardInterrupt):
        step(X)

    assert float(total.value) == 0
    interrupted[0] = False
    assert float(step(np.ones(3))) == 3
    assert float(total.value) == 3


def test_wrong_shape_changes_nothing() -> None:
    rig = Rig("never")
    rig.step(X, Y)
    before = values(rig.state)

    with pytest.raises(Exception):  # noqa: PT011 - the engine's or Keras's own
        rig.step(np.zeros((8, 5), "float32"), Y)

    assert_alive(rig.state)
    assert_same(before, values(rig.state))
    assert np.isfinite(float(rig.step(X, Y)))
    assert int(rig.optimizer.iterations.value) == 2


@pytest.mark.parametrize("fail_at", ["start", "end"])
def test_engine_error_at_run_time_changes_nothing(fail_at: str) -> None:
    rig = Rig(fail_at)
    float(rig.step(X, Y))
    before = values(rig.state)

    for _ in range(3):
        with pytest.raises(Exception):  # noqa: PT011 - each engine has its own
            float(rig.step(-X, Y))

        assert_alive(rig.state)
        assert_same(before, values(rig.state))

    assert np.isfinite(float(rig.step(X, Y)))
    assert int(rig.optimizer.iterations.value) == 2
    assert float(rig.metric.count.value) == 16
    assert rig.step.trace_count == 1


def test_engine_error_at_the_first_run_changes_nothing() -> None:
    total = keras.Variable(0.0)
    count = keras.Variable(0, dtype="int32", trainable=False)

    @ts.function
    def step(x: Any) -> Any:
        count.assign_add(1)
        total.assign_add(ops.sum(x))
        return total.value + ops.sum(fails_on_negative(x))

    with pytest.raises(Exception):  # noqa: PT011
        float(step(-X))

    assert_alive([total, count])
    assert (float(total.value), int(count.value)) == (0.0, 0)
    assert float(step(X)) == pytest.approx(2 * X.sum())
    assert int(count.value) == 1


def test_engine_error_whose_result_nobody_reads_changes_nothing() -> None:
    """On an engine that computes later, the error must not be lost with the variables."""
    total = keras.Variable(0.0)

    @ts.function
    def step(x: Any) -> None:
        total.assign_add(ops.sum(fails_on_negative(x)))

    step(X)
    before = values([total])

    with pytest.raises(Exception):  # noqa: PT011, PT012 - now, or when the state is read
        step(-X)
        values([total])

    assert_same(before, values([total]))
    step(X)
    assert float(total.value) == pytest.approx(2 * X.sum())


def test_bad_embedding_index_changes_nothing(backend: str) -> None:
    if backend == "jax":
        pytest.skip("JAX does not check indices")
    embedding = keras.layers.Embedding(5, 2)
    norm = keras.layers.BatchNormalization()
    head = keras.layers.Dense(1)
    optimizer = keras.optimizers.Adam(0.1)
    metric = keras.metrics.Mean()
    seed = keras.random.SeedGenerator(1)

    @ts.function(optimize="trace")
    def step(i: Any) -> Any:
        def loss_of() -> Any:
            z = norm(keras.random.dropout(embedding(i), 0.1, seed=seed), training=True)
            loss = ops.mean(head(z) ** 2)
            metric.update_state(loss)
            return loss

        trained = lambda: [*embedding.variables, *norm.trainable_variables, *head.variables]  # noqa: E731
        loss, grads = ts.value_and_grad(loss_of, trained)()
        optimizer.apply(grads, trained())
        return loss

    good, bad = np.array([0, 1, 4], "int32"), np.array([0, 1, 7], "int32")
    float(step(good))
    state = [
        *embedding.variables,
        *norm.variables,
        *head.variables,
        *optimizer.variables,
        *metric.variables,
        seed.state,
    ]
    before = values(state)

    with pytest.raises(Exception):  # noqa: PT011
        float(step(bad))

    assert_same(before, values(state))
    assert np.isfinite(float(step(good)))
    assert int(optimizer.iterations.value) == 2
    assert step.trace_count == 1


@pytest.mark.parametrize("draw", ["normal", "uniform", "truncated_normal"])
def test_random_numbers_in_a_step_advance_their_seed_once_a_call(draw: str) -> None:
    seed = keras.random.SeedGenerator(1)

    @ts.function
    def step(x: Any) -> Any:
        return x + getattr(keras.random, draw)((4,), seed=seed)

    first, second = (ops.convert_to_numpy(step(0.0)) for _ in range(2))

    assert not (first == second).all()
    assert [int(n) for n in values([seed.state])[0]] == [1, 2]


# ------------------------------------------------------------------ what somebody else holds


def make_adder(variable: Any) -> Any:
    @ts.function
    def add(x: Any) -> None:
        variable.assign_add(x)

    return add


SNAPSHOTS: dict[str, Callable[[Any], Any]] = {
    "ops.copy": lambda v: ops.copy(v.value),
    "ops.copy of the variable": lambda v: ops.copy(v),
    "ops.convert_to_numpy": lambda v: ops.convert_to_numpy(v.value),
    "np.asarray": lambda v: np.asarray(v),
    "v.numpy()": lambda v: v.numpy(),
    "v.value": lambda v: v.value,
    "v.value.detach()": lambda v: v.value.detach(),
    "v.value.detach().numpy()": lambda v: v.value.detach().numpy(),
    "tf.identity": lambda v: __import__("tensorflow").identity(v.value),
}
ONLY = {
    "v.value": "jax",
    "v.value.detach()": "torch",
    "v.value.detach().numpy()": "torch",
    "tf.identity": "tensorflow",
}


@pytest.mark.parametrize("kind", SNAPSHOTS)
def test_a_snapshot_is_never_changed_by_later_steps(kind: str, backend: str) -> None:
    if ONLY.get(kind, backend) != backend:
        pytest.skip(f"a snapshot only on {ONLY[kind]}")
    v = keras.Variable(np.arange(64, dtype="float32"))
    add = make_adder(v)
    fresh = SNAPSHOTS[kind](v)
    add(1.0)
    later = SNAPSHOTS[kind](v)

    for _ in range(5):
        add(1.0)

    np.testing.assert_array_equal(ops.convert_to_numpy(fresh), np.arange(64))
    np.testing.assert_array_equal(ops.convert_to_numpy(later), np.arange(64) + 1)
    np.testing.assert_array_equal(ops.convert_to_numpy(v), np.arange(64) + 6)


def test_weights_read_by_get_weights_are_never_changed_by_later_steps() -> None:
    layer = keras.layers.Dense(3)
    layer.build((None, 3))
    kept = layer.get_weights()
    copies = [np.array(w, copy=True) for w in kept]
    add = make_adder(layer.kernel)

    for _ in range(3):
        add(1.0)

    assert_same(copies, kept)


def test_a_target_network_filled_by_assign_keeps_its_values() -> None:
    online = keras.Variable(np.ones(64, "float32"))
    target = keras.Variable(np.zeros(64, "float32"))
    add = make_adder(online)
    add(1.0)
    target.assign(online.value)

    for _ in range(4):
        add(1.0)

    assert_alive([online, target])
    np.testing.assert_array_equal(values([target])[0], np.full(64, 2.0))
    np.testing.assert_array_equal(values([online])[0], np.full(64, 6.0))


def test_a_target_network_filled_inside_a_step_keeps_its_values() -> None:
    online = keras.Variable(np.ones(64, "float32"))
    target = keras.Variable(np.zeros(64, "float32"))
    add = make_adder(online)

    @ts.function
    def synchronise() -> None:
        target.assign(online.value)

    synchronise()
    for _ in range(4):
        add(1.0)

    assert_alive([online, target])
    np.testing.assert_array_equal(values([target])[0], np.ones(64))
    synchronise()
    np.testing.assert_array_equal(values([target])[0], np.full(64, 5.0))


def test_two_variables_that_hold_one_array_go_their_own_ways() -> None:
    a = keras.Variable(np.ones(64, "float32"))
    b = keras.Variable(np.zeros(64, "float32"))

    @ts.function
    def both(x: Any) -> None:
        a.assign_add(x)
        b.assign_add(10 * x)

    both(1.0)
    b.assign(a.value)
    both(1.0)
    both(1.0)

    assert_alive([a, b])
    np.testing.assert_array_equal(values([a])[0], np.full(64, 4.0))
    np.testing.assert_array_equal(values([b])[0], np.full(64, 22.0))


def test_two_variables_given_one_value_inside_a_step_go_their_own_ways() -> None:
    a = keras.Variable(np.zeros(64, "float32"))
    b = keras.Variable(np.zeros(64, "float32"))

    @ts.function
    def fill(x: Any) -> None:
        a.assign(x)
        b.assign(x)

    add = make_adder(a)
    fill(np.ones(64, "float32"))
    add(1.0)
    add(1.0)

    np.testing.assert_array_equal(values([a])[0], np.full(64, 3.0))
    np.testing.assert_array_equal(values([b])[0], np.ones(64))


def aligned(n: int) -> np.ndarray:
    """A float32 array at a 64-byte boundary, which engines may adopt without a copy."""
    raw = np.zeros(4 * n + 64, "uint8")
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * n].view("float32")


@pytest.mark.parametrize("size", [64, 100_000])
def test_a_numpy_array_given_to_assign_is_not_changed_by_later_steps(size: int) -> None:
    v = keras.Variable(np.zeros(size, "float32"))
    add = make_adder(v)
    buffer = aligned(size)
    buffer[:] = 3.0
    v.assign(buffer)

    for _ in range(3):
        add(1.0)

    assert (buffer == 3.0).all()
    assert (values([v])[0] == 6.0).all()


@pytest.mark.parametrize("size", [64, 100_000])
def test_a_batch_assigned_in_a_step_is_not_changed_by_later_steps(size: int) -> None:
    v = keras.Variable(np.zeros(size, "float32"))

    @ts.function
    def keep(x: Any) -> None:
        v.assign(x)

    add = make_adder(v)
    batch = aligned(size)
    batch[:] = 3.0
    keep(batch)
    for _ in range(3):
        add(1.0)

    assert (batch == 3.0).all()
    assert (values([v])[0] == 6.0).all()


def test_an_engine_array_given_as_batch_is_not_changed_by_later_steps() -> None:
    v = keras.Variable(np.zeros(64, "float32"))

    @ts.function
    def keep(x: Any) -> None:
        v.assign(x)

    add = make_adder(v)
    batch = ops.convert_to_tensor(np.full(64, 3.0, "float32"))
    keep(batch)
    for _ in range(3):
        add(1.0)

    assert (ops.convert_to_numpy(batch) == 3.0).all()
    assert (values([v])[0] == 6.0).all()


def test_values_that_a_step_returned_are_not_changed_by_later_steps() -> None:
    v = keras.Variable(np.arange(64, dtype="float32"))

    @ts.function
    def step(x: Any) -> dict[str, Any]:
        old = v.value
        v.assign_add(x)
        return {"old": ops.convert_to_tensor(old), "new": v.value, "same": v * 1, "next": v + 1}

    results = [step(1.0) for _ in range(4)]

    for i, result in enumerate(results):
        read = {k: ops.convert_to_numpy(r) for k, r in result.items()}
        np.testing.assert_array_equal(read["old"], np.arange(64) + i)
        np.testing.assert_array_equal(read["new"], np.arange(64) + i + 1)
        np.testing.assert_array_equal(read["same"], np.arange(64) + i + 1)
        np.testing.assert_array_equal(read["next"], np.arange(64) + i + 2)
    assert_alive([v])


def test_a_returned_value_of_a_variable_that_is_only_read_is_not_changed_by_other_steps() -> None:
    v = keras.Variable(np.arange(64, dtype="float32"))
    read = ts.function(lambda: v.value)
    add = make_adder(v)

    results = []
    for _ in range(4):
        results.append(read())
        add(1.0)

    for i, result in enumerate(results):
        np.testing.assert_array_equal(ops.convert_to_numpy(result), np.arange(64) + i)


def test_changing_a_returned_value_does_not_change_the_variable(backend: str) -> None:
    if backend != "torch":
        pytest.skip("only torch's tensors can be changed in place")
    v = keras.Variable(np.zeros(64, "float32"))

    @ts.function
    def step(x: Any) -> Any:
        v.assign_add(x)
        return v.value

    result = step(1.0)
    result.detach().add_(100.0)

    assert (values([v])[0] == 1.0).all()


def test_a_batch_buffer_overwritten_after_the_call_does_not_change_the_result() -> None:
    total = keras.Variable(np.zeros(250_000, "float32"))

    @ts.function
    def step(x: Any) -> tuple[Any, Any]:
        for _ in range(5):
            x = ops.sqrt(x * x)
        total.assign_add(x)
        return x, ops.sum(x)

    batch = aligned(250_000)
    for i in range(1, 6):
        batch[:] = i
        result, summed = step(batch)
        batch[:] = -1e6
        assert (ops.convert_to_numpy(result) == i).all()
        assert float(summed) == pytest.approx(250_000 * i, rel=1e-4)
    assert (values([total])[0] == 15.0).all()


def test_a_batch_that_is_returned_as_it_is_does_not_follow_the_callers_buffer() -> None:
    kept = keras.Variable(np.zeros(1000, "float32"))

    @ts.function
    def step(x: Any) -> Any:
        kept.assign(x)
        return x

    batch = aligned(1000)
    batch[:] = 1.0
    result = step(batch)
    batch[:] = 2.0

    assert (ops.convert_to_numpy(result) == 1.0).all()
    assert (values([kept])[0] == 1.0).all()


# ------------------------------------------------------------------ threads


def run_threads(*bodies: Callable[[], None]) -> None:
    """Starts all bodies at one moment and raises the first error of any of them."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


def test_threads_on_one_state_lose_no_update_and_see_whole_steps() -> None:
    counters = [keras.Variable(np.zeros(16, "float32"), name=f"c{i}") for i in range(6)]

    @ts.function
    def train(x: Any) -> None:
        for c in counters:
            c.assign_add(x)

    @ts.function
    def predict(x: Any) -> Any:
        return ops.stack([c.value for c in counters]) * x

    torn: list[np.ndarray] = []

    def increment() -> None:
        for _ in range(150):
            train(1.0)

    def look() -> None:
        last = -1.0
        for _ in range(150):
            seen = ops.convert_to_numpy(predict(1.0))
            if not (seen == seen.flat[0]).all() or seen.flat[0] < last:
                torn.append(seen)
            last = seen.flat[0]

    run_threads(increment, increment, increment, look, look)

    assert not torn
    assert_alive(counters)
    for c in values(counters):
        assert (c == 450).all()
    assert (train.trace_count, predict.trace_count) == (1, 1)


def test_threads_that_train_and_predict_on_one_model_see_the_path_of_one_trainer() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = keras.Sequential(
            [
                keras.layers.Dense(3, kernel_initializer="ones"),
                keras.layers.Dense(1, kernel_initializer="ones"),
            ]
        )
        model.build((None, 4))
        optimizer = keras.optimizers.Adam(0.01)

        @ts.function
        def train(x: Any, y: Any) -> Any:
            loss, grads = ts.value_and_grad(
                lambda: ops.mean((model(x) - y) ** 2), model.trainable_variables
            )()
            optimizer.apply(grads, model.trainable_variables)
            return loss

        return train, ts.function(lambda x: model(x, training=False)), optimizer

    train, predict, _ = make()
    path = [ops.convert_to_numpy(predict(X))]
    for _ in range(60):
        train(X, Y)
        path.append(ops.convert_to_numpy(predict(X)))
    train, predict, optimizer = make()
    seen: list[np.ndarray] = []

    def work() -> None:
        for _ in range(30):
            train(X, Y)

    def look() -> None:
        for _ in range(60):
            seen.append(np.array(ops.convert_to_numpy(predict(X))))

    run_threads(work, work, look, look)

    assert int(optimizer.iterations.value) == 60
    np.testing.assert_allclose(ops.convert_to_numpy(predict(X)), path[-1], rtol=1e-4, atol=1e-5)
    for prediction in seen:
        assert min(np.abs(prediction - p).max() for p in path) < 1e-4


def test_threads_on_different_models_do_not_disturb_one_another() -> None:
    totals = [keras.Variable(np.zeros(8, "float32")) for _ in range(4)]
    adders = [make_adder(v) for v in totals]

    def work(i: int) -> None:
        for _ in range(100):
            adders[i](float(i + 1))

    run_threads(*(lambda i=i: work(i) for i in range(4)))

    for i, total in enumerate(values(totals)):
        assert (total == 100 * (i + 1)).all()
    assert [a.trace_count for a in adders] == [1, 1, 1, 1]


def test_first_calls_that_race_cost_one_trace() -> None:
    total = keras.Variable(0.0)
    traced = []

    @ts.function
    def step(x: Any) -> None:
        traced.append(1)
        time.sleep(0.05)
        total.assign_add(ops.sum(x))

    run_threads(*([lambda: step(np.ones(4, "float32"))] * 6))

    assert float(total.value) == 24
    assert step.trace_count == len(step.ledger) == 1
    assert len(traced) == 1


def test_a_thread_that_traces_and_one_that_runs_do_not_disturb_one_another() -> None:
    total = keras.Variable(0.0)

    @ts.function(shapes="exact")
    def step(x: Any) -> None:
        total.assign_add(ops.sum(x))

    step(np.ones(1, "float32"))

    def run() -> None:
        for _ in range(200):
            step(np.ones(1, "float32"))

    def trace() -> None:
        for n in range(2, 8):
            step(np.ones(n, "float32"))

    run_threads(run, trace)

    assert float(total.value) == 201 + sum(range(2, 8))
    assert step.trace_count == 7


def test_eager_keras_in_another_thread_is_not_caught_by_a_trace() -> None:
    inside, go = threading.Event(), threading.Event()
    traced, other = keras.Variable(0.0), keras.Variable(0.0)

    @ts.function
    def step(x: Any) -> None:
        traced.assign_add(x)
        inside.set()
        go.wait(60)

    def eager() -> None:
        inside.wait(60)
        other.assign(7.0)
        go.set()

    run_threads(lambda: step(1.0), eager)

    assert (float(traced.value), float(other.value)) == (1.0, 7.0)
    assert step.ledger[0].writes == (traced.path,)


# ------------------------------------------------------------------ Ctrl-C


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("count", "one"), [(10, 1.0), (20, np.ones(16, "float32"))])
def test_ctrl_c_at_any_moment_leaves_the_state_of_a_completed_step(count: int, one: Any) -> None:
    counters = [keras.Variable(np.zeros(16, "float32"), name=f"c{i}") for i in range(count)]

    @ts.function
    def step(x: Any) -> Any:
        for c in counters:
            c.assign_add(x)
        return counters[0].value

    step(one)
    completed = 1
    armed, fired, over = threading.Event(), threading.Event(), threading.Event()
    moments = random.Random(7)

    def press() -> None:
        while not over.is_set():
            if armed.wait(0.05):
                armed.clear()
                time.sleep(moments.uniform(0.0, 0.012))
                _thread.interrupt_main()
                fired.set()

    finger = threading.Thread(target=press, daemon=True)
    finger.start()
    interrupts = 0
    end = time.monotonic() + 4
    try:
        while time.monotonic() < end:
            base, calls = completed, 0
            try:
                fired.clear()
                armed.set()
                while not (fired.is_set() and calls > 5000):
                    calls += 1  # counted before the call: it may or may not have completed
                    step(one)
            except KeyboardInterrupt:
                interrupts += 1
            assert_alive(counters)
            seen = np.stack(values(counters))
            assert (seen == seen.flat[0]).all(), f"torn after interrupt {interrupts}: {seen[:, 0]}"
            completed = int(seen.flat[0])
            assert base + calls - 1 <= completed <= base + calls
    finally:
        over.set()
        finger.join(10)

    assert interrupts > 20
    before = completed
    step(one)
    assert all((c == before + 1).all() for c in values(counters))
    assert step.trace_count == 1


def test_ctrl_c_in_one_function_does_not_lock_another_thread_out() -> None:
    total = keras.Variable(0.0)

    @ts.function
    def step(x: Any, stop: bool) -> None:
        total.assign_add(x)
        if stop:
            raise KeyboardInterrupt

    step(1.0, False)
    with pytest.raises(KeyboardInterrupt):
        step(1.0, True)

    run_threads(lambda: step(1.0, False))

    assert float(total.value) == 2.0


def test_a_cleared_session_does_not_hide_the_step_around_a_call() -> None:
    """Keras keeps the current scope in an object that `clear_session` replaces."""
    total = keras.Variable(0.0)

    @ts.function
    def add(x: Any) -> Any:
        total.assign_add(ops.sum(x))
        return x * 1

    @ts.function
    def twice(x: Any) -> Any:
        return add(add(x))

    x = ops.ones(3)
    for _ in range(3):
        add(x)
    keras.utils.clear_session(free_memory=False)
    for _ in range(3):
        twice(x)

    assert float(total.value) == 9 + 3 * 6
    assert twice.trace_count == 1
