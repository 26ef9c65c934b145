"""`while_loop` and `shape`: loops of tensors and sizes at run time, against Python's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, normal
from trainstep import graph

ROUNDING = 1e-6


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


def grown(limit: Any = None) -> tuple[Any, Any, list[Any]]:
    """`x` times `w` until it is large: the placeholder, the variable, the turns and the result."""
    x, w = graph.placeholder("float32", [None]), graph.Variable(2.0)
    bound = 50.0 * w
    found = graph.while_loop(
        lambda i, v: ops.sum(v) < bound, lambda i, v: (i + 1, v * w), [0, x], limit
    )
    return x, w, found


# Values


def test_a_loop_takes_tensors_and_variables_from_around_it(session: graph.Session) -> None:
    x, w, found = grown()

    for values in ([1.0, 1.0], [1.0, 2.0, 3.0], [200.0]):
        array, turns = np.array(values, "float32"), 0
        while array.sum() < 100.0:
            array, turns = array * 2.0, turns + 1
        count, result = session.run(found, {x: values})
        assert count == turns
        np.testing.assert_array_equal(result, array)
    w.load(4.0)
    assert session.run(found[0], {x: [1.0]}) == 4


def test_the_structure_of_the_tensors_is_kept(session: graph.Session) -> None:
    x = graph.placeholder("float32", [])
    alone = graph.while_loop(lambda v: v < 10.0, lambda v: v * 2.0, x, name="alone")
    listed = graph.while_loop(lambda v: v < 10.0, lambda v: v * 2.0, [x])
    named = graph.while_loop(
        lambda s: s["v"] < 10.0, lambda s: {"v": s["v"] * 2.0, "n": s["n"] + 1}, {"v": x, "n": 0}
    )

    assert session.run(["alone", listed, named], {x: 3.0}) == [12.0, [12.0], {"v": 12.0, "n": 2}]
    assert alone.name == "alone"


@pytest.mark.parametrize("symbolic", [False, True])
def test_turns_are_limited(session: graph.Session, symbolic: bool) -> None:
    most = graph.placeholder("int32", [])
    x, _, found = grown(most if symbolic else 3)

    count, result = session.run(found, {x: [1.0], most: 3} if symbolic else {x: [1.0]})

    assert (count, result.tolist()) == (3, [8.0])


def test_loops_and_branches_are_nested(session: graph.Session) -> None:
    n = graph.placeholder("int32", [])

    def collatz(i: Any, v: Any) -> Any:
        return i + 1, graph.cond(ops.equal(v % 2, 0), lambda: v // 2, lambda: 3 * v + 1)

    steps, _ = graph.while_loop(lambda i, v: v > 1, collatz, (0, n))
    total = graph.while_loop(
        lambda i, t: i < n,
        lambda i, t: (
            i + 1,
            graph.while_loop(lambda j, u: j < i, lambda j, u: (j + 1, u + j), (0, t))[1],
        ),
        (0, 0),
    )[1]

    assert session.run(steps, {n: 27}) == 111
    assert session.run(total, {n: 5}) == sum(j for i in range(5) for j in range(i))


def test_a_loop_over_an_axis_of_any_size(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None, 2])
    rows = graph.shape(x)[0]
    _, total = graph.while_loop(
        lambda i, t: i < rows,
        lambda i, t: (i + 1, t + ops.take(x, i, axis=0)),
        (0, np.zeros(2, "float32")),
    )

    for size in (2, 5, 3):
        data = normal(size, 2)
        np.testing.assert_allclose(session.run(total, {x: data}), data.sum(0), rtol=1e-5)


# Gradients


def test_gradients_of_a_loop_with_a_limit(session: graph.Session) -> None:
    x, w, (count, result) = grown(10)
    dw, dx = graph.gradients(result, [w, x])

    for values in ([1.0, 1.0], [3.0, 4.0, 5.0], [1.0]):
        turns, dw_value, dx_value = session.run([count, dw, dx], {x: values})
        assert dw_value == turns * 2.0 ** (turns - 1) * sum(values)
        np.testing.assert_array_equal(dx_value, np.full(len(values), 2.0**turns))


@pytest.mark.slow
def test_a_recurrent_layer_over_any_length_is_trained_as_by_hand(
    session: graph.Session,
) -> None:
    x, cell = graph.placeholder("float32", [None, None, 2]), layers.Dense(2, activation="tanh")
    steps = graph.shape(x)[1]
    _, last = graph.while_loop(
        lambda i, h: i < steps,
        lambda i, h: (i + 1, cell(h + ops.take(x, i, axis=1))),
        (0, ops.zeros_like(x[:, 0])),
        maximum_iterations=5,
    )
    loss = ops.mean(last**2)
    slopes = graph.gradients(loss, cell.trainable_variables)

    def by_hand(data: Any) -> Any:
        h = 0.0 * data[:, 0]
        for i in range(data.shape[1]):
            h = cell(h + data[:, i])
        return ops.mean(h**2)

    for shape in ((2, 3, 2), (4, 5, 2), (3, 4, 2), (1, 1, 2)):
        data = normal(*shape)
        found = session.run([loss, *slopes], {x: data})
        value, grads = ts.value_and_grad(by_hand, cell.trainable_variables)(data)
        assert_same(found, [value, *grads], rtol=1e-5, atol=ROUNDING)


def test_a_loop_beside_what_is_differentiated_needs_no_limit(session: graph.Session) -> None:
    x, w, (_, result) = grown()
    (slope,) = graph.gradients(w * w, w)

    assert session.run([slope, result], {x: [64.0]})[0] == 4.0


def test_gradients_of_an_endless_loop(session: graph.Session, backend: str) -> None:
    x, w, (_, result) = grown()
    (dw,) = graph.gradients(result, w)

    if backend != "jax":
        assert session.run(dw, {x: [1.0]}) == 7 * 2.0**6
        return
    with pytest.raises(ts.ArgumentError, match=r"(?s)`ys`.*jax.*loop `while_loop") as refused:
        session.run(dw, {x: [1.0]})
    assert "`maximum_iterations=`" in str(refused.value)
    assert "keras.ops.scan" in str(refused.value)


def test_a_gradient_inside_a_loop_descends(session: graph.Session) -> None:
    a = graph.placeholder("float32", [])

    def body(v: Any) -> Any:
        (slope,) = graph.gradients((v * v - a) ** 2, v)
        return v - 0.02 * slope

    root = graph.while_loop(lambda v: ops.abs(v * v - a) > 1e-3, body, a)

    assert abs(session.run(root, {a: 4.0}) - 2.0) < 1e-3


# What is refused


def refused(message: str) -> Any:
    return pytest.raises(ts.ArgumentError, match=rf"(?s)(?=.*to fix:   \S).*{message}")


@pytest.mark.plain
@pytest.mark.parametrize(
    ("body", "got"),
    [
        (lambda i, v: i, r"\[int32\[\]\]"),
        (lambda i, v: (i, v[:1]), r"float32\[1\]"),
        (lambda i, v: (i, ops.sum(v)), r"float32\[\]"),
        (lambda i, v: (i + 0.5, v), r"\[float32\[\], float32\[2\]\]"),
    ],
    ids=["structure", "size", "axes", "dtype"],
)
def test_a_body_returns_what_it_takes(body: Any, got: str) -> None:
    x = graph.placeholder("float32", [2])

    with refused(rf"`body`.*\[int32\[\], float32\[2\]\].*got: +.*{got}.*keras\.ops\.cast"):
        graph.while_loop(lambda i, v: i < 3, body, [0, x])


@pytest.mark.plain
def test_what_goes_on_is_a_boolean() -> None:
    with refused(r"`cond`.*returns a boolean.*int32"):
        graph.while_loop(lambda i: i, lambda i: i + 1, 0)


@pytest.mark.plain
@pytest.mark.parametrize("limit", [-1, 2.5, True, "3"], ids=repr)
def test_a_limit_is_a_number_of_turns(limit: Any) -> None:
    with refused("`maximum_iterations`.*integer"):
        graph.while_loop(lambda i: i < 3, lambda i: i + 1, 0, limit)
    with refused(r"`maximum_iterations`.*float32\[\]"):
        graph.while_loop(lambda i: i < 3, lambda i: i + 1, 0, graph.constant(2.0))


@pytest.mark.plain
def test_a_loop_has_tensors_and_functions() -> None:
    with refused("`loop_vars`.*at least one"):
        graph.while_loop(lambda: True, lambda: (), [])
    with refused("`body`.*a function"):
        graph.while_loop(lambda i: i < 3, 3, 0)


def test_a_loop_updates_and_draws_nothing(session: graph.Session, backend: str) -> None:
    w, drop = graph.Variable(1.0), layers.Dropout(0.5)

    with refused("`body`.*updates no variable"):
        graph.while_loop(lambda i: i < 3, lambda i: (w.assign(2.0), i + 1)[1], 0)
    with refused("`body`.*random.*before the loop"):
        graph.while_loop(lambda v: v < 3.0, lambda v: v + graph.random_uniform([]), 0.0)
    dropped = graph.while_loop(lambda v: v < 3.0, lambda v: drop(v, training=True) + 1.0, w)
    if backend != "torch":  # there a loop runs as Python
        with refused("`body`.*seed.*training=False"):
            session.run(dropped)


def test_a_turn_of_a_loop_has_no_value_outside(session: graph.Session) -> None:
    made: list[Any] = []
    last = graph.while_loop(lambda i: i < 3, lambda i: (made.append(i), i + 1)[1], 0)

    for fetch in (made[0], made[0] + 1):
        with pytest.raises(ts.ArgumentError, match=r"(?s)`fetches`.*graph\.while_loop.*return it"):
            session.run(fetch)
    assert session.run(last) == 3


# Sizes


def test_sizes_are_those_of_the_run(session: graph.Session) -> None:
    x = graph.placeholder("float32", [None, 3, None], name="x")
    sizes = graph.shape(x, name="sizes")
    mean = ops.sum(x, axis=(0, 2)) / ops.cast(sizes[0] * sizes[2], "float32")
    slope = graph.gradients(mean, x)

    for shape in ((2, 3, 4), (5, 3, 4), (3, 3, 2), (1, 3, 1)):
        data = normal(*shape)
        found, value, (dx,) = session.run(["sizes", mean, slope], {x: data})
        assert (found.dtype, found.tolist()) == ("int32", list(shape))
        np.testing.assert_allclose(value, data.mean((0, 2)), rtol=1e-5, atol=ROUNDING)
        np.testing.assert_allclose(dx, np.full(shape, 1 / (shape[0] * shape[2])), rtol=ROUNDING)


def test_sizes_that_are_known_and_none_at_all(session: graph.Session) -> None:
    w, number = graph.Variable(np.ones((2, 3), "float32")), graph.constant(1.0)

    assert session.run(graph.shape(w)).tolist() == [2, 3]
    assert session.run(graph.shape(number)).shape == (0,)
    assert session.run(graph.shape([[1, 2]])).tolist() == [1, 2]
