"""Sizes that vary and what may go wrong: refusals, failures, threads, bounds, work done ahead.

Whatever a step asks about a size in Python, the numbers are those of its exact shape.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from tests.streams import Student, Witness, batch, kinds, ones
from trainstep.testing import assert_traces, filling, wait_for_compilation

EXACT = 1e-5
HERE = Path(__file__).name


def on_jax() -> bool:
    return keras.backend.backend() == "jax"


@pytest.fixture
def told() -> Iterator[Callable[[], list[str]]]:
    """What users were warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(w.message) for w in caught if issubclass(w.category, ts.SizesWarning)]


def line_of(function: Callable[..., Any], text: str) -> int:
    """The line of this file on which a function has some text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# What a step asks about a size.


def test_a_case_by_size_has_programs_of_its_own_on_the_other_side(told: Any, backend: str) -> None:
    witness = Witness()

    @ts.function(shapes="bucket")
    def step(x: Any) -> Any:
        if witness(x).shape[0] > 8:
            return ops.sum(x)
        return -ops.sum(x)

    for n in (3, 8, 12, 5, 9, 12, 1, 13, 8):
        assert float(step(np.ones((n, 2), "float32"))) == (2 * n if n > 8 else -2 * n)
    assert step.trace_count == witness.runs
    assert len(told()) == 1
    if backend == "jax":
        assert step.trace_count == 4  # one for all up to 8; 9, 12 and 13
        assert "8" in told()[0]
        others = [e for e in step.ledger if e.kind == "trace"][1:]
        assert all("8" in e.reason for e in others), step.ledger
        assert kinds(step.ledger)["refused"] == 0


def looped(x: Any) -> Any:
    total = 0.0
    for i in range(x.shape[0]):
        total = total + x[i]
    return total


def test_a_loop_over_the_size_is_refused_with_its_line(told: Any) -> None:
    step = ts.function(looped)
    for n in (3, 4, 5, 3, 4, 2):
        x = normal(n, 2, seed=n)
        np.testing.assert_allclose(host(step(x)), x.sum(0), rtol=1e-5, atol=1e-6)
    where = f"{HERE}:{line_of(looped, 'range(')}"
    (text,) = told()
    assert where in text
    assert "looped" in text
    (refused,) = [e for e in step.ledger if e.kind == "refused"]
    assert where in refused.reason
    assert not refused.runs_python
    assert refused.advice


def test_the_warning_is_of_the_line_that_called() -> None:
    step = ts.function(looped, name="again")
    step(np.ones((3, 2), "float32"))
    with pytest.warns(ts.SizesWarning) as caught:
        step(np.ones((4, 2), "float32"))
    (warning,) = [w for w in caught if w.category is ts.SizesWarning]
    assert Path(warning.filename).name == HERE
    assert issubclass(ts.SizesWarning, UserWarning)


def test_a_refused_step_is_warned_of_only_where_sizes_vary(told: Any) -> None:
    step = ts.function(looped)
    for _ in range(3):
        step(np.ones((3, 2), "float32"))
    exactly = ts.function(looped, shapes="exact")
    for n in (3, 4):
        exactly(np.ones((n, 2), "float32"))
    assert not told()


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
def test_a_case_of_one_row() -> None:
    @ts.function
    def step(x: Any) -> Any:
        if x.shape[0] == 1:
            return -ops.sum(x)
        return ops.sum(x)

    for n in (4, 6, 1, 3, 1, 5):
        assert float(step(np.ones((n, 2), "float32"))) == (-2 if n == 1 else 2 * n)


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
def test_a_case_of_one_row_that_comes_first() -> None:
    @ts.function(shapes="bucket")
    def step(x: Any) -> Any:
        return -ops.sum(x) if x.shape[0] == 1 else ops.sum(x)

    for n in (1, 4, 1, 6):
        assert float(step(np.ones((n, 2), "float32"))) == (-2 if n == 1 else 2 * n)


@functools.lru_cache
def remembered(n: Any) -> float:
    return 2.0 if n == 4 else 1.0


ASKS: dict[str, Callable[[Any], Any]] = {
    "len": lambda x: ops.sum(x) / len(x),
    "divided by the size": lambda x: ops.sum(x) / x.shape[0],
    "divided by ops.shape": lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"),
    "float": lambda x: ops.sum(x) * float(x.shape[0]),
    "int": lambda x: ops.sum(x) * int(x.shape[0]),
    "a key of a dict": lambda x: ops.sum(x) * {4: 2.0}.get(x.shape[0], 1.0),
    "a shape as a key": lambda x: ops.sum(x) * {(4, 2): 2.0}.get(tuple(x.shape), 1.0),
    "a member of a set": lambda x: ops.sum(x) * (2.0 if x.shape[0] in {4, 5} else 1.0),
    "a member of a list": lambda x: ops.sum(x) * (2.0 if x.shape[0] in [4, 5] else 1.0),
    "a member of a range": lambda x: ops.sum(x) * (2.0 if x.shape[0] in range(4, 6) else 1.0),
    "a cached function": lambda x: ops.sum(x) * remembered(x.shape[0]),
    "a string": lambda x: ops.sum(x) * (2.0 if str(x.shape[0]) == "4" else 1.0),
    "a formatted string": lambda x: ops.sum(x) * (2.0 if f"{x.shape[0]:d}" == "4" else 1.0),
    "an equal shape": lambda x: ops.sum(x) * (2.0 if tuple(x.shape) == (4, 2) else 1.0),
    "even": lambda x: ops.sum(x) * (2.0 if x.shape[0] % 2 == 0 else 1.0),
    "half": lambda x: ops.sum(x[: x.shape[0] // 2], axis=0),
    "the smaller": lambda x: ops.sum(x[: min(x.shape[0], 4)], axis=0),
    "the larger": lambda x: ops.sum(x) * max(x.shape[0], 4),
    "not none": lambda x: ops.sum(x) * (1.0 if x.shape[0] is not None else 2.0),
    "truth": lambda x: ops.sum(x) if x.shape[0] else ops.sum(x) - 1.0,
    "numpy": lambda x: ops.sum(x * np.arange(x.shape[0], dtype="float32")[:, None]),
    "a numpy size": lambda x: ops.sum(x) * float(np.prod(np.shape(x))),
    "list of rows": lambda x: ops.stack([row * 2.0 for row in x]),
    "unstack": lambda x: ops.stack(ops.unstack(x, axis=0)[::-1]),
    "split": lambda x: ops.sum(ops.split(x, 1, axis=0)[0]),
    "arange": lambda x: x * ops.cast(ops.arange(ops.shape(x)[0]), "float32")[:, None],
    "ones of the shape": lambda x: ops.concatenate([x, ops.ones((ops.shape(x)[0], 1))], axis=1),
    "flat": lambda x: ops.reshape(x, (-1,)),
    "in pairs": lambda x: ops.reshape(x, (ops.shape(x)[0] * 2,)),
    "strided": lambda x: x[::2],
    "the last row": lambda x: x[-1],
    "all but the last": lambda x: x[:-1],
    "root of the size": lambda x: ops.sum(x) / np.sqrt(x.shape[0]),
    "eye": lambda x: ops.matmul(ops.eye(x.shape[0]), x),
    "pairs": lambda x: ops.matmul(x, ops.transpose(x)) / x.shape[0],
    "size of": lambda x: ops.sum(x) / float(ops.size(x)),
}


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
@pytest.mark.parametrize("what", ASKS)
def test_whatever_is_asked_about_a_size_the_numbers_are_exact(what: str) -> None:
    """Or an error, the same that an exact shape raises; never another number."""
    asks = ASKS[what]
    step = ts.function(asks, shapes=ts.Shapes("bucket", background=False))
    for n in (5, 4, 1):
        x = 0.5 + np.abs(normal(n, 2, seed=n))
        wanted = host(asks(ops.convert_to_tensor(x)))
        try:
            found = host(step(x))
        except Exception as error:
            with pytest.raises(type(error)):
                ts.function(asks, shapes="exact")(x)
        else:
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
def test_an_answer_about_a_size_that_python_remembers_is_not_taken_for_granted() -> None:
    """The cached function asks `n == 4` in the first function's trace only."""

    @functools.lru_cache
    def scale(n: Any) -> float:
        return 2.0 if n == 4 else 1.0

    for sign in (1.0, -1.0):
        step = ts.function(lambda x, s=sign: s * scale(x.shape[0]) * ops.sum(x), shapes="bucket")
        for n in (5, 4):
            found = float(step(np.ones((n, 2), "float32")))
            assert found == sign * (16 if n == 4 else 10)


