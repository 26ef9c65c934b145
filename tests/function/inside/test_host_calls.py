"""`print` and `callback` run at every step, with true values, in order, once, and never for nothing."""

from __future__ import annotations

import dataclasses
import gc
import io
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts
from tests.helpers import host, normal, values_of
from trainstep._function.settings import StepSettings
from trainstep.testing import NullEngine, wait_for_compilation

ONE, TWO = np.array(1.0, "float32"), np.array(2.0, "float32")


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    yield
    wait_for_compilation()


def numbers(seen: list[Any]) -> list[Any]:
    return [np.asarray(x).tolist() for x in seen]


# What is printed ----------------------------------------------------------------------------


def test_print_is_pythons_print_at_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    @ts.function
    def step(x: Any) -> None:
        ts.print("x", x, 3, None, sep="|", end="!\n")

    step(ONE)
    step(TWO)

    assert capsys.readouterr().out == "x|1.0|3|None!\nx|2.0|3|None!\n"
    assert step.trace_count == 1


def test_tensors_are_shown_as_numpy_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclasses.dataclass
    class Pair:
        left: Any
        right: Any

    @ts.function
    def step(x: Any) -> None:
        ts.print(x)
        ts.print([x, (x[0],)], {"first": x[0], "name": "a"}, Pair(x[1], 5))
        ts.print(ops.cast(x, "bfloat16"), ops.cast(x, "int32"), x > 1)

    x = np.array([1.0, 2.0], "float32")
    step(x)
    step(x + 1)

    shown = (
        "[1. 2.]\n"
        "[[1. 2.], (1.0,)] {'first': 1.0, 'name': 'a'} "
        f"{Pair.__qualname__}(left=2.0, right=5)\n"
        "[1 2] [1 2] [False  True]\n"
        "[2. 3.]\n"
        "[[2. 3.], (2.0,)] {'first': 2.0, 'name': 'a'} "
        f"{Pair.__qualname__}(left=3.0, right=5)\n"
        "[2 3] [2 3] [ True  True]\n"
    )
    assert capsys.readouterr().out == shown


def test_stdout_is_looked_up_when_it_prints_and_a_file_is_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.StringIO()

    @ts.function
    def step(x: Any) -> None:
        ts.print("out", x)
        ts.print("file", x, file=file, flush=True)

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    step(ONE)
    monkeypatch.setattr(sys, "stdout", later := io.StringIO())
    step(TWO)

    assert later.getvalue() == "out 2.0\n"
    assert file.getvalue() == "file 1.0\nfile 2.0\n"


def test_variables_and_values_without_tensors_are_printed_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = keras.Variable(0, dtype="int32", trainable=False)

    @ts.function
    def step() -> None:
        ts.print("before", count)
        count.assign_add(1)
        ts.print("after", count, [count])
        ts.print()
        ts.print("text")

    step()
    step()

    text = "before {}\nafter {} [{}]\n\ntext\n"
    assert capsys.readouterr().out == text.format(0, 1, 1) + text.format(1, 2, 2)


def test_outside_a_step_it_prints_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    w = keras.Variable([1.0, 2.0])

    ts.print("eager", ops.convert_to_tensor([3, 4]), w)
    assert capsys.readouterr().out == "eager [3 4] [1. 2.]\n"

    def loss() -> Any:
        ts.print("loss", ops.sum(w))
        return ops.sum(w * w)

    for variables in ([w], None, lambda: [w]):
        ts.value_and_grad(loss, variables)()
        assert capsys.readouterr().out == "loss 3.0\n"


# What a callback gets and gives -------------------------------------------------------------


def test_a_callback_gets_arrays_in_their_structure_and_other_values_as_they_are() -> None:
    seen: list[Any] = []
    thing = object()
    table = np.array([7, 8])

    @ts.function
    def step(x: Any) -> Any:
        def note(a: Any, b: Any, *, c: Any, d: Any) -> str:
            seen.append((a, b, c, d))
            return "dropped"

        return ts.callback(note, x, [x[0], (thing, "s")], c={"k": ops.sum(x), "n": 1}, d=table)

    assert step(np.array([1.0, 2.0], "float32")) is None
    step(np.array([3.0, 4.0], "float32"))

    a, b, c, d = seen[1]
    assert type(a) is np.ndarray
    assert a.dtype == "float32"
    assert a.tolist() == [3.0, 4.0]
    assert type(b[0]) is np.ndarray
    assert b[0].shape == ()
    assert b[1] == (thing, "s")
    assert c["k"] == 7.0
    assert c["n"] == 1
    assert d is table
    assert len(seen) == 2


