"""Code of the engine's own inside a step, and the two compilers of an engine."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts
from trainstep.testing import assert_traces


def weights() -> keras.Variable:
    return keras.Variable(np.array([1.0, 2.0, 3.0], "float32"), name="w")


def test_the_engines_own_gradient_works_in_a_step(backend: str) -> None:
    """A tape, `torch.autograd` and `jax.grad` see the variables that the step reads."""
    w = weights()
    optimizer = keras.optimizers.SGD(0.1)

    def gradient(x):
        if backend == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = ops.sum(w * w * x)
            return tape.gradient(loss, [w])
        if backend == "torch":
            import torch

            return torch.autograd.grad(ops.sum(w * w * x), [w.value])
        import jax

        return [jax.grad(lambda value: ops.sum(value * value * x))(w.value)]

    @ts.function
    def step(x):
        (slope,) = gradient(x)
        optimizer.apply([slope], [w])
        return slope

    for _ in range(2):
        before = w.numpy().copy()
        slope = ops.convert_to_numpy(step(np.ones(3)))
        # One product and one subtraction in float32.
        np.testing.assert_allclose(slope, 2 * before, rtol=1e-6)
        np.testing.assert_allclose(w.numpy(), before - 0.1 * slope, rtol=1e-6)
    assert step.trace_count == 1


def test_measuring_keeps_one_compiler_and_every_call_is_a_step() -> None:
    count = keras.Variable(0.0)

    @ts.function(optimize="measure")
    def step(x):
        count.assign_add(1.0)
        return ops.sum(x) * count.value

    with assert_traces(step, 1):
        values = [float(step(np.ones(4))) for _ in range(40)]

    assert values == [4.0 * n for n in range(1, 41)]
    assert step.ledger[0].compiler in ("xla", "graph", "inductor")


def test_an_unknown_compiler_is_refused_by_name() -> None:
    with pytest.raises(ts.ArgumentError, match="`optimize`"):
        ts.function(optimize="fastest")


def test_without_donation_a_step_gives_the_same() -> None:
    w = weights()

    @ts.function(donate=False)
    def step(x):
        w.assign_add(x)
        return w.value

    held = w.numpy().copy()
    step(np.ones(3))
    np.testing.assert_array_equal(w.numpy(), held + 1)


def test_the_ledger_says_when_a_step_runs_as_python(backend: str) -> None:
    @ts.function
    def halve(x):
        return ops.while_loop(lambda x: ops.sum(x) > 1, lambda x: [x / 2], [x])[0]

    halve(np.ones(4))
    assert (halve.ledger[0].compiler == "python") == (backend == "torch")
    assert ("keras.ops.while_loop" in halve.ledger[0].advice) == (backend == "torch")


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="names are TensorFlow's")
def test_what_a_step_creates_has_no_native_name() -> None:
    """By each name, the runtime keeps 34 KB for ever; Keras's own paths are as they were."""
    model = keras.Sequential([keras.layers.Dense(1, name="last")], name="unnamed_inside")
    trainer = ts.Trainer(model, optimizer="adam", loss="mse")

    trainer.train_on_batch(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))

    created = [*model.variables, *trainer.optimizer.variables[2:]]
    assert {v.value.name for v in created} == {"Variable:0"}
    assert created[0].path == "unnamed_inside/last/kernel"
    assert created[2].path.endswith("unnamed_inside_last_kernel_momentum")
