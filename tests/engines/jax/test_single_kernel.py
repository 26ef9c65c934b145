"""Small steps on JAX, which the calling thread runs as one kernel: the numbers of the other way.

ROUNDING: an older part of XLA writes the kernel. It sums in another order, and where XLA fuses
otherwise the last bit of a number differs: 1.2e-7 of it was seen after five steps.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("how JAX runs small steps", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax import lax
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, normal, values_of
from trainstep._engines.jax import program as _jax_program
from trainstep._engines.jax.tricks import single_kernel

ROUNDING = {"rtol": 5e-7, "atol": 5e-7}
X, Y, LABELS = normal(16, 6), normal(16, 1, seed=1), np.arange(16) % 3


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The small programs that are compiled; None for one that XLA could not."""
    made: list[Any] = []
    real = single_kernel.compiled_small

    def noted(lowered: Any, *, at_once: bool) -> Any:
        made.append(real(lowered, at_once=at_once))
        return made[-1]

    monkeypatch.setattr(_jax_program, "compiled_small", noted)
    return made


@pytest.fixture
def as_ever(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Runs something as if no step was small."""

    def run(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(single_kernel, "_WORK", -1)
            return function()

    return run


def trainer_of(*hidden: Any, loss: Any = "mse", outputs: int = 1, **how: Any) -> ts.Trainer:
    model = keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(outputs)])
    return ts.Trainer(model, keras.optimizers.Adam(1e-2), loss, **how)


def test_a_small_step_is_one_kernel(compiled: list[Any]) -> None:
    trainer_of(layers.Dense(8, "relu"), metrics=["mae"]).train_on_batch(X, Y)

    (program,) = compiled
    entry = program.as_text().partition("ENTRY ")[2]
    assert entry.count(" call(") == 1
    assert 'xla_cpu_small_call="true"' in entry
    assert " fusion(" not in entry
    assert " dot(" not in entry


def test_a_small_step_is_done_when_its_call_returns() -> None:
    trainer = trainer_of(layers.Dense(8, "relu"))
    trainer.train_on_batch(X, Y)

    ready = []
    for _ in range(200):  # on another thread, hardly one of them would be
        logs = trainer.train_on_batch(X, Y)
        ready.append(logs.tensors["loss"].is_ready())

    assert all(ready)


def test_several_small_steps_are_one_kernel(compiled: list[Any]) -> None:
    x, y = normal(16 * 64, 6), normal(16 * 64, 1, seed=1)
    trainer = trainer_of(layers.Dense(24, "relu"))

    trainer.fit(x, y, batch_size=16, steps_per_call=64, progress=False)

    (program,) = compiled
    assert program.as_text().partition("ENTRY ")[2].count(" call(") == 1


MODELS: dict[str, Callable[[], ts.Trainer]] = {
    "relu": lambda: trainer_of(layers.Dense(8, "relu"), metrics=["mae"]),
    "gelu, tanh": lambda: trainer_of(layers.Dense(8, "gelu"), layers.Dense(4, "tanh")),
    "sigmoid, elu": lambda: trainer_of(layers.Dense(8, "sigmoid"), layers.Dense(4, "elu")),
    "dropout": lambda: trainer_of(layers.Dense(8, "relu"), layers.Dropout(0.5)),
    "noise": lambda: trainer_of(layers.GaussianNoise(0.5)),
    # Without a bias, whose gradient would be zero but for rounding, which Adam makes a step of.
    "batch normalization": lambda: trainer_of(
        layers.Dense(8, use_bias=False), layers.BatchNormalization()
    ),
    "layer normalization": lambda: trainer_of(layers.Dense(8), layers.LayerNormalization()),
    "clipped": lambda: trainer_of(layers.Dense(8, "relu"), clip_norm=0.1),
    "guarded": lambda: trainer_of(layers.Dense(8, "relu"), nan_policy="skip"),
    "huber": lambda: trainer_of(layers.Dense(8), loss="huber", metrics=["mape"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_small_step_gives_the_numbers_of_the_other_way(
    name: str, compiled: list[Any], as_ever: Any
) -> None:
    def run() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        trainer = MODELS[name]()
        logs = [dict(trainer.train_on_batch(X, Y)) for _ in range(5)]
        found = [np.array(list(each.values())) for each in logs]
        return [*found, *values_of([*trainer.model.variables, *trainer.optimizer.variables])]

    small = run()
    assert len(compiled) == 1
    assert compiled[0] is not None
    assert_same(small, as_ever(run), **ROUNDING)
    assert len(compiled) == 1


def test_a_small_classifier_gives_the_numbers_of_the_other_way(
    compiled: list[Any], as_ever: Any
) -> None:
    def run() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = trainer_of(layers.Dense(8), loss=loss, outputs=3, metrics=["accuracy"])
        trainer.fit(X, LABELS, batch_size=8, epochs=3, shuffle=False, progress=False)
        found = trainer.evaluate(X, LABELS)
        return [np.array(list(found.values())), *values_of(trainer.model.variables)]

    small = run()
    assert compiled
    assert None not in compiled
    assert_same(small, as_ever(run), **ROUNDING)


@pytest.mark.parametrize("sizes", [(16, 5, 11, 16, 3)], ids=str)
def test_sizes_that_vary_give_the_numbers_of_the_other_way(
    sizes: tuple[int, ...], compiled: list[Any], as_ever: Any
) -> None:
    def run() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        trainer = trainer_of(layers.Dense(8, "relu"), shapes=ts.Shapes(background=False))
        losses = [trainer.train_on_batch(X[:size], Y[:size])["loss"] for size in sizes]
        return [np.array(losses), *values_of(trainer.model.variables)]

    small = run()
    assert compiled
    assert_same(small, as_ever(run), **ROUNDING)


# Every operation by itself -------------------------------------------------------------------

SPECIAL = np.array([0.0, -0.0, 1e-42, -1e-42, 1.5, -2.5, 3e38, np.inf, -np.inf, np.nan], "f")
FLOATS = np.concatenate([SPECIAL, normal(22)]).reshape(8, 4)
INTS = np.array([0, 1, -1, 7, -8, 2**31 - 1, -(2**31), 12], "int32").reshape(2, 4)
UNARY = (
    "abs ceil cos erf erf_inv erfc exp exp2 expm1 floor is_finite log log1p logistic neg round "
    "rsqrt sign sin sqrt square tan tanh"
).split()
BINARY = "add sub mul div max min rem pow eq ne lt le gt ge atan2 nextafter".split()
OF_INTS = (
    "add sub mul max min eq lt bitwise_and bitwise_or bitwise_xor shift_left "
    "shift_right_arithmetic shift_right_logical"
).split()
OTHERS: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: jnp.argmax(x, 1),
    "argmin": lambda x: jnp.argmin(x, 0),
    "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "concatenate": lambda x: jnp.concatenate([x, x[:2]]),
    "to int": lambda x: jnp.clip(jnp.nan_to_num(x), -9, 9).astype(jnp.int32),
    "cumsum": lambda x: jnp.cumsum(jnp.arange(12.0).reshape(3, 4) + x[:3, 1:2] * 0 + 1, axis=1),
    "dot": lambda x: x[3:] @ x[3:].T,
    "integer_pow": lambda x: x**3,
    "iota": lambda x: x + lax.iota(jnp.float32, 4),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=3.0),
    "reduce_max": lambda x: jnp.max(x, 0),
    "reduce_min": lambda x: jnp.min(x, 1),
    "reduce_prod": lambda x: jnp.prod(x[4:], 0),
    "reduce_sum": lambda x: jnp.sum(x, 1),
    "reduce_and": lambda x: jnp.all(x > 0, 0),
    "reduce_or": lambda x: jnp.any(x > 0, 1),
    "reshape": lambda x: x.reshape(4, 8),
    "rev": lambda x: x[::-1],
    "select": lambda x: jnp.where(x > 0, x, -x),
    "slice": lambda x: x[1:7:2, 1:],
    "split": lambda x: jnp.split(x, 2)[1],
    "stack": lambda x: jnp.stack([x, x + 1]),
    "transpose": lambda x: x.T,
}
FUNCTIONS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    **{name: (getattr(lax, name), FLOATS) for name in UNARY},
    **{
        f"{name} of two": (lambda x, f=getattr(lax, name): f(x, x[::-1]), FLOATS) for name in BINARY
    },
    **{
        f"{name} of ints": (lambda x, f=getattr(lax, name): f(x, x[::-1]), INTS) for name in OF_INTS
    },
    **{name: (function, FLOATS) for name, function in OTHERS.items()},
    "not": (lambda x: ~x, INTS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation_gives_the_numbers_of_the_other_way(name: str, as_ever: Any) -> None:
    function, x = FUNCTIONS[name]

    def run() -> np.ndarray:
        return np.asarray(ts.function(lambda x: function(ops.convert_to_tensor(x)))(x))

    with np.errstate(all="ignore"):
        small, other = run(), as_ever(run)
    assert small.dtype == other.dtype
    np.testing.assert_allclose(small, other, rtol=3e-7, atol=1e-37)
    zeros = (other == 0) & (np.asarray(other).dtype.kind == "f")
    np.testing.assert_array_equal(np.signbit(small[zeros]), np.signbit(other[zeros]))


def test_the_draws_of_a_small_step_are_those_of_the_other_way(as_ever: Any) -> None:
    def run() -> list[np.ndarray]:
        seeds = keras.random.SeedGenerator(3)

        @ts.function
        def draw(x):
            bits = keras.random.uniform((5,), seed=seeds)
            return bits, keras.random.normal((5,), seed=seeds), seeds.state.value

        return [np.asarray(value) for _ in range(2) for value in draw(X)]

    assert_same(run(), as_ever(run), rtol=0, atol=1e-7)


UNUSED = """
import keras, numpy as np, trainstep as ts
from keras import layers, ops
from trainstep._engines import _jax_program

made, real = [], _jax_program.compiled_small
def noted(lowered, **how):
    made.append(real(lowered, **how))
    return made[-1]
_jax_program.compiled_small = noted

x = ops.convert_to_tensor(np.arange(6, dtype="float32").reshape(2, 3) + 1)
i = ops.convert_to_tensor(np.arange(6, dtype="int32"))
number = keras.Variable(3, dtype="int32", trainable=False)
flag = keras.Variable(False, dtype="bool", trainable=False)
one = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
steps = [
    lambda: ts.function(lambda x: ops.argmax(one(x), -1))(x),
    lambda: ts.function(lambda x: (number.assign(number * 0), x + 1)[1])(x),
    lambda: ts.function(lambda x: (number.assign(number - number), x + 1)[1])(x),
    lambda: ts.function(lambda x: (flag.assign(ops.logical_and(flag, False)), x + 1)[1])(x),
    lambda: ts.function(lambda x: (flag.assign(ops.logical_or(flag, True)), x + 1)[1])(x),
    lambda: ts.function(lambda x: x**0)(x),
    lambda: ts.function(lambda i: ops.equal(i, i))(i),
    lambda: ts.function(lambda i, x: ops.where(i >= i, 1.0, 0.0))(i, x),
]
for step in steps:
    step()
assert len(made) == len(steps) and None not in made, made
assert (int(number.value), bool(flag.value)) == (0, True)
print("all ran")
"""


def test_what_nothing_uses_once_it_is_simplified_does_not_end_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", UNUSED], capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip().endswith("all ran")


def test_programs_at_random_give_the_numbers_of_the_other_way(as_ever: Any) -> None:
    rng = np.random.default_rng(5)
    unary = [jnp.tanh, jnp.abs, lambda x: x * 0, lambda x: x[::-1], jnp.exp, lambda x: -x]
    binary = [jnp.add, jnp.multiply, jnp.maximum, lambda a, b: jnp.where(a > b, a, b - 1)]
    whole = [jnp.sum, jnp.max, lambda x: jnp.mean(x, 0), lambda x: x.T @ x, jnp.argmax]
    for _ in range(25):
        variables = [keras.Variable(normal(3, 4, seed=k), trainable=False) for k in range(4)]
        start = values_of(variables)
        plan = [(rng.integers(3), *rng.integers(0, 99, 4)) for _ in range(8)]

        def step(x, variables=variables, plan=plan):
            values = [x, *(v.value for v in variables)]
            for kind, *at in plan:
                a, b = (values[place % len(values)] for place in at[:2])
                new = unary[at[2] % 6](a) if kind else binary[at[2] % 4](a, b)
                values.append(jnp.clip(new, -5, 5))
                variables[at[3] % 4].assign(values[-1])
            return [
                function(values[place % len(values)])
                for (_, place, *_), function in zip(plan, whole, strict=False)
            ]

        def run(variables=variables, start=start, step=step):
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
            made = ts.function(lambda x: step(x))
            outs = [np.asarray(out) for _ in range(2) for out in made(normal(3, 4, seed=9))]
            return [*outs, *values_of(variables)]

        assert_same(run(), as_ever(run), rtol=1e-5, atol=1e-5)


# What is not small ---------------------------------------------------------------------------


LARGER: dict[str, Callable[[Any], Any]] = {
    "a large product": lambda x: x @ ops.transpose(x),
    "a sort": lambda x: ops.sort(x[:2]),
    "a loop": lambda x: ops.fori_loop(0, 3, lambda _, y: y * 2, x[:2]),
    "half precision": lambda x: ops.cast(x[:2], "float16") * 2,
}


@pytest.mark.parametrize("name", LARGER)
def test_what_is_larger_or_not_known_is_compiled_as_ever(name: str, compiled: list[Any]) -> None:
    function = LARGER[name]

    ts.function(lambda x: function(x))(normal(32, 64))

    assert not compiled


def test_a_step_that_takes_nothing_is_compiled_as_ever(compiled: list[Any]) -> None:
    assert float(ts.function(lambda: ops.sum(ops.ones(3)))()) == 3.0
    assert not compiled


def test_what_xla_cannot_compile_so_is_compiled_as_ever(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_kernel, "_KNOWN", single_kernel._KNOWN | {"sort"})

    found = ts.function(lambda x: ops.sort(x))(X)

    assert compiled == [None]
    np.testing.assert_array_equal(found, np.sort(X))


def test_a_small_program_on_disk_is_read_and_done_when_its_call_returns(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir

    def run() -> tuple[list[float], bool, list[bool]]:
        keras.utils.set_random_seed(0)
        trainer = trainer_of(layers.Dense(8, "relu"), layers.Dense(8, "tanh"))
        losses = [trainer.train_on_batch(X, Y)["loss"] for _ in range(3)]
        ready = [trainer.train_on_batch(X, Y).tensors["loss"].is_ready() for _ in range(100)]
        return losses, trainer.ledger[0].from_disk, ready

    ts.set_cache(tmp_path)
    try:
        first, found, _ = run()
        jax.clear_caches()
        again, found_again, ready = run()
    finally:
        ts.set_cache(None)

    assert (found, found_again) == (False, True)
    assert all(ready)
    assert first == again
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize(("count", "small"), [(20, True), (60, False)])
def test_a_step_of_many_variables_is_not_small(
    count: int, small: bool, compiled: list[Any]
) -> None:
    variables = [keras.Variable(np.zeros(4, "float32")) for _ in range(count)]

    @ts.function
    def step(x):
        for variable in variables:
            variable.assign(variable + x)

    step(np.ones(4, "float32"))
    assert bool(compiled) is small
    assert all((ops.convert_to_numpy(v) == 1).all() for v in variables)