def test_the_arrays_are_the_functions_own() -> None:
    kept: list[Any] = []
    w = keras.Variable([1.0, 2.0])

    def keep(x: Any) -> None:
        kept.append(x)
        x += 100.0

    @ts.function
    def step(x: Any) -> Any:
        ts.callback(keep, x)
        ts.callback(keep, w)
        w.assign_add(x)
        return x + w

    first = host(step(np.array([1.0, 1.0], "float32")))
    second = host(step(np.array([2.0, 2.0], "float32")))

    assert numbers(kept) == [[101.0, 101.0], [101.0, 102.0], [102.0, 102.0], [102.0, 103.0]]
    assert [first.tolist(), second.tolist()] == [[3.0, 4.0], [6.0, 7.0]]


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16", "float16", "uint8"])
def test_results_are_tensors_of_their_spec(dtype: str) -> None:
    @ts.function
    def step(x: Any) -> Any:
        found = ts.callback(lambda a: a + a, x, returns=ts.Spec((2,), dtype))
        assert keras.backend.standardize_dtype(found.dtype) == dtype
        assert tuple(found.shape) == (2,)
        return ops.cast(found, "float32") + 1

    x = np.array([0, 1]).astype("float32" if dtype == "bfloat16" else dtype)

    def given(x: Any) -> Any:
        return ops.cast(ops.convert_to_tensor(x), dtype)

    for factor in (1, 0):
        double = (host(given(x * factor)) * 2).astype("float32")
        if dtype == "bool":
            double = np.minimum(double, 1)
        got = host(step(given((x * factor).astype(x.dtype))))
        assert got.tolist() == (double + 1).tolist()


def test_results_come_in_the_structure_of_returns() -> None:
    specs = {"a": ts.Spec((2,)), "b": [ts.Spec((), "int32"), (ts.Spec(()),)]}

    def fn(x: Any) -> Any:
        return {"b": [int(x[0]), (x[1],)], "a": x + 1}

    @ts.function
    def step(x: Any) -> Any:
        found = ts.callback(fn, x, returns=specs)
        return {"a": found["a"] * 2, "b": [found["b"][0] + 1, found["b"][1][0]]}

    for start in (0.0, 5.0):
        got = step(np.array([start, start + 1], "float32"))
        assert host(got["a"]).tolist() == [2 * (start + 1), 2 * (start + 2)]
        assert int(host(got["b"][0])) == start + 1
        assert float(host(got["b"][1])) == start + 1


