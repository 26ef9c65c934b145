"""A run computes what its fetches need, each thing once, and changes what its operations change.

Witnesses are outside of the graph: Python functions that count how often they are traced, and
callbacks that the compiled program itself makes at every run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import Counted, host, normal, values_of
from trainstep import graph

# Counting while tracing is a side effect, of which trainstep warns.
pytestmark = pytest.mark.filterwarnings("ignore::trainstep.SideEffectWarning")
ROUNDING = {"rtol": 1e-6, "atol": 1e-6}  # a few float32 operations


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


class Watched(layers.Layer):
    """Passes its input on; counts its traces, and the runs of the program that it is part of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = seen = SimpleNamespace()
        self.forget()

        def note(_: Any) -> None:
            seen.ran += 1

        @ops.custom_gradient
        def passed(x: Any) -> Any:
            def backward(*args: Any, upstream: Any = None) -> Any:
                seen.backward += 1
                return upstream if upstream is not None else args[0]

            return 1.0 * x, backward

        self._note, self._passed = note, passed

    def call(self, x: Any) -> Any:
        self.seen.traced += 1
        ts.callback(self._note, ops.sum(x))
        return self._passed(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def forget(self) -> None:
        self.seen.traced = self.seen.ran = self.seen.backward = 0


class Program:
    """A linear model with a witness before the prediction, in the loss and on the gradient."""

    def __init__(self) -> None:
        self.x = graph.placeholder("float32", [None, 2], name="x")
        self.y = graph.placeholder("float32", [None], name="y")
        self.w = graph.Variable([1.0, 2.0], name="w")
        self.forward, self.in_loss, self.in_update = Watched(), Watched(), Watched()
        self.prediction = ops.sum(self.forward(self.x * self.w), axis=-1)
        self.loss = ops.mean(self.in_loss(ops.square(self.prediction - self.y)))
        (self.gradient,) = graph.gradients(self.loss, [self.w])
        pairs = [(self.in_update(self.gradient), self.w)]
        self.train = graph.train.apply_gradients(keras.optimizers.SGD(0.125), pairs)
        for witness in (self.forward, self.in_loss, self.in_update):
            witness.forget()

    def counts(self, what: str) -> tuple[int, int, int]:
        return tuple(getattr(w.seen, what) for w in (self.forward, self.in_loss, self.in_update))


X, Y = np.array([[1.0, 1.0], [2.0, 0.0]], "float32"), np.array([1.0, 2.0], "float32")
# Predictions 3 and 2, errors 2 and 0: loss 2, gradient 2 * [1, 1].


def test_the_prediction_needs_no_label_and_no_backward_pass(session: graph.Session) -> None:
    p = Program()

    for _ in range(2):
        np.testing.assert_array_equal(session.run(p.prediction, {p.x: X}), [3.0, 2.0])

    assert p.counts("ran") == (2, 0, 0)
    assert p.counts("traced") == (1, 0, 0)
    assert p.counts("backward") == (0, 0, 0)
    (event,) = session.ledger
    assert not event.writes


def test_the_loss_needs_no_backward_pass(session: graph.Session) -> None:
    p = Program()

    assert session.run(p.loss, {p.x: X, p.y: Y}) == 2.0

    assert p.counts("ran") == (1, 1, 0)
    assert p.counts("backward") == (0, 0, 0)


def test_the_gradient_needs_no_update(session: graph.Session) -> None:
    p = Program()

    np.testing.assert_array_equal(session.run(p.gradient, {p.x: X, p.y: Y}), [2.0, 2.0])

    assert p.counts("ran") == (1, 1, 0)
    np.testing.assert_array_equal(p.w.numpy(), [1.0, 2.0])


def test_an_update_fetched_with_the_loss_gives_the_loss_before_and_computes_it_once(
    session: graph.Session,
) -> None:
    p = Program()
    feed = {p.x: X, p.y: Y}

    found = session.run([p.train, p.loss, p.gradient, p.prediction, p.w], feed)

    assert found[:2] == [None, 2.0]
    np.testing.assert_array_equal(found[2], [2.0, 2.0])
    np.testing.assert_array_equal(found[3], [3.0, 2.0])
    np.testing.assert_array_equal(found[4], [1.0, 2.0])
    np.testing.assert_array_equal(p.w.numpy(), [0.75, 1.75])
    assert p.counts("ran") == (1, 1, 1)
    assert p.counts("traced") == (1, 1, 1)
    assert p.counts("backward") == (1, 1, 0)
    session.run([p.train, p.loss, p.gradient, p.prediction, p.w], feed)
    assert p.counts("ran") == (2, 2, 2)
    assert p.counts("traced") == (1, 1, 1)  # one program


def test_the_gradients_of_several_updates_share_what_lies_before_them(
    session: graph.Session,
) -> None:
    x = graph.placeholder("float32", [None])
    a, b = graph.Variable(1.0), graph.Variable(2.0)
    witness = Watched()
    loss = ops.mean(witness(a * b * x))
    updates = [graph.train.minimize(keras.optimizers.SGD(1.0), loss, var_list=[v]) for v in (a, b)]
    witness.forget()

    value, _ = session.run([loss, updates], {x: [1.0, 1.0]})

    assert value == 2.0
    assert (a.numpy(), b.numpy()) == (-1.0, 1.0)
    assert witness.seen.ran == 1


def test_two_losses_with_their_updates_are_each_computed_once(session: graph.Session) -> None:
    """As in a GAN: what both are made from, and each of them, in one run."""
    x = graph.placeholder("float32", [None])
    a, b = graph.Variable(1.0), graph.Variable(2.0)
    shared, of_a, of_b = Watched(), Watched(), Watched()
    made = shared(a * b * x)
    losses = [ops.mean(of_a(made)), ops.mean(of_b(ops.square(made)))]
    updates = [
        graph.train.minimize(keras.optimizers.SGD(0.125), loss, var_list=[v])
        for loss, v in zip(losses, (a, b), strict=True)
    ]
    for witness in (shared, of_a, of_b):
        witness.forget()

    values, _ = session.run([losses, updates], {x: [1.0, 1.0]})

    assert values == [2.0, 4.0]
    assert (a.numpy(), b.numpy()) == (0.75, 1.5)
    assert (of_a.seen.ran, of_b.seen.ran) == (1, 1)
    assert shared.seen.ran == 1


def test_a_loss_is_computed_once_for_gradients_by_variables_and_by_inputs(
    session: graph.Session,
) -> None:
    p = Program()
    (by_x,) = graph.gradients(p.loss, [p.x])

    _, loss, slope = session.run([p.train, p.loss, by_x], {p.x: X, p.y: Y})

    assert loss == 2.0
    np.testing.assert_array_equal(slope, [[2.0, 4.0], [0.0, 0.0]])
    assert p.counts("ran") == (1, 1, 1)


def test_a_function_in_the_graph_is_computed_once_for_all_that_use_it(
    session: graph.Session,
) -> None:
    x = graph.placeholder("float32", [None])
    square = Counted(lambda a: a * a)
    node = graph.call(square, x)
    parts = [node + 1.0, node - 1.0, ops.sum(node)]
    built = square.runs

    values = session.run(parts, {x: [1.0, 2.0]})

    assert square.runs - built == 1
    np.testing.assert_array_equal(values[0], [2.0, 5.0])
    assert values[2] == 5.0


def test_what_is_fed_is_not_computed(session: graph.Session) -> None:
    p = Program()

    assert session.run(p.loss, {p.prediction: [1.0, 1.0], p.y: [0.0, 1.0]}) == 0.5

    assert p.counts("ran") == (0, 1, 0)


# What changes


def normalizing() -> tuple[Any, Any, Any, Any]:
    x = graph.placeholder("float32", [None, 2])
    norm = layers.BatchNormalization(momentum=0.75)
    return x, norm, norm(x, training=True), norm(x, training=False)


def test_statistics_stay_in_a_run_without_an_operation(session: graph.Session) -> None:
    x, norm, training, _ = normalizing()
    data = normal(8, 2) + 3.0
    before = values_of(norm.variables)

    for _ in range(2):
        out = session.run(training, {x: data})

    np.testing.assert_allclose(out.mean(0), [0.0, 0.0], atol=1e-5)  # a mean of 8 numbers near 1
    for old, new in zip(before, values_of(norm.variables), strict=True):
        np.testing.assert_array_equal(old, new)


def test_what_a_function_writes_stays_in_a_run_without_an_operation(
    session: graph.Session,
) -> None:
    count = keras.Variable(0.0, trainable=False)

    def counting(a: Any) -> Any:
        count.assign_add(1.0)
        return a + count

    node = graph.call(counting, graph.constant(1.0))

    assert session.run(node) == 2.0
    assert session.run(node) == 2.0
    assert host(count) == 0.0


def test_a_training_operation_moves_statistics_once(session: graph.Session) -> None:
    x, norm, training, _ = normalizing()
    loss = ops.mean(ops.square(training))
    train = graph.train.minimize(keras.optimizers.SGD(0.1), loss)
    data = normal(8, 2) + 3.0

    session.run([train, loss, training], {x: data})

    np.testing.assert_allclose(host(norm.moving_mean), 0.25 * data.mean(0), rtol=1e-5)


def test_statistics_are_read_where_the_layer_is_not_training(session: graph.Session) -> None:
    x, norm, _, testing = normalizing()
    norm.moving_mean.assign([1.0, 2.0])
    data = normal(3, 2)
    wanted = (data - [1.0, 2.0]) / np.sqrt(1.0 + norm.epsilon)

    np.testing.assert_allclose(session.run(testing, {x: data}), wanted, rtol=1e-5, atol=1e-6)


def test_dropout_draws_anew_at_each_run_and_once_in_a_run(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None])
    drop = layers.Dropout(0.5, seed=3)
    dropped, whole = drop(x, training=True), drop(x, training=False)
    ones = np.ones(64, "float32")

    first, total, kept = session.run([dropped, ops.sum(dropped), whole], {x: ones})
    second = session.run(dropped, {x: ones})

    assert set(np.unique(first)) == {0.0, 2.0}
    assert first.sum() == total
    np.testing.assert_array_equal(kept, ones)
    assert not np.array_equal(first, second)


