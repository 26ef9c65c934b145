"""`nan_policy`: a batch whose loss or gradients are not finite changes nothing.

A step that skips is compared bit for bit with the same step over the good batches alone.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import host, normal, values_of
from tests.twins import everything, lone, mlp, regression

BAD = (np.nan, np.inf, -np.inf)
X, Y = normal(8, 6, seed=1), normal(8, 2, seed=2)
NAN = np.full_like(X, np.nan)


def random_layers() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(2),
        ]
    )


def unbuilt() -> keras.Model:
    return keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(2)])


def adam() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "mse",
        "metrics": ["mae"],
        "weighted_metrics": [keras.metrics.MeanSquaredError(name="weighted")],
    }


def sgd() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"}


def batches(count: int, sizes: tuple[int, ...], share: float = 0.25) -> list[tuple[Any, bool]]:
    """Batches, and whether a number in each was replaced by one that is not finite."""
    random = np.random.default_rng(7)
    made = []
    for i in range(count):
        n = sizes[i % len(sizes)]
        x, y = random.normal(size=(n, 6)), random.normal(size=(n, 2))
        batch = [a.astype("float32") for a in (x, y, random.uniform(0.5, 1.5, n))]
        bad = bool(random.uniform() < share)
        if bad:
            array = batch[random.integers(3)]
            array.flat[random.integers(array.size)] = random.choice(BAD)
        made.append((tuple(batch), bad))
    return made


def assert_equal(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert np.array_equal(a, b), i


def assert_skips(trainer: ts.Trainer, other: ts.Trainer, data: list[tuple[Any, bool]]) -> None:
    """The first trainer skips the bad batches: it ends up as the other one, which sees no such."""
    for batch, bad in data:
        loss = trainer.train_on_batch(*batch)["loss"]
        assert np.isfinite(loss) or bad
        if not bad:
            assert other.train_on_batch(*batch)["loss"] == loss
    assert trainer.skipped == sum(bad for _, bad in data)
    assert other.skipped == 0
    assert_equal(everything(trainer), everything(other))


# Skipping -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_steps_with_bad_ones_are_the_good_steps_alone() -> None:
    trainer = lone(random_layers, adam, nan_policy="skip", check_values=False)
    other = lone(random_layers, adam, nan_policy="skip", check_values=False)
    data = batches(1000, (16,))

    assert_skips(trainer, other, data)

    assert any(bad for _, bad in data[:3])
    assert trainer.trace_count == 1
    assert all(np.isfinite(value).all() for value in everything(trainer))


@pytest.mark.slow
def test_without_the_policy_good_batches_give_the_same_numbers() -> None:
    """To rounding: another program is fused otherwise."""
    guarded = lone(random_layers, adam, nan_policy="skip")
    plain = lone(random_layers, adam)
    for batch, _ in batches(20, (16,), share=0.0):
        guarded.train_on_batch(*batch)
        plain.train_on_batch(*batch)
    for a, b in zip(everything(guarded), everything(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert guarded.skipped == plain.skipped == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arguments", [sgd, regression, adam])
@pytest.mark.parametrize("build", [mlp, unbuilt])
def test_every_optimizer_and_a_model_that_builds_itself(build: Any, arguments: Any) -> None:
    trainer, other = (
        lone(build, arguments, nan_policy="skip", check_values=False) for _ in range(2)
    )
    data = batches(12, (8,), share=0.5)

    assert_skips(trainer, other, [((NAN, Y, np.ones(8, "float32")), True), *data])

    assert trainer.trace_count == 1


@pytest.mark.slow
def test_sizes_that_vary() -> None:
    trainer, other = (lone(random_layers, adam, nan_policy="skip") for _ in range(2))
    good = batches(3, (32, 17, 9), share=0.0)

    assert_skips(trainer, other, good + batches(60, (32, 17, 9)))

    assert trainer.trace_count == other.trace_count == 2


def test_the_gradient_alone_may_be_bad() -> None:
    """The slope of the root is infinite at zero, where its value is fine."""
    w = keras.Variable([0.0, 1.0], name="w")
    optimizer = keras.optimizers.SGD(0.1)

    @ts.function(nan_policy="skip")
    def step(x: Any) -> Any:
        value, gradients = ts.value_and_grad(lambda: ops.sum(ops.sqrt(w) * x), [w])()
        optimizer.apply(gradients, [w])
        return value

    assert float(step(np.ones(2))) == 1.0
    assert step.skipped == 1
    assert_equal(values_of([w]), [[0.0, 1.0]])
    assert int(optimizer.iterations) == 0
    w.assign([1.0, 1.0])
    step(np.ones(2))
    assert step.skipped == 1
    assert int(optimizer.iterations) == 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
def test_fit_goes_on_and_its_history_is_of_the_good_batches(steps: int) -> None:
    trainer, other = (lone(random_layers, adam, nan_policy="skip") for _ in range(2))
    x, y = normal(96, 6, seed=3), normal(96, 2, seed=4)
    bad = x.copy()
    bad[[20, 44, 70, 90], 3] = np.nan, np.inf, np.nan, np.inf  # the last batch is among them
    kept = [row for row in range(96) if row // 8 not in (2, 5, 8, 11)]
    good = x[kept], y[kept]
    settings: dict[str, Any] = {"batch_size": 8, "shuffle": False, "progress": False, "epochs": 2}

    got = trainer.fit(bad, y, steps_per_call=steps, **settings).history
    wanted = other.fit(*good, steps_per_call=steps, **settings).history

    assert trainer.skipped == 8
    assert_equal(everything(trainer), everything(other))
    for name, values in wanted.items():  # a metric's own division, not that in the program
        assert got[name] == pytest.approx(values, rel=1e-6)


@pytest.mark.slow
def test_only_training_is_guarded() -> None:
    trainer = lone(mlp, regression, nan_policy="raise", check_values=False)
    trainer.train_on_batch(X, Y)

    assert np.isnan(trainer.test_on_batch(NAN, Y)["loss"])
    assert np.isnan(host(trainer.predict_on_batch(NAN))).all()
    assert np.isnan(host(trainer.run("loss", NAN, Y)))
    assert "NaN" in trainer.inspect(NAN, Y).first_bad
    before = everything(trainer)
    with pytest.raises(ts.NonFiniteError):
        trainer.run("loss", NAN, Y, update=True)
    assert trainer.skipped == 1
    assert_equal(
        everything(trainer)[: len(trainer.model.variables)], before[: len(trainer.model.variables)]
    )


# A step of one's own --------------------------------------------------------------------------


def counter_of_kinds() -> dict[str, keras.Variable]:
    return {
        "bool": keras.Variable(False, dtype="bool", trainable=False),
        "int": keras.Variable(0, dtype="int32", trainable=False),
        "uint": keras.Variable(0, dtype="uint8", trainable=False),
        "half": keras.Variable(0.0, dtype="float16", trainable=False),
        "float": keras.Variable(np.zeros((2, 3)), dtype="float32", trainable=False),
    }


@pytest.mark.parametrize("differentiates", [True, False])
def test_variables_of_any_type_stay(differentiates: bool) -> None:
    kinds, w = counter_of_kinds(), keras.Variable(1.0, name="w")

    @ts.function(nan_policy="skip")
    def step(x: Any) -> Any:
        kinds["bool"].assign(True)
        for name in ("int", "uint", "half"):
            kinds[name].assign(kinds[name].value + ops.cast(1, kinds[name].dtype))
        kinds["float"].assign_add(ops.ones((2, 3)) * x)
        if differentiates:
            return ts.value_and_grad(lambda: w * x, [w])()[0]
        return x * 2.0

    assert np.isnan(host(step(np.nan)))
    assert [host(v).sum() for v in kinds.values()] == [0, 0, 0, 0, 0]
    assert float(step(1.0)) in (1.0, 2.0)
    assert [host(v).sum() for v in kinds.values()] == [1, 1, 1, 1, 6]
    assert step.skipped == 1


def test_a_step_in_which_nothing_can_be_bad_is_done() -> None:
    count = keras.Variable(0, dtype="int32", trainable=False)

    @ts.function(nan_policy="raise")
    def step(x: Any) -> Any:
        count.assign_add(1)
        return x

    assert np.isnan(host(step(np.nan)))
    assert (int(count.value), step.skipped) == (1, 0)


def test_a_variable_that_never_was_finite_does_not_count() -> None:
    best, total = keras.Variable(np.inf), keras.Variable(0.0)

    @ts.function(nan_policy="skip")
    def step(x: Any) -> None:
        best.assign(ops.minimum(best.value, x + np.inf))
        total.assign_add(x)

    step(1.0)
    assert (float(total.value), step.skipped) == (1.0, 0)
    step(np.nan)
    assert (float(total.value), step.skipped) == (1.0, 1)


@pytest.mark.parametrize("which", [0, 1])
def test_of_two_differentiations_each_counts(which: int) -> None:
    a, b = keras.Variable(1.0, name="a"), keras.Variable(1.0, name="b")

    @ts.function(nan_policy="raise")
    def step(x: Any) -> Any:
        values = []
        for variable, factor in ((a, x[0]), (b, x[1])):
            value, (slope,) = ts.value_and_grad(lambda: variable * factor, [variable])()
            variable.assign_sub(0.1 * slope)
            values.append(value)
        return values

    step(np.ones(2))
    before = values_of([a, b])
    x = np.ones(2, "float32")
    x[which] = np.inf
    with pytest.raises(ts.NonFiniteError, match=["the loss is inf", "loss 2 is inf"][which]):
        step(x)
    assert_equal(values_of([a, b]), before)


def test_gradients_by_arguments_and_by_all_that_is_read() -> None:
    w = keras.Variable([1.0, 2.0], name="w")

    @ts.function(nan_policy="raise")
    def step(x: Any) -> Any:
        slope = ts.grad(lambda x: ops.sum(w * x["in"] * x["in"]), argnums=0)(x)["in"]
        (by_w,) = ts.grad(lambda: ops.sum(w * slope))()
        w.assign_sub(0.1 * by_w)
        return slope

    for n in (2, 2):
        step({"in": np.ones(n)})
    with pytest.raises(ts.NonFiniteError, match=r"argument of loss 1\['in'\]"):
        step({"in": np.array([np.inf, 1.0])})
    assert step.skipped == 1
    assert np.isfinite(host(w)).all()


def test_gradients_by_an_argument_of_a_size_that_varies() -> None:
    """What fills the padding counts for nothing."""
    w = keras.Variable(1.0, name="w")

    @ts.function(nan_policy="skip")
    def step(x: Any) -> Any:
        slope = ts.grad(lambda x: ops.sum(w * ops.log(x)), argnums=0)(x)
        w.assign_add(ops.mean(slope))
        return w.value

    for n in (8, 5, 3, 7):
        step(np.ones((n, 2), "float32"))
    assert (float(w.value), step.skipped) == (16.0, 0)
    step(np.zeros((6, 2), "float32"))
    assert (float(w.value), step.skipped) == (16.0, 1)


def test_what_is_differentiated_in_a_branch_is_judged_by_what_is_written() -> None:
    w = keras.Variable(1.0, name="w")

    @ts.function(nan_policy="skip")
    def step(x: Any, sign: Any) -> Any:
        slope = ops.cond(
            sign > 0,
            lambda: ts.grad(lambda: w * x, [w])()[0],
            lambda: ts.grad(lambda: -w * x, [w])()[0],
        )
        w.assign_sub(slope)

    for x, sign, wanted in (
        (1.0, 1.0, 0.0),
        (np.nan, 1.0, 0.0),
        (np.nan, -1.0, 0.0),
        (1.0, -1.0, 1.0),
    ):
        step(x, sign)
        assert float(w.value) == wanted
    assert step.skipped == 2


def test_the_engines_own_gradient_in_a_guarded_step(backend: str) -> None:
    w = keras.Variable([1.0, 2.0], name="w")
    optimizer = keras.optimizers.SGD(0.5)

    def gradient(x: Any) -> Any:
        if backend == "tensorflow":
            import tensorflow as tf

            for _ in range(2):  # a second tape sees the reads, too
                with tf.GradientTape() as tape:
                    loss = ops.sum(w * x)
                found = tape.gradient(loss, [w])
            return found
        if backend == "torch":
            ops.sum(w * x).backward()
            return [w.value.grad]
        import jax

        return [jax.grad(lambda value: ops.sum(value * x))(w.value)]

    @ts.function(nan_policy="skip")
    def step(x: Any) -> None:
        optimizer.apply(gradient(x), [w])

    step(np.ones(2))
    assert_equal(values_of([w]), [[0.5, 1.5]])
    step(np.array([1.0, np.inf]))
    assert_equal(values_of([w]), [[0.5, 1.5]])
    assert (step.skipped, int(optimizer.iterations)) == (1, 1)


def test_a_step_that_runs_as_python_is_guarded() -> None:
    """On torch `while_loop` cannot be recorded; updates in place are noticed all the same."""
    w = keras.Variable([1.0, 2.0], name="w")
    optimizer = keras.optimizers.SGD(0.5)

    @ts.function(nan_policy="raise")
    def step(x: Any) -> Any:
        value, gradients = ts.value_and_grad(lambda: ops.sum(w * x), [w])()
        optimizer.apply(gradients, [w])
        return ops.while_loop(lambda n: n > 2, lambda n: [n / 2], [value])[0]

    for _ in range(2):
        step(np.ones(2))
    before = values_of([w, optimizer.iterations])
    for _ in range(2):
        with pytest.raises(ts.NonFiniteError, match="the loss is nan"):
            step(np.array([np.nan, 1.0]))
    assert_equal(values_of([w, optimizer.iterations]), before)
    step(np.ones(2))
    assert (step.skipped, int(optimizer.iterations)) == (2, 3)


def test_mixed_precision_lowers_its_scale_and_skips_bad_losses() -> None:
    def build() -> keras.Model:
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(2, dtype="mixed_float16", name="half")]
        )

    keras.utils.set_random_seed(5)
    inner = keras.optimizers.Adam(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15)
    trainer = ts.Trainer(build(), optimizer, "mse", nan_policy="skip", check_values=False)

    trainer.train_on_batch(NAN, Y)
    assert trainer.skipped == 1
    assert float(optimizer.dynamic_scale.value) == 2.0**15
    before = everything(trainer)
    trainer.train_on_batch(X, 1000 * Y)  # a finite loss whose scaled gradients overflow float16
    assert float(optimizer.dynamic_scale.value) == 2.0**14
    assert trainer.skipped == 1
    trainer.train_on_batch(NAN, Y)
    assert trainer.skipped == 2
    assert float(optimizer.dynamic_scale.value) == 2.0**14
    weights = values_of(trainer.model.trainable_variables)
    assert_equal(weights, before[: len(weights)])
    trainer.train_on_batch(X / 100, Y / 100)
    assert not np.array_equal(host(trainer.model.trainable_variables[0]), weights[0])


# Inside another step --------------------------------------------------------------------------


def gan(first: str | None, second: str | None) -> tuple[ts.Trainer, ts.Trainer]:
    return tuple(  # type: ignore[return-value]
        lone(mlp, regression, nan_policy=policy, check_values=False) for policy in (first, second)
    )


@pytest.mark.slow
def test_of_two_trainers_in_a_function_the_bad_one_skips() -> None:
    one, two = gan("skip", "skip")
    alone = lone(mlp, regression, nan_policy="skip")
    steps = keras.Variable(0, dtype="int32", trainable=False)

    @ts.function
    def both(x: Any, bad: Any, y: Any) -> Any:
        steps.assign_add(1)
        return one.train_on_batch(x, y)["loss"], two.train_on_batch(bad, y)["loss"]

    before = everything(two)
    for i in range(3):
        x = normal(8, 6, seed=i)
        value, nan = both(x, NAN, Y)
        assert float(value) == pytest.approx(alone.train_on_batch(x, Y)["loss"], rel=1e-5)
        assert np.isnan(host(nan))
    assert (one.skipped, two.skipped, int(steps.value), both.skipped) == (0, 3, 3, 0)
    after = everything(two)
    assert_equal(after[:4], before[:4])  # the weights; slots came with the first step
    assert int(two.optimizer.iterations) == 0
    for a, b in zip(everything(one), everything(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_guarded_function_in_another_guards_its_own_writes() -> None:
    inside, outside = keras.Variable(0.0), keras.Variable(0.0)

    @ts.function(nan_policy="skip")
    def inner(x: Any) -> None:
        inside.assign_add(x)

    @ts.function(nan_policy="skip")
    def outer(x: Any, y: Any) -> None:
        inner(x)
        outside.assign_add(y)

    def state() -> tuple[float, float, int, int]:
        return float(inside.value), float(outside.value), inner.skipped, outer.skipped

    outer(1.0, 1.0)
    assert state() == (1.0, 1.0, 0, 0)
    outer(np.nan, 1.0)
    assert state() == (1.0, 2.0, 1, 0)
    outer(1.0, np.nan)  # the whole of the outer step is undone, the inner one with it
    assert state() == (1.0, 2.0, 1, 1)
    inner(np.inf)
    assert state() == (1.0, 2.0, 2, 1)


@pytest.mark.parametrize("inside", ["plain", "cond", "differentiation"])
def test_a_raising_function_in_another_raises_when_that_returns(inside: str) -> None:
    w, others = keras.Variable(1.0, name="w"), keras.Variable(0.0)

    @ts.function(nan_policy="raise")
    def inner(x: Any) -> Any:
        value, (slope,) = ts.value_and_grad(lambda: w * x, [w])()
        w.assign_sub(slope)
        return value

    @ts.function
    def outer(x: Any) -> Any:
        others.assign_add(1.0)
        if inside == "plain":
            inner(1.0)
            return inner(x), inner(1.0)
        if inside == "cond":
            return ops.cond(x < 0, lambda: 0 * x, lambda: inner(x))
        return ts.value_and_grad(lambda z: inner(z), argnums=0)(x)

    outer(1.0)
    before = float(w.value)
    with pytest.raises(ts.NonFiniteError, match="`inner`: the loss or a gradient of this batch"):
        outer(np.inf)
    assert float(others.value) == 2.0
    assert float(w.value) == before - (2.0 if inside == "plain" else 0.0)
    outer(1.0)
    assert inner.skipped == 1


def test_a_plain_tf_function_around_a_guard_is_refused(backend: str) -> None:
    if backend != "tensorflow":
        pytest.skip("tf.function is TensorFlow's")
    import tensorflow as tf

    trainer = lone(mlp, regression, nan_policy="skip")
    with pytest.raises(ts.ArgumentError, match="`nan_policy`"):
        tf.function(lambda x: trainer.train_on_batch(x, Y)["loss"], autograph=False)(X)


# Raising --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        "`step`: the loss or a gradient of this batch is not finite; no variable was updated.",
        "got:      the loss is nan; the gradients by ",
        "h/kernel, ",
        " and 1 more are not finite",
        "skipped:  2 so far",
        "to fix:   look at the batch with `Trainer.inspect`",
        'nan_policy="skip"',
    ],
)
def test_the_message_says(part: str) -> None:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    @ts.function(nan_policy="raise")
    def step(x: Any, y: Any) -> Any:
        def loss_of() -> Any:
            return ops.mean((model(x) - y) ** 2)

        value, gradients = ts.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return value

    step(X, Y)
    with pytest.raises(ts.NonFiniteError):
        step(NAN, Y)
    with pytest.raises(ts.NonFiniteError, match=re.escape(part)) as caught:
        step(NAN, Y)
    assert (caught.value.function, caught.value.skipped) == ("step", 2)


@pytest.mark.slow
def test_a_raising_trainer_is_as_it_was() -> None:
    trainer = lone(random_layers, adam, nan_policy="raise")
    for batch, _ in batches(4, (16,), share=0.0):
        trainer.train_on_batch(*batch)
    before = everything(trainer)
    for batch, bad in batches(40, (16,), share=1.0):
        assert bad
        with pytest.raises(ts.NonFiniteError, match=r"\.train`: the loss or a gradient"):
            trainer.train_on_batch(*batch)
    assert_equal(everything(trainer), before)
    assert (trainer.skipped, trainer.trace_count) == (40, 1)


@pytest.mark.slow
@pytest.mark.parametrize("optimize", ["trace", "full"])
def test_sizes_that_vary_raise(optimize: str) -> None:
    trainer = lone(random_layers, adam, nan_policy="raise", optimize=optimize)
    for batch, bad in batches(3, (32, 17, 9), share=0.0) + batches(12, (32, 17, 9)):
        if bad:
            before = everything(trainer)
            with pytest.raises(ts.NonFiniteError, match=r"dense\w*/kernel"):
                trainer.train_on_batch(*batch)
            assert_equal(everything(trainer), before)
        else:
            trainer.train_on_batch(*batch)
    assert trainer.trace_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
def test_fit_raises(steps: int) -> None:
    trainer = lone(random_layers, adam, nan_policy="raise")
    x, y = normal(64, 6, seed=3), normal(64, 2, seed=4)
    x[45] = np.nan
    which = "" if steps == 1 else r"which:    batch 2 of the 4 in this call"

    with pytest.raises(ts.NonFiniteError, match=which):
        trainer.fit(x, y, batch_size=8, shuffle=False, progress=False, steps_per_call=steps)

    assert trainer.skipped == 1
    assert int(trainer.optimizer.iterations) == (5 if steps == 1 else 7)
    assert all(np.isfinite(value).all() for value in everything(trainer))


# What else may happen -------------------------------------------------------------------------


def test_threads_share_the_count() -> None:
    total = keras.Variable(0.0)

    @ts.function(nan_policy="raise")
    def step(x: Any) -> Any:
        total.assign_add(x)
        return total.value

    step(0.0)
    seen: list[int] = []

    def work(x: float) -> None:
        raised = 0
        for _ in range(50):
            try:
                step(x)
            except ts.NonFiniteError:
                raised += 1
            assert step.skipped <= 100
        seen.append(raised)

    threads = [threading.Thread(target=work, args=(x,)) for x in (1.0, np.nan, 1.0, np.inf)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(seen) == [0, 0, 50, 50]
    assert (step.skipped, float(total.value), step.trace_count) == (100, 100.0, 1)


def test_a_failing_trace_counts_nothing() -> None:
    total = keras.Variable(0.0)

    @ts.function(nan_policy="skip")
    def step(x: Any, fail: bool) -> None:
        total.assign_add(x)
        if fail:
            raise RuntimeError("in the middle")

    step(np.nan, False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the middle"):
            step(np.nan, True)
    assert (step.skipped, float(total.value)) == (1, 0.0)
    step(1.0, False)
    assert (step.skipped, float(total.value)) == (1, 1.0)


def test_a_function_made_again_counts_on() -> None:
    """It finds its programs with the model, and they have one count."""
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    def made() -> Any:
        @ts.function(nan_policy="skip")
        def step(x: Any) -> Any:
            value, gradients = ts.value_and_grad(
                lambda: ops.mean(model(x)), model.trainable_variables
            )()
            optimizer.apply(gradients, model.trainable_variables)
            return value

        return step

    for count in (1, 2):
        step = made()
        step(NAN)
        assert (step.skipped, step.trace_count) == (count, 1)


@pytest.mark.slow
def test_without_the_policy_a_program_is_what_it_was() -> None:
    def writes(policy: str | None) -> tuple[int, int]:
        trainer = lone(mlp, regression, nan_policy=policy)
        trainer.train_on_batch(X, Y)
        event = trainer.ledger[0]
        return len(event.reads), len(event.writes)

    reads, written = writes(None)
    assert writes("skip") == (reads + 1, written + 1)  # the count
    assert writes("raise") == (reads + 2, written + 2)  # and what was found

    def step(x: Any) -> Any:
        return x

    plain = ts.function(step)
    assert plain._compiler._tracer._run is plain._inlined is step
    assert plain.skipped == 0


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ts.ArgumentError, match="`nan_policy`"):
        ts.function(nan_policy="ignore")