WRONG = {
    "shape": (lambda x: np.zeros(3), ts.Spec((2,)), ["`returns`", "float32[2]", "float64[3]"]),
    "kind": (lambda x: 1.5, ts.Spec((), "int32"), ["`returns`", "int32[]", "float64[]"]),
    "range": (lambda x: 300, ts.Spec((), "uint8"), ["`returns`", "uint8[]"]),
    "name": (lambda x: "a", ts.Spec((), name="score"), ["`score`", "float32[]"]),
    "none": (lambda x: None, ts.Spec(()), ["`returns`", "float32[]"]),
    "ragged": (lambda x: [[1], [1, 2]], ts.Spec((2, 2)), ["`returns`", "float32[2,2]"]),
    "part": (
        lambda x: {"a": 1.0, "b": [1.0, 2.0]},
        {"a": ts.Spec(()), "b": [ts.Spec(()), ts.Spec((1,))]},
        ["`returns['b'][1]`", "float32[1]"],
    ),
    "structure": (
        lambda x: {"a": 1.0},
        {"a": ts.Spec(()), "b": ts.Spec(())},
        ["`returns`", "['b']"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("eager", [False, True], ids=["step", "eager"])
def test_a_result_that_does_not_fit_is_named(case: str, eager: bool) -> None:
    fn, returns, parts = WRONG[case]
    w = keras.Variable(1.0)

    def step(x: Any) -> Any:
        w.assign(5.0)
        return ts.callback(fn, x, returns=returns)

    with pytest.raises(ts.ArgumentError) as caught:
        (step if eager else ts.function(step))(ops.ones(()) if eager else ONE)

    assert all(part in str(caught.value) for part in parts), caught.value
    assert "callback of <lambda>" in str(caught.value)
    if not eager:
        assert float(host(w)) == 1.0


@pytest.mark.parametrize(
    "returns", [ts.Spec((None,)), ts.Spec(("n", 2)), "float32", [ts.Spec(()), 3]]
)
def test_returns_has_to_be_specs_with_sizes(returns: Any) -> None:
    step = ts.function(lambda x: ts.callback(np.sum, x, returns=returns))

    with pytest.raises(ts.ArgumentError, match="returns"):
        step(ONE)


def test_tensors_where_nobody_finds_them_are_refused() -> None:
    class Box:
        def __init__(self, value: Any) -> None:
            self.value = value

    step = ts.function(lambda x: ts.callback(print, Box(x)))

    with pytest.raises(ts.ArgumentError, match="callback of"):
        step(ONE)


def test_no_gradient_flows_through() -> None:
    w = keras.Variable(3.0)

    @ts.function
    def step() -> Any:
        def loss() -> Any:
            through = ts.callback(lambda a: a * a, w, returns=ts.Spec(()))
            return through + 2.0 * w

        return ts.value_and_grad(loss, [w])()

    value, (gradient,) = step()

    assert float(value) == 15.0
    assert float(gradient) == 2.0


# Once, in order, at every step ---------------------------------------------------------------


@pytest.mark.parametrize("optimize", ["trace", "full", "measure"])
def test_calls_are_made_in_order_once_per_step_and_never_while_tracing(optimize: str) -> None:
    seen: list[Any] = []
    w = keras.Variable(0.0)

    @ts.function(optimize=optimize)
    def step(x: Any) -> Any:
        for place in range(6):
            ts.callback(lambda a, place=place: seen.append((place, float(a))), x + place)
        ts.callback(lambda: seen.append("no tensor"))
        w.assign_add(x)
        ts.callback(lambda a: seen.append(("w", float(a))), w)
        return x * 2  # none of the above is needed for it

    step.warm_up(ts.Spec(()))
    assert seen == []

    for call in range(1, 27):
        x = np.array(call, "float32")
        assert float(step(x)) == 2 * call
        total = sum(range(call + 1))
        assert seen == [*((p, call + p) for p in range(6)), "no tensor", ("w", total)]
        seen.clear()


def test_the_ledger_names_the_compiler_that_can_call_the_host(backend: str) -> None:
    compilers = {"jax": "xla", "tensorflow": "graph", "torch": "inductor"}
    step = ts.function(optimize="full")(lambda x: ts.print(x, file=io.StringIO()))

    step(ONE)

    assert step.ledger[0].compiler == compilers[backend]


@pytest.mark.parametrize("how", ["variables", "found", "argument", "twice"])
def test_once_inside_a_differentiation(how: str) -> None:
    seen: list[Any] = []
    w = keras.Variable(2.0)

    def loss(x: Any) -> Any:
        ts.callback(lambda a: seen.append(("in", float(a))), w * x)
        return w * x * x

    @ts.function
    def step(x: Any) -> Any:
        if how == "twice":
            gradient = ts.grad(ts.grad(loss, argnums=0), argnums=0)(x)
        elif how == "argument":
            gradient = ts.grad(loss, argnums=0)(x)
        else:
            gradient = ts.grad(loss, [w] if how == "variables" else None)(x)[0]
        ts.callback(lambda a: seen.append(("out", float(a))), gradient)
        w.assign_sub(0.5)
        return gradient

    wanted = {
        "variables": (9.0, 9.0),
        "found": (9.0, 9.0),
        "argument": (12.0, 9.0),
        "twice": (4.0, 3.0),
    }
    for call, value in enumerate(wanted[how]):
        step(np.array(3.0, "float32"))
        assert seen == [("in", (2.0 - 0.5 * call) * 3.0), ("out", value)]
        seen.clear()


def test_the_branch_that_is_taken_calls() -> None:
    seen: list[str] = []

    @ts.function
    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            ts.callback(lambda: seen.append("first"))
            found = ops.cond(
                x > 0,
                lambda: (ts.callback(lambda a: seen.append(f"up {a}"), x), x * 2)[1],
                lambda: (ts.callback(lambda a: seen.append(f"down {a}"), x), x * 3)[1],
            )
            ts.callback(lambda: seen.append("last"))
            return found

        return ts.value_and_grad(loss, argnums=0)(x)

    for x, which, slope in ((1.0, "up 1.0", 2.0), (-1.0, "down -1.0", 3.0), (4.0, "up 4.0", 2.0)):
        _, gradient = step(np.array(x, "float32"))
        assert float(gradient) == slope
        assert seen == ["first", which, "last"]
        seen.clear()


def test_the_branch_that_is_taken_calls_where_branches_write_variables() -> None:
    seen: list[str] = []
    w = keras.Variable(0.0)

    def case(name: str, amount: float) -> Any:
        def run() -> Any:
            w.assign_add(amount)
            found = ts.callback(
                lambda a: (seen.append(f"{name} {a}"), a)[1], w, returns=ts.Spec(())
            )
            inner = ops.cond(
                w > 10.0,
                lambda: (w.assign(0.0), ts.callback(seen.append, "reset"), w.value)[2],
                lambda: w.value,
            )
            return found + inner

        return run

    @ts.function
    def step(i: Any) -> Any:
        return ops.switch(i, [case("a", 1.0), case("b", 10.0), case("c", 100.0)])

    for index, calls, value in (
        (0, ["a 1.0"], 2.0),
        (2, ["c 101.0", "reset"], 101.0),
        (1, ["b 10.0"], 20.0),
    ):
        assert float(step(np.array(index, "int32"))) == value
        assert seen == calls
        seen.clear()


def test_a_loop_calls_at_every_turn() -> None:
    seen: list[Any] = []
    w = keras.Variable(2.0)

    @ts.function
    def step(x: Any) -> Any:
        def turn(carry: Any, each: Any) -> Any:
            ts.callback(lambda c, e: seen.append((float(c), float(e))), carry, each)
            return carry * w, carry

        return ts.value_and_grad(lambda: ops.scan(turn, ops.ones(()), x)[0], [w])()[0]

    for start in (0.0, 5.0):
        assert float(step(np.array([start, start + 1, start + 2], "float32"))) == 8.0
        assert seen == [(1.0, start), (2.0, start + 1), (4.0, start + 2)]
        seen.clear()


def test_a_while_loop_calls_at_every_turn(backend: str) -> None:
    seen: list[Any] = []
    w = keras.Variable(0.0)

    @ts.function
    def step(n: Any) -> Any:
        def turn(i: Any) -> Any:
            ts.callback(lambda a: seen.append(int(a)), i)
            return (i + 1,)

        (i,) = ops.while_loop(lambda i: i < n, turn, (ops.zeros((), "int32"),))
        w.assign_add(1.0)
        return ts.callback(lambda a: a * 10, i, returns=ts.Spec((), "int32"))

    for n in (3, 5):
        assert int(step(np.array(n, "int32"))) == 10 * n
        assert seen == list(range(n))
        seen.clear()
    assert float(host(w)) == 2.0


def test_a_map_that_computes_all_elements_at_once_is_refused() -> None:
    @ts.function
    def step(x: Any) -> Any:
        return ops.vectorized_map(lambda row: (ts.print(row), ops.sum(row))[1], x)

    with pytest.raises(
        ts.TrainstepError, match=r"vectorized_map[\s\S]*to fix:   use keras.ops.map"
    ):
        step(np.ones((3, 2), "float32"))

    assert host(ts.function(lambda x: ops.vectorized_map(ops.sum, x))(np.ones((3, 2)))).sum() == 6


def test_a_function_in_a_function_calls_once() -> None:
    seen: list[float] = []

    @ts.function
    def inner(x: Any) -> Any:
        ts.callback(lambda a: seen.append(float(a)), x)
        return x + 1

    @ts.function
    def outer(x: Any) -> Any:
        return inner(inner(x))

    assert float(outer(ONE)) == 3.0
    assert float(outer(TWO)) == 4.0
    assert seen == [1.0, 2.0, 2.0, 3.0]


def test_inside_another_compilers_trace_it_calls_at_every_run(backend: str) -> None:
    seen: list[float] = []

    def fn(x: Any) -> Any:
        return x + ts.callback(lambda a: (seen.append(float(a)), a)[1], x, returns=ts.Spec(()))

    if backend == "jax":
        import jax

        compiled = jax.jit(fn)
    elif backend == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(fn, autograph=False)
    else:
        pytest.skip("torch.compile runs what it does not know as Python")

    assert [float(compiled(ops.cast(i, "float32"))) for i in (1, 2, 3)] == [2.0, 4.0, 6.0]
    assert seen == [1.0, 2.0, 3.0]


def test_threads_that_share_a_step_each_get_their_calls() -> None:
    seen: list[float] = []
    w = keras.Variable(0.0)

    @ts.function
    def step(x: Any) -> Any:
        w.assign_add(1.0)
        return ts.callback(lambda a: (seen.append(float(a)), a)[1], x, returns=ts.Spec(()))

    def work(start: int) -> None:
        for i in range(start, start + 25):
            assert float(step(np.array(i, "float32"))) == i

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(seen) == [100.0 * i + j for i in range(4) for j in range(25)]
    assert float(host(w)) == 100.0


def test_large_arrays_come_whole() -> None:
    seen: list[Any] = []

    @ts.function
    def step(x: Any) -> Any:
        ts.callback(seen.append, ops.matmul(x, x))
        return ops.sum(x)

    x = normal(500, 500)
    for _ in range(3):
        step(x)

    assert len(seen) == 3
    np.testing.assert_allclose(seen[-1], x @ x, rtol=1e-3, atol=1e-3)


# The Trainer --------------------------------------------------------------------------------


def noisy(seen: list[Any]) -> Any:
    """A layer that calls the host."""

    class Noisy(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + ts.callback(
                lambda a: (seen.append(a), np.zeros(1))[1], x, returns=ts.Spec((1,))
            )

    return Noisy()


def trainer(seen: list[Any], **options: Any) -> ts.Trainer:
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(1)(noisy(seen)(inputs))
    assert seen == [], "nothing is called while a model is made"
    return ts.Trainer(keras.Model(inputs, outputs), optimizer="sgd", loss="mse", **options)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_layer_calls_at_every_step_of_fit(steps_per_call: int) -> None:
    seen: list[Any] = []
    x, y = normal(32, 4), normal(32, 1, seed=1)

    trainer(seen).fit(
        x, y, batch_size=4, epochs=2, shuffle=False, steps_per_call=steps_per_call, progress=False
    )

    assert len(seen) == 16
    for call, array in enumerate(seen):
        np.testing.assert_array_equal(array, x[4 * (call % 8) :][:4])


def test_a_loss_and_a_metric_of_ones_own_call_once_in_a_step() -> None:
    """Also if they are built in that step, which runs them for that alone."""
    seen: list[str] = []

    def loss(y: Any, y_pred: Any) -> Any:
        ts.callback(lambda: seen.append("loss"))
        return ops.mean((y - y_pred) ** 2)

    def metric(y: Any, y_pred: Any) -> Any:
        ts.callback(lambda: seen.append("metric"))
        return ops.mean(ops.abs(y - y_pred))

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    one = ts.Trainer(model, "sgd", loss, metrics=[metric])
    x, y = normal(32, 4), normal(32, 1, seed=1)
    for count in (1, 2, 3):
        one.train_on_batch(x, y)
        assert sorted(seen) == ["loss"] * count + ["metric"] * count
    one.test_on_batch(x, y)
    assert len(seen) == 8


def test_steps_of_one_call_are_in_order_without_variables(backend: str) -> None:
    from trainstep._engines import Options

    seen: list[float] = []

    def step(x: Any) -> Any:
        ts.callback(lambda a: seen.append(float(a)), x)
        ts.callback(lambda a: seen.append(-float(a)), x)
        return x

    several: Any = ts.Function(step, StepSettings(options=Options(repeat=8)))
    several(np.arange(8, dtype="float32"))
    several(np.arange(8, dtype="float32"))

    assert seen == [s * float(i) for _ in range(2) for i in range(8) for s in (1, -1)]


# Sizes that vary ----------------------------------------------------------------------------

SIZES = (32, 17, 9, 5, 32, 17, 31, 1, 2)


@pytest.mark.parametrize("shapes", ["auto", "bucket"])
def test_values_are_those_of_the_true_sizes(shapes: str) -> None:
    seen: list[Any] = []
    dense = keras.layers.Dense(2, kernel_initializer="ones")

    @ts.function(shapes=shapes)
    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            out = dense(x)
            ts.callback(lambda *a: seen.append(("in", a)), x, out, ops.transpose(out), [y])
            return ops.mean(out)

        value, gradients = ts.value_and_grad(loss, lambda: dense.trainable_variables)()
        scale = ts.callback(
            lambda v, g: (seen.append(("out", (v, g))), 2.0)[1],
            value,
            gradients[0],
            returns=ts.Spec(()),
        )
        return value * scale

    with warnings.catch_warnings():
        warnings.simplefilter("error", ts.SizesWarning)
        for call, size in enumerate(SIZES):
            x, y = normal(size, 3, seed=call), np.arange(size, dtype="int32")
            got = float(step(x, y))
            out = np.repeat(x.sum(1, keepdims=True), 2, axis=1)
            (where, (a, b, c, (d,))), (there, (value, gradient)) = seen
            assert (where, there) == ("in", "out")
            np.testing.assert_array_equal(a, x)
            np.testing.assert_allclose(b, out, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(c, out.T, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(d, y)
            np.testing.assert_allclose(value, out.mean(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(gradient[:, 0], x.mean(0) / 2, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got, 2 * value, rtol=1e-6)
            seen.clear()
    assert step.trace_count <= 3  # a size of 1 is a case of its own on torch


def test_sizes_are_printed_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    @ts.function
    def step(x: Any) -> Any:
        ts.print("rows", ops.shape(x)[0], [ops.shape(x)[0]], "columns", x.shape[1])
        return ops.sum(x)

    for size in SIZES:
        step(normal(size, 3))

    wanted = [f"rows {size} [{size}] columns 3" for size in SIZES]
    assert capsys.readouterr().out.splitlines() == wanted


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
@pytest.mark.parametrize("how", ["text", "imported", "shape", "spec"])
def test_a_size_that_is_used_as_text_or_as_a_size_is_the_true_one(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    if how == "imported":
        monkeypatch.setitem(globals(), "print", ts.print)

    @ts.function
    def step(x: Any) -> Any:
        if how == "text":
            ts.print(f"rows {ops.shape(x)[0]}", file=file)
        elif how == "imported":
            print(f"rows {ops.shape(x)[0]}", file=file)
        elif how == "shape":
            ts.print("rows", x.shape[0], file=file)
        else:
            found = ts.callback(lambda a: a, x, returns=ts.Spec((x.shape[0], 3)))
            ts.print("rows", ops.shape(found)[0], file=file)
        return ops.sum(x)

    if how in ("text", "imported") and keras.backend.backend() == "tensorflow":
        pytest.skip("there a size is a tensor, whose text is not its value: that is documented")
    for size in SIZES:
        step(normal(size, 3))

    assert file.getvalue().splitlines() == [f"rows {size}" for size in SIZES]


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
def test_a_whole_shape_is_the_true_one() -> None:
    seen: list[Any] = []

    @ts.function
    def step(x: Any) -> Any:
        ts.callback(lambda shape: seen.append(tuple(shape)), x.shape)
        return ops.sum(x)

    for size in SIZES:
        step(normal(size, 3))

    assert seen == [(size, 3) for size in SIZES]


@pytest.mark.filterwarnings("ignore::trainstep.SizesWarning")
def test_a_loop_over_an_axis_that_varies_calls_for_true_positions_only() -> None:
    seen: list[float] = []

    @ts.function
    def step(x: Any) -> Any:
        def turn(carry: Any, each: Any) -> Any:
            ts.callback(lambda a: seen.append(float(a)), each)
            return carry + each, carry

        return ops.scan(turn, ops.zeros(()), x)[0]

    for size in (4, 7, 3):
        step(np.arange(size, dtype="float32"))
        assert seen == list(range(size))
        seen.clear()


def test_a_trainer_whose_batches_vary_shows_true_rows() -> None:
    seen: list[Any] = []
    found = trainer(seen)

    for size in SIZES:
        x = normal(size, 4, seed=size)
        found.train_on_batch(x, normal(size, 1))
        np.testing.assert_array_equal(seen.pop(), x)
        assert seen == []


# Failure ------------------------------------------------------------------------------------


class Broken(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@pytest.mark.parametrize("optimize", ["trace", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, SystemExit])
def test_what_it_raises_is_raised_and_nothing_has_changed(error: Any, optimize: str) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    raised: list[Any] = []
    seen: list[float] = []

    def check(x: Any) -> None:
        if x.min() < 0:
            raised.append(error(7))
            raise raised[-1] from ZeroDivisionError("why")

    @ts.function(optimize=optimize)
    def step(x: Any) -> Any:
        value, gradients = ts.value_and_grad(
            lambda: ops.mean(model(x) ** 2), model.trainable_variables
        )()
        optimizer.apply(gradients, model.trainable_variables)
        ts.callback(check, x)
        ts.callback(lambda: seen.append(1.0))
        return value

    good = np.ones((8, 4), "float32")
    step(good)
    for _ in range(3):
        state = [*model.variables, *optimizer.variables]
        before = values_of(state)
        seen.clear()
        with pytest.raises(error) as caught:
            step(-good)
        assert caught.value is raised[-1]
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert any(entry.name == "check" for entry in caught.traceback)
        assert seen == []
        for a, b in zip(values_of(state), before, strict=True):
            np.testing.assert_array_equal(a, b)
        step(good)
        assert seen == [1.0]
        assert any((a != b).any() for a, b in zip(values_of(state), before, strict=True))


def test_it_raises_where_sizes_vary_and_outside_any_step() -> None:
    w = keras.Variable(0.0)

    def check(x: Any) -> None:
        if x.min() < 0:
            raise Broken(3)

    def loss(x: Any) -> Any:
        ts.callback(check, x * w)
        return w * ops.sum(x)

    @ts.function
    def step(x: Any) -> Any:
        ts.callback(check, x)
        w.assign_add(1.0)
        return ts.grad(loss, [w])(x)

    for size in (8, 5, 3, 7):
        step(np.ones(size, "float32"))
        before = float(host(w))
        with pytest.raises(Broken):
            step(-np.ones(size, "float32"))
        assert float(host(w)) == before
    for variables in ([w], None):
        with pytest.raises(Broken):
            ts.grad(loss, variables)(-np.ones(2, "float32"))


# Memory -------------------------------------------------------------------------------------


def collected(ref: weakref.ref[Any]) -> bool:
    for _ in range(3):
        gc.collect()
    return ref() is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimize", ["trace", "full"])
@pytest.mark.parametrize("sizes", [(4,), (4, 7, 3)])
def test_a_dropped_function_frees_what_it_called(optimize: str, sizes: tuple[int, ...]) -> None:
    class Tool:
        def __call__(self, x: Any) -> Any:
            return x.sum()

    def use() -> weakref.ref[Any]:
        tool, w = Tool(), keras.Variable(1.0)

        @ts.function(optimize=optimize)
        def step(x: Any) -> Any:
            value, _ = ts.value_and_grad(lambda: ops.sum(w * x), [w])()
            found = ts.callback(tool, x, returns=ts.Spec(()))
            ts.callback(lambda t, v: None, tool, value)
            return ops.cond(found > 0, lambda: found, lambda: (ts.callback(tool, x), value)[1])

        for size in sizes:
            step(np.ones(size, "float32"))
        wait_for_compilation()
        return weakref.ref(tool)

    assert collected(use())


@pytest.mark.slow
def test_an_argument_that_is_passed_on_is_not_held() -> None:
    seen: list[str] = []

    @ts.function
    def step(model: Any, x: Any) -> Any:
        ts.callback(lambda m, a: seen.append(m.name), model, x)
        return model(x)

    def use() -> weakref.ref[Any]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="mine")
        step(model, np.ones((3, 2), "float32"))
        return weakref.ref(model)

    assert collected(use())
    assert seen == ["mine"]


def test_many_calls_add_no_objects() -> None:
    file = io.StringIO()

    @ts.function
    def step(x: Any) -> Any:
        ts.print(x, file=file)
        return ts.callback(lambda a: a + 1, x, returns=ts.Spec(()))

    def objects(calls: int) -> int:
        for _ in range(calls):
            step(ONE)
        gc.collect()
        return len(gc.get_objects())

    before = objects(50)
    assert objects(300) - before < 50


# The null engine ----------------------------------------------------------------------------


def test_the_null_engine_calls_at_every_run() -> None:
    seen: list[Any] = []

    @ts.function(engine=NullEngine())
    def step(x: Any) -> Any:
        found = ts.callback(lambda a: (seen.append(a), a)[1], x, returns=ts.Spec((3,)))
        ts.callback(seen.append, "text")
        return found

    step.warm_up(ts.Spec((3,)))
    assert seen == []

    for _ in range(2):
        assert step(np.ones(3, "float32")).shape == (3,)
    assert numbers(seen) == [[0.0, 0.0, 0.0], "text"] * 2  # those of the warm-up, which traced