def test_an_error_that_only_sizes_that_vary_raise_is_a_refusal(told: Any) -> None:
    @ts.function
    def step(x: Any) -> Any:
        if not isinstance(x.shape[0], int):
            raise RuntimeError("made for numbers")
        return ops.sum(x)

    for n in (3, 4, 5):
        assert float(step(np.ones((n, 2), "float32"))) == 2 * n
    assert len(told()) <= 1


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
def test_a_refused_record_leaves_no_trace_in_variables() -> None:
    """Writes, draws and metrics before the refused line happen once a call."""
    count, seed = keras.Variable(0, dtype="int32", trainable=False), keras.random.SeedGenerator(1)
    mean = keras.metrics.Mean()

    @ts.function
    def step(x: Any) -> Any:
        count.assign_add(1)
        drawn = keras.random.normal((), seed=seed)
        mean.update_state(ops.sum(x))
        return looped(x), drawn

    other = keras.random.SeedGenerator(1)
    sizes = (3, 4, 5, 3, 4)
    for n in sizes:
        _, drawn = step(np.ones((n, 2), "float32"))
        assert float(drawn) == pytest.approx(float(keras.random.normal((), seed=other)), rel=1e-6)
    assert int(count.value) == len(sizes)
    assert float(mean.result()) == pytest.approx(2 * np.mean(sizes))


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
@pytest.mark.parametrize("refused", [True, False])
def test_a_limit_of_traces_raises_and_leaves_the_state(refused: bool) -> None:
    total = keras.Variable(np.zeros(2, "float32"))

    @ts.function(max_traces=3)
    def step(x: Any) -> Any:
        total.assign_add(looped(x) if refused else ops.sum(x, axis=0))
        return ops.sum(x)

    done = 0

    def run() -> None:
        nonlocal done
        for n in (3, 4, 5, 6, 7):
            step(np.ones((n, 2), "float32"))
            done += n

    if not refused:
        run()
        assert step.trace_count == 2
        return
    with pytest.raises(ts.RetraceLimitError, match="3") as caught:
        run()
    assert done in (3 + 4, 3 + 4 + 5)
    np.testing.assert_array_equal(host(total), [done, done])
    assert step.trace_count == 3
    assert HERE in str(caught.value)
    assert float(step(np.ones((4, 2), "float32"))) == 8  # what was made still serves
    np.testing.assert_array_equal(host(total), [done + 4, done + 4])


