"""Nothing shares memory that should not, and nothing is read past the scope it stands in."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts


def host(x: object) -> np.ndarray:
    return np.array(ops.convert_to_numpy(x))


def variable(*values: float) -> keras.Variable:
    return keras.Variable(np.array(values, "float32"))


def test_a_function_inside_an_eager_gradient_is_part_of_it() -> None:
    w = variable(1.0, 2.0)
    loss = ts.function(lambda: ops.sum(w * w))

    (slope,) = ts.grad(lambda: loss(), [w])()

    assert host(slope).tolist() == [2.0, 4.0]


def test_a_function_inside_a_stateless_scope_reads_and_writes_the_scope() -> None:
    v = variable(1.0)

    @ts.function
    def tenfold():
        v.assign(v * 10.0)
        return v.value

    with keras.StatelessScope(state_mapping=[(v, ops.convert_to_tensor([5.0]))]) as scope:
        assert host(tenfold()).tolist() == [50.0]
    assert host(scope.get_current_value(v)).tolist() == [50.0]
    assert host(v.value).tolist() == [1.0]


def test_a_function_inside_one_that_runs_as_python_is_inlined() -> None:
    v = variable(1.0)

    @ts.function
    def inner():
        v.assign(v * 10.0)
        return v.value

    @ts.function
    def outer(n):
        v.assign(v + 1.0)
        ops.while_loop(lambda i: i < n, lambda i: (i + 1.0,), (ops.zeros(()),))
        return inner()

    assert host(outer(2.0)).tolist() == [20.0]
    assert host(v.value).tolist() == [20.0]


def test_a_step_that_changes_its_argument_leaves_the_callers_batch_alone() -> None:
    @ts.function
    def halved(x):
        x /= 2.0
        return ops.sum(x)

    x = np.full(4, 8.0, "float32")
    assert [float(halved(x)) for _ in range(3)] == [16.0] * 3
    assert x.tolist() == [8.0] * 4


def test_assigning_a_captured_constant_does_not_share_it() -> None:
    start = ops.zeros(3)
    v = variable(1.0, 2.0, 3.0)

    @ts.function
    def reset():
        v.assign(start)

    for _ in range(2):
        reset()
        assert host(v.value).tolist() == [0.0] * 3
        v.assign([5.0, 6.0, 7.0])
    assert host(start).tolist() == [0.0] * 3


def test_returned_values_share_nothing_with_the_variable_or_one_another() -> None:
    v = variable(1.0, 2.0)

    @ts.function
    def step():
        new = v + 1.0
        v.assign(new)
        return new, v.value, v.value

    results = step()
    v.assign([9.0, 9.0])
    assert [host(x).tolist() for x in results] == [[2.0, 3.0]] * 3


def test_a_variable_of_no_layer_is_unfrozen_at_the_next_call() -> None:
    w, b = variable(1.0), variable(2.0)
    w.trainable = False
    step = ts.function(lambda: ts.grad(lambda: ops.sum(w * w + b * b))())

    assert len(step()) == 1
    w.trainable = True
    assert len(step()) == 2
    assert step.ledger[1].changes == (f"variable {w.path!r}.trainable: False -> True",)


def test_a_variable_named_twice_has_its_gradient_twice() -> None:
    w = variable(1.0, 2.0)
    slopes = ts.grad(lambda: ops.sum(w * w), [w, w])()
    assert [host(s).tolist() for s in slopes] == [[2.0, 4.0]] * 2


def test_a_python_predicate_takes_its_branch() -> None:
    step = ts.function(lambda x, flag: ops.cond(flag, lambda: x, lambda: ops.mean(x)))
    assert host(step(np.arange(4.0), False)).shape == ()
    assert host(step(np.arange(4.0), True)).shape == (4,)


def test_a_container_that_hides_tensors_is_refused_by_name() -> None:
    step = ts.function(lambda x: types.SimpleNamespace(loss=ops.sum(x)))
    with pytest.raises(ts.ArgumentError, match="SimpleNamespace"):
        step(np.ones(3))


def test_a_batch_in_another_memory_order_is_the_same_batch() -> None:
    step = ts.function(lambda x: ops.reshape(x, (2, -1)))
    x = np.arange(24.0, dtype="float32").reshape(2, 3, 4)
    swapped = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)

    for batch in (
        x,
        swapped,
        ops.transpose(ops.convert_to_tensor(x.transpose(0, 2, 1)), (0, 2, 1)),
    ):
        np.testing.assert_array_equal(host(step(batch)), x.reshape(2, -1))
    assert step.trace_count == 1


def test_a_value_in_another_memory_order_can_be_assigned_and_read() -> None:
    v = keras.Variable(np.arange(9.0, dtype="float32").reshape(3, 3))
    flat = ts.function(lambda: ops.reshape(v.value, (-1,)))
    flip = ts.function(lambda: v.assign(ops.transpose(v.value)) is None)
    flat()

    flip()

    np.testing.assert_array_equal(host(flat()), np.arange(9.0).reshape(3, 3).T.reshape(-1))


def test_an_unbuilt_model_works_in_a_step_that_loops() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])

    @ts.function
    def step(x):
        ops.while_loop(lambda i: i < 2.0, lambda i: (i + 1.0,), (ops.zeros(()),))
        return model(x)

    assert host(step(np.ones((1, 3)))).shape == (1, 2)
    assert host(step(np.ones((1, 3)))).shape == (1, 2)


def test_a_number_that_would_lose_digits_does_not_fit_its_spec() -> None:
    step = ts.function(signature=[ts.Spec((), "int32")])(lambda n: n)
    assert int(host(step(2))) == 2
    with pytest.raises(ts.ArgumentError, match="`n`"):
        step(1.7)


def test_a_size_that_depends_on_values_is_never_frozen(backend: str) -> None:
    """JAX and TensorFlow cannot have such sizes in a program, or carry them; torch runs Python."""
    step = ts.function(lambda x: ops.sum(x[x > 0.5]) / x[x > 0.5].shape[0])
    if backend == "torch":
        assert float(step(np.array([0.1, 0.9, 0.8]))) == pytest.approx(0.85)
        assert float(step(np.array([0.1, 0.2, 0.6]))) == pytest.approx(0.6)
    else:
        with pytest.raises(Exception, match=r"."):  # in the engine's own words
            step(np.array([0.1, 0.9, 0.8]))


def test_norms_of_mixed_precisions_add_up() -> None:
    wide, narrow = np.array([3.0], "float64"), np.array([4.0], "float16")
    tensors = [ops.convert_to_tensor(wide), ops.convert_to_tensor(narrow)]
    assert float(ts.global_norm(tensors)) == pytest.approx(5.0)
    clipped = ts.clip_by_global_norm(tensors, 2.5)
    assert [float(host(g)[0]) for g in clipped] == [1.5, 2.0]
    assert [g.dtype for g in clipped] == [t.dtype for t in tensors]