def test_a_gradient_goes_through_the_mask_of_its_run(session: graph.Session) -> None:
    x, w = graph.placeholder("float32", [None]), graph.Variable(np.ones(32, "float32"))
    dropped = layers.Dropout(0.5, seed=3)(x * w, training=True)
    (dw,) = graph.gradients(ops.sum(dropped), [w])

    mask, gradient = session.run([dropped, dw], {x: np.ones(32)})

    np.testing.assert_array_equal(mask, gradient)


def test_the_gradients_of_two_losses_go_through_one_mask(session: graph.Session) -> None:
    w = graph.Variable(np.ones(32, "float32"))
    dropped = layers.Dropout(0.5, seed=3)(1.0 * w, training=True)
    slopes = [graph.gradients(ops.sum(n * dropped), [w]) for n in (1.0, 3.0)]

    mask, ((one,), (three,)) = session.run([dropped, slopes])

    np.testing.assert_array_equal(one, mask)
    np.testing.assert_array_equal(three, 3.0 * mask)


def test_other_weights_stay_as_they_are(session: graph.Session) -> None:
    x, dense = graph.placeholder("float32", [None, 2]), layers.Dense(3)
    out = dense(x)
    other = graph.Variable(1.0)
    before = values_of(dense.variables)

    session.run([out, other.assign(2.0)], {x: normal(2, 2)})

    for old, new in zip(before, values_of(dense.variables), strict=True):
        np.testing.assert_array_equal(old, new)
    assert other.numpy() == 2.0