def test_the_error_of_a_limit_says_why_sizes_cost_traces() -> None:
    step = ts.function(looped, max_traces=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ts.RetraceLimitError) as caught:
            [step(np.ones((n, 2), "float32")) for n in (3, 4, 5)]
    assert "range(" in str(caught.value) or f"{HERE}:{line_of(looped, 'range(')}" in str(
        caught.value
    )


# Failures.


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
@pytest.mark.parametrize("policy", ["auto", "bucket"])
def test_an_exception_at_one_size_leaves_the_state(policy: str) -> None:
    student = Student(norm=False, shapes=policy)
    train = student.train

    def step(x: Any, y: Any) -> Any:
        found = train(x, y)
        if x.shape[0] == 7:
            raise ValueError("seven")
        return found

    function = ts.function(step, shapes=policy)
    for n in (4, 5):
        function(*batch(n))
    before = values_of(student.state)
    for _ in range(2):
        with pytest.raises(ValueError, match="seven"):
            function(*batch(7))
        assert_same(student.state, before, 0, 0)
    function(*batch(6))
    assert np.any(host(student.model.weights[0]) != before[0])
    wait_for_compilation()


def test_a_wrong_width_at_a_new_size_leaves_the_state(told: Any) -> None:
    student = Student(norm=False, shapes="bucket")
    student.run((5, 3))
    before = values_of(student.state)
    with pytest.raises(Exception, match=r"(?s)(3|shape|Incompatible|incompatible)"):
        student.step(np.ones((6, 3), "float32"), np.ones((6, 2), "float32"))
    assert_same(student.state, before, 0, 0)
    student.run((4,))
    assert student.step.trace_count <= 3


def test_an_error_at_any_size_is_not_blamed_on_sizes(told: Any) -> None:
    """A layer of the wrong width raises at its exact shape too: there is nothing to warn of."""
    dense = layers.Dense(2)
    dense.build((None, 4))
    step = ts.function(lambda x: dense(x), shapes="bucket")
    step(np.ones((5, 4), "float32"))
    with pytest.raises(Exception, match=r"(?s)(3|shape|ncompatible)"):
        step(np.ones((6, 3), "float32"))
    assert not told()
    assert kinds(step.ledger)["refused"] == 0


def test_a_snapshot_outlives_steps_of_other_sizes() -> None:
    student = Student(norm=False, shapes=ts.Shapes(background=False, patience=1))
    student.run((8,))
    kernel = student.model.weights[0]
    held = kernel.value if on_jax() else ops.copy(kernel)
    wanted = np.array(host(held), copy=True)
    view = np.asarray(held) if on_jax() else None
    student.run((5, 3, 8, 20, 1))
    np.testing.assert_array_equal(host(held), wanted)
    if view is not None:
        np.testing.assert_array_equal(view, wanted)
    assert np.any(host(kernel) != wanted)


def test_a_buffer_may_be_refilled_after_the_call() -> None:
    step = ts.function(lambda x: (ops.sum(x), x), shapes="bucket")
    buffer = np.ones((64, 2), "float32")
    for n in (40, 64, 7):
        buffer[:] = 1
        total, rows = step(buffer[:n])
        buffer[:] = 0
        assert float(total) == 2 * n
        np.testing.assert_array_equal(host(rows), np.ones((n, 2)))


# Structure.


def test_functions_in_functions_take_many_sizes() -> None:
    inner = ts.function(lambda x: ops.mean(x, axis=0))

    @ts.function
    def outer(x: Any) -> Any:
        return x - inner(x), inner(x[:1])

    for n in (4, 3, 9):
        x = normal(n, 2, seed=n)
        centred, first = outer(x)
        np.testing.assert_allclose(host(centred), x - x.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(host(first), x[0], rtol=1e-5, atol=1e-6)
    assert outer.trace_count == 2


def test_control_flow_over_rows_of_any_number() -> None:
    @ts.function
    def step(x: Any) -> Any:
        positive = ops.cond(ops.sum(x) > 0, lambda: ops.max(x), lambda: ops.min(x))
        n = ops.shape(x)[0]
        _, total = ops.while_loop(
            lambda i, _: i < n, lambda i, s: (i + 1, s + x[i, 0]), (0, ops.zeros(()))
        )
        return positive, total

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.SizesWarning)
        for n in (4, 3, 9, 1):
            x = normal(n, 2, seed=n)
            found, total = step(x)
            assert float(found) == (x.max() if x.sum() > 0 else x.min())
            assert float(total) == pytest.approx(x[:, 0].sum(), rel=1e-5, abs=1e-6)


def test_a_model_made_in_a_closure_and_not_built() -> None:
    def make(**options: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

        @ts.function(**options)
        def step(x: Any) -> Any:
            loss, gradients = ts.value_and_grad(
                lambda: ops.mean(model(x) ** 2), lambda: model.trainable_variables
            )()
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        return model, step

    (model, step), (other, exactly) = make(), make(shapes="exact")
    for i, n in enumerate((5, 3, 8)):
        x = normal(n, 4, seed=i)
        assert float(step(x)) == pytest.approx(float(exactly(x)), rel=1e-5)
    assert_same(model.weights, other.weights, EXACT, EXACT)
    assert step.trace_count == 2


def test_bucket_builds_a_model_in_its_first_call() -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Dense(2)])
    step = ts.function(lambda x: model(x), shapes="bucket")
    for n in (5, 3):
        x = normal(n, 4, seed=n)
        found = host(step(x))
        np.testing.assert_allclose(found, host(model(x)), rtol=1e-5, atol=1e-6)
    assert step.trace_count <= 2


def test_a_layer_frozen_between_sizes_takes_effect() -> None:
    student = Student(shapes=ts.Shapes(background=False))
    student.run((6, 4))
    dense = student.model.layers[-1]
    dense.trainable = False
    before = values_of(dense.weights)
    student.run((5, 6, 3))
    assert_same(dense.weights, before, 0, 0)
    traced = [e for e in student.step.ledger if e.kind == "trace"]
    assert "trainable: True -> False" in str(traced[2].changes), student.step.ledger
    assert student.step.trace_count == student.witness.runs <= 4
    dense.trainable = True
    with assert_traces(student.step, 0):
        student.run((6, 4))
    assert np.any(host(dense.weights[0]) != before[0])


def test_methods_and_models_as_arguments() -> None:
    class Learner:
        def __init__(self) -> None:
            self.scale = keras.Variable(2.0)

        @ts.function
        def step(self, model: Any, x: Any) -> Any:
            return self.scale * ops.sum(model(x))

    learner, model = Learner(), keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    for n in (4, 3, 9):
        x = normal(n, 2, seed=n)
        wanted = 2 * host(model(x)).sum()
        assert float(learner.step(model, x)) == pytest.approx(wanted, rel=1e-5, abs=1e-5)


# Threads.


def test_threads_call_with_different_sizes_at_once() -> None:
    total = keras.Variable(np.zeros(2, "float32"))
    calls = keras.Variable(0, dtype="int32", trainable=False)

    @ts.function(shapes=ts.Shapes(patience=3))
    def step(x: Any) -> Any:
        total.assign_add(ops.sum(x, axis=0))
        calls.assign_add(1)
        return 2 * x

    failures: list[Any] = []

    def work(sizes: list[int]) -> None:
        try:
            for n in sizes:
                found = host(step(np.full((n, 2), n, "float32")))
                np.testing.assert_array_equal(found, np.full((n, 2), 2 * n))
        except BaseException as error:
            failures.append(error)

    streams = [[3, 9, 30] * 8, [5, 17, 1] * 8, [30, 2, 8] * 8]
    threads = [threading.Thread(target=work, args=(sizes,)) for sizes in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for_compilation()
    assert not failures
    assert int(calls.value) == 72
    wanted = sum(n * n for sizes in streams for n in sizes)
    np.testing.assert_array_equal(host(total), [wanted, wanted])
    assert step.trace_count <= 3


# In the background.


def test_the_larger_program_serves_while_a_closer_one_compiles() -> None:
    if not on_jax():
        pytest.skip("one program takes all sizes here")
    shapes = ts.Shapes("bucket", grid=(8, 64), patience=1, background=True)
    student, exactly = Student(norm=False, shapes=shapes), Student(norm=False, shapes="exact")
    sizes = (40, *([3] * 30))
    np.testing.assert_allclose(student.run(sizes), exactly.run(sizes), rtol=EXACT)
    wait_for_compilation()
    np.testing.assert_allclose(student.run((3, 3)), exactly.run((3, 3)), rtol=EXACT)
    assert_same(student.state, exactly.state, EXACT, EXACT)
    made = [e.signature for e in student.step.ledger if e.kind == "bucket"]
    assert len(made) == 2
    assert made[-1].endswith("8")
    assert student.step.trace_count == student.witness.runs == 1


def test_without_a_background_two_runs_are_equal_bit_by_bit() -> None:
    def run() -> tuple[list[float], list[np.ndarray], list[tuple[str, str]]]:
        shapes = ts.Shapes("bucket", grid=(4, 16), background=False, patience=2)
        student = Student(norm=False, shapes=shapes)
        losses = student.run([12, 3, 2, 3, 4, 16, 1, 3, 2, 15, 3])
        entries = [(e.kind, e.signature) for e in student.step.ledger]
        return losses, values_of(student.state), entries

    (losses, state, entries), (again, states, twice) = run(), run()
    assert losses == again
    assert entries == twice
    for a, b in zip(state, states, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [kind for kind, _ in entries].count("bucket") == (2 if on_jax() else 1)


@pytest.mark.slow
def test_a_function_that_is_dropped_while_it_compiles() -> None:
    if not on_jax():
        pytest.skip("one program takes all sizes here")
    step = ts.function(lambda x: ops.sum(x), shapes=ts.Shapes("bucket", grid=(8, 64), patience=1))
    for n in (40, 3, 3, 3):
        step(np.ones((n, 2), "float32"))
    del step
    gc.collect()
    wait_for_compilation()


# Bounds.


def test_programs_past_the_bound_go_and_come_back() -> None:
    witness = Witness()

    def step(x: Any) -> Any:
        return ops.sum(witness(x))

    function = ts.function(step, shapes=ts.Shapes("exact", max_programs=3))
    for n in (1, 2, 3, 4, 5, 6):
        assert float(function(np.ones((n, 2), "float32"))) == 2 * n
        assert function.program_count == min(n, 3)
    assert kinds(function.ledger) == {"trace": 6, "evicted": 3}
    evicted = [e for e in function.ledger if e.kind == "evicted"]
    assert ["[1,2]" in evicted[0].signature, "[3,2]" in evicted[2].signature] == [True, True]
    with assert_traces(function, 0):
        function(np.ones((4, 2), "float32"))  # now the latest used
    with assert_traces(function, 1):
        assert float(function(np.ones((1, 2), "float32"))) == 2
    assert "[5,2]" in [e for e in function.ledger if e.kind == "evicted"][-1].signature
    with assert_traces(function, 0):
        function(np.ones((4, 2), "float32"))
    assert function.trace_count == witness.runs == 7
    assert function.program_count == 3


def test_a_bound_of_one_program() -> None:
    student = Student(
        norm=False, shapes=ts.Shapes("bucket", grid=(4, 16), max_programs=1, background=False)
    )
    exactly = Student(norm=False, shapes="exact")
    sizes = (3, 12, 3)
    np.testing.assert_allclose(student.run(sizes), exactly.run(sizes), rtol=EXACT)
    assert student.step.program_count == 1
    assert_same(student.state, exactly.state, EXACT, EXACT)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_sixty_shapes_with_a_bound_of_eight_take_little_memory() -> None:
    if not on_jax():
        pytest.skip("measured where programs are largest")
    if not sys.platform.startswith("linux"):
        pytest.skip("resident memory is read from /proc")
    import jax

    def alive() -> int:
        """Programs that the engine keeps, whoever holds them."""
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    step = ts.function(lambda x: ops.sum(ops.tanh(x)), shapes=ts.Shapes("exact", max_programs=8))
    for n in range(1, 10):
        float(step(np.ones((n, 4), "float32")))
    programs, before = alive(), resident()
    for n in range(10, 70):
        float(step(np.ones((n, 4), "float32")))
    assert step.program_count == 8
    assert alive() <= programs + 2
    assert resident() - before < 60 * 2**20
    assert kinds(step.ledger)["evicted"] == 61


# Ahead of the first batch.


def test_after_a_warm_up_to_the_largest_nothing_is_compiled() -> None:
    student = Student(norm=False, shapes=ts.Shapes(patience=1))
    before = values_of(student.model.weights)
    rows: Any = None
    student.step.warm_up(ts.Spec((rows, 4)), ts.Spec((rows, 2)), largest=20)
    wait_for_compilation()
    assert_same(student.model.weights, before, 0, 0)
    entries, traces = len(student.step.ledger), student.witness.runs
    exactly = Student(norm=False, shapes="exact")
    sizes = (20, 1, 13)
    np.testing.assert_allclose(student.run(sizes), exactly.run(sizes), rtol=EXACT)
    wait_for_compilation()
    assert len(student.step.ledger) == entries, student.step.ledger
    assert student.witness.runs == traces == student.step.trace_count == 1 + ones()
    assert_same(student.state, exactly.state, EXACT, EXACT)


def test_warm_up_of_one_size_is_that_size() -> None:
    step = ts.function(lambda x: ops.sum(x))
    step.warm_up(ts.Spec((8, 2)))
    with assert_traces(step, 0):
        assert float(step(np.ones((8, 2), "float32"))) == 16
    with assert_traces(step, 1):
        for n in (4, 5, 8, 2):
            assert float(step(np.ones((n, 2), "float32"))) == 2 * n


def test_warm_up_by_the_names_of_sizes() -> None:
    signature = [ts.Spec(("batch", "time")), ts.Spec(("batch",))]
    step = ts.function(lambda x, y: ops.sum(x) + ops.sum(y), shapes="bucket", signature=signature)
    step.warm_up(*signature, largest={"batch": 8, "time": 12})
    wait_for_compilation()
    entries = len(step.ledger)
    for n, time in ((8, 12), (1, 1), (3, 12), (8, 5)):
        found = step(np.ones((n, time), "float32"), np.ones(n, "float32"))
        assert float(found) == n * time + n
    wait_for_compilation()
    assert len(step.ledger) == entries


def test_a_size_past_the_warmed_up_one_still_works() -> None:
    step = ts.function(lambda x: ops.sum(x), shapes="bucket")
    step.warm_up(ts.Spec((None, 2)), largest=8)
    for n in (8, 30):
        assert float(step(np.ones((n, 2), "float32"))) == 2 * n
    assert step.trace_count == 1 + ones()


@pytest.mark.parametrize(
    ("spec", "largest"),
    [
        (ts.Spec((None, 2)), None),
        (ts.Spec((None, 2)), 0),
        (ts.Spec((None, 2)), -3),
        (ts.Spec((None, 2)), "many"),
        (ts.Spec((None, 2)), 2.5),
        (ts.Spec(("batch", 2)), {"time": 8}),
        (ts.Spec(("batch", "time")), {"time": 8}),
    ],
    ids=str,
)
def test_a_warm_up_without_a_size_is_an_error(spec: ts.Spec, largest: Any) -> None:
    step = ts.function(lambda x: ops.sum(x))
    with pytest.raises(ts.ArgumentError, match=r"(?s)expected.*got.*to fix"):
        step.warm_up(spec, largest=largest)
    assert step.trace_count == 0
    assert float(step(np.ones((3, 2), "float32"))) == 6


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
def test_a_warm_up_of_a_refused_step_leaves_it_right() -> None:
    step = ts.function(looped)
    with contextlib.suppress(ts.TrainstepError):
        step.warm_up(ts.Spec((None, 2)), largest=8)
    for n in (3, 4):
        np.testing.assert_allclose(host(step(np.ones((n, 2), "float32"))), [n, n])


# Verification.


def test_verify_is_true_for_a_good_step_and_trains_nothing() -> None:
    student = Student(norm=False)
    student.run((4,))
    before, entries = values_of(student.state), len(student.step.ledger)
    found = student.step.verify(*batch(5))
    assert isinstance(found, ts.Verification)
    assert found.exact
    assert bool(found) is True
    assert found.refused == ""
    assert found.differences
    assert max(found.differences.values()) <= found.tolerance == 1e-5
    assert_same(student.state, before, 0, 0)
    assert len(student.step.ledger) == entries
    assert student.step.trace_count == 1
    for name in found.differences:
        assert name in str(found)
    student.run((4, 6))


def test_verify_tells_what_is_refused() -> None:
    step = ts.function(looped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.SizesWarning)
        found = step.verify(np.ones((5, 2), "float32"))
    assert f"{HERE}:{line_of(looped, 'range(')}" in found.refused
    assert found.refused in str(found)
    assert found.exact
    assert found


def test_verify_is_false_for_a_step_that_is_not_the_same_twice() -> None:
    """A number that Python counts up is another one in the second trace."""
    runs = []

    @ts.function
    def step(x: Any) -> Any:
        runs.append(1)
        return {"sum": ops.sum(x) * float(len(runs)), "mean": ops.mean(x)}

    found = step.verify(np.ones((5, 2), "float32"))
    assert not found
    assert not found.exact
    assert not found.refused
    wrong = {name for name, value in found.differences.items() if value > found.tolerance}
    assert len(wrong) == 1
    assert next(iter(wrong)) in str(found)
    assert step.verify(np.ones((5, 2), "float32"), tolerance=1e6)


def test_verify_of_a_trainer() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    trainer = ts.Trainer(model, keras.optimizers.Adam(0.1), "mse")
    before = values_of(model.weights)
    found = trainer.verify(*batch(7))
    assert found.exact
    assert found.differences
    assert_same(model.weights, before, 0, 0)


def test_padding_that_is_nan_reaches_nothing() -> None:
    if not on_jax():
        pytest.skip("nothing is padded here")
    step = ts.function(
        lambda x: {"mean": ops.mean(x), "max": ops.max(x, axis=0), "rows": x, "var": ops.var(x)},
        shapes=ts.Shapes("bucket", grid=(16,)),
    )
    for kind in ("nan", "garbage"):
        with filling(kind):
            x = normal(5, 3, seed=4)
            found = step(x)
        assert float(found["mean"]) == pytest.approx(x.mean(), rel=1e-5)
        assert float(found["var"]) == pytest.approx(x.var(), rel=1e-5)
        np.testing.assert_array_equal(host(found["max"]), x.max(0))
        np.testing.assert_array_equal(host(found["rows"]), x)
