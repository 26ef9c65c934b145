"""Rewritten equations against the plain ones: the same numbers, and not where it is not sure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("equations are JAX's", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

import trainstep as ts
from trainstep._engines.jax import tricks
from trainstep._engines.jax.tricks.rewrites import rewritten

Function = Callable[..., Any]

WINDOWS = {
    "2x2": ((3, 6, 4, 2), (1, 2, 2, 1)),
    "2x2 of odd sizes": ((3, 7, 5, 2), (1, 2, 2, 1)),
    "channels first": ((2, 3, 6, 8), (1, 1, 2, 2)),
    "3x2": ((2, 9, 4, 1), (1, 3, 2, 1)),
    "4x4": ((2, 8, 8, 3), (1, 4, 4, 1)),
    "a sequence": ((4, 9, 3), (1, 2, 1)),
    "a volume": ((2, 4, 5, 6, 2), (1, 2, 2, 3, 1)),
    "the batch, too": ((4, 6, 3), (2, 3, 1)),
    "one window": ((1, 2, 2, 1), (1, 2, 2, 1)),
}


def plain_and_new(function: Function, *arrays: Any) -> tuple[Function, Function, list[str]]:
    """A function for arrays like these, the same rewritten, and the operations of that."""
    closed = jax.make_jaxpr(function)(*arrays)
    new = rewritten(closed)
    jex.check_jaxpr(new.jaxpr)
    plain, after = (jax.jit(jex.jaxpr_as_fun(each)) for each in (closed, new))
    return plain, after, list(operations(new.jaxpr))


def operations(jaxpr: Any) -> Iterator[str]:
    """The names of all operations, those inside others too."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from operations(inner)


def pooled(window: tuple[int, ...], strides: Any = None, padding: str = "VALID") -> Function:
    """Max pooling, and its gradient for given slopes."""

    def function(x: Any, slopes: Any) -> Any:
        def pool(x: Any) -> Any:
            return lax.reduce_window(x, -jnp.inf, lax.max, window, strides or window, padding)

        value, back = jax.vjp(pool, x)
        return value, back(slopes.astype(value.dtype))[0]

    return function


def windows_of(shape: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size // part for size, part in zip(shape, window, strict=True))


def fillings(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Arrays with and without ties, and with all that is not a number."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=shape).astype(np.float32)
    some = rng.uniform(size=shape)
    return {
        "normal": normal,
        "ties": rng.integers(-1, 2, shape).astype(np.float32),
        "all equal": np.zeros(shape, np.float32),
        "zeros of both signs": np.where(some < 0.5, -0.0, 0.0).astype(np.float32),
        "NaN": np.where(some < 0.4, np.nan, np.round(normal)).astype(np.float32),
        "only NaN": np.full(shape, np.nan, np.float32),
        "infinities": np.select(
            [some < 0.3, some < 0.6, some < 0.7], [np.inf, -np.inf, np.nan], normal
        ).astype(np.float32),
        "only -inf": np.full(shape, -np.inf, np.float32),
    }


@pytest.mark.parametrize("case", WINDOWS)
def test_the_gradient_of_max_pooling_goes_where_it_went(case: str) -> None:
    """To the first of equal elements, and past a NaN as before: the very same numbers."""
    shape, window = WINDOWS[case]
    slopes = np.random.default_rng(1).normal(size=windows_of(shape, window)).astype(np.float32)
    arrays = fillings(shape)
    plain, new, names = plain_and_new(pooled(window), arrays["normal"], slopes)
    assert "select_and_scatter_add" not in names
    for name, x in arrays.items():
        for before, after in zip(plain(x, slopes), new(x, slopes), strict=True):
            np.testing.assert_array_equal(after, before, err_msg=name)


def test_slopes_that_are_not_finite_stay_in_their_windows() -> None:
    x = fillings((2, 4, 4, 3))["ties"]
    slopes = fillings((2, 2, 2, 3))["infinities"]
    plain, new, _ = plain_and_new(pooled((1, 2, 2, 1)), x, slopes)
    np.testing.assert_array_equal(new(x, slopes)[1], plain(x, slopes)[1])


@pytest.mark.parametrize(
    ("window", "strides", "padding", "dtype"),
    [
        ((1, 3, 3, 1), (1, 2, 2, 1), "VALID", "float32"),  # windows overlap
        ((1, 2, 2, 1), (1, 3, 3, 1), "VALID", "float32"),  # and do not meet
        ((1, 2, 2, 1), (1, 2, 2, 1), "SAME", "float32"),  # of an odd size: padding
        ((1, 5, 5, 1), (1, 5, 5, 1), "VALID", "float32"),  # too large
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID", "bfloat16"),
    ],
)
def test_other_windows_are_left_alone(
    window: tuple[int, ...], strides: tuple[int, ...], padding: str, dtype: str
) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, 11, 2)), dtype)
    function = pooled(window, strides, padding)
    sizes = jax.eval_shape(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding), x
    )
    closed = jax.make_jaxpr(function)(x, jnp.ones(sizes.shape, dtype))
    assert rewritten(closed).jaxpr is closed.jaxpr


SUMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "in front": ((1, 4, 5, 6), (3,)),
    "inside": ((4, 5, 1, 6), (1, 3)),
    "summed, too": ((4, 1, 6), (1, 2)),
    "only those": ((4, 1, 6, 1), (1, 3)),
    "all of them": ((1, 1), (0, 1)),
    "behind": ((4, 6, 1), (0,)),
    "none left": ((1, 1, 1), (1,)),
    "empty": ((1, 0, 3), (1,)),
}


def summed(axes: tuple[int, ...]) -> Function:
    return lambda x: lax.reduce_sum_p.bind(x, axes=axes, out_sharding=None)


@pytest.mark.parametrize("case", SUMS)
def test_a_sum_without_its_axes_of_size_one_is_the_same(case: str) -> None:
    shape, axes = SUMS[case]
    arrays = fillings(shape)
    plain, new, _ = plain_and_new(summed(axes), arrays["normal"])
    for name, x in arrays.items():
        before, after = plain(x)[0], new(x)[0]
        assert after.shape == before.shape
        # The terms may be added in another order.
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6, err_msg=name)


def test_sums_of_other_kinds_are_left_alone() -> None:
    for dtype in ("int32", "bfloat16", "float16"):
        closed = jax.make_jaxpr(summed((1,)))(jnp.ones((1, 4, 5), dtype))
        assert rewritten(closed).jaxpr is closed.jaxpr


PRODUCTS = {
    "a dense layer": ("ntd,de->nte", (3, 4, 5), (5, 6)),
    "heads": ("ntd,dhk->nthk", (3, 4, 5), (5, 2, 7)),
    "out of heads": ("nthk,hkd->ntd", (3, 4, 2, 7), (2, 7, 5)),
    "three axes": ("nabd,de->nabe", (3, 2, 4, 5), (5, 6)),
    "a vector": ("ntd,d->nt", (3, 4, 5), (5,)),
}


@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("precision", [None, "highest"])
def test_the_gradient_of_a_kernel_is_the_same(case: str, precision: str | None) -> None:
    equation, x_shape, kernel_shape = PRODUCTS[case]
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=x_shape), rng.normal(size=kernel_shape)
    arrays = [a.astype(np.float32) for a in (x, kernel)]

    def function(x: Any, kernel: Any) -> Any:
        def loss(x: Any, kernel: Any) -> Any:
            return jnp.sum(jnp.tanh(jnp.einsum(equation, x, kernel, precision=precision)))

        return jax.grad(loss, argnums=(0, 1))(x, kernel)

    plain, new, _ = plain_and_new(function, *arrays)
    for before, after in zip(plain(*arrays), new(*arrays), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


def test_a_product_that_is_also_used_unturned_stays() -> None:
    def function(x: Any, y: Any) -> Any:
        product = lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())))
        return product.T, product + 1

    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    plain, new, names = plain_and_new(function, x, x[..., :2])
    assert "transpose" in names
    for before, after in zip(plain(x, x[..., :2]), new(x, x[..., :2]), strict=True):
        np.testing.assert_array_equal(after, before)


def test_a_product_that_is_turned_is_made_in_the_other_order() -> None:
    def function(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ()))).T

    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    plain, new, names = plain_and_new(function, x, x[..., :2])
    assert names == ["dot_general"]
    np.testing.assert_allclose(new(x, x[..., :2])[0], plain(x, x[..., :2])[0], rtol=1e-5)


def test_equations_inside_loops_branches_and_calls_are_rewritten() -> None:
    pool = pooled((1, 2, 1))

    def function(x: Any, slopes: Any) -> Any:
        once = jax.jit(pool)(x, slopes)[1]
        _, many = lax.scan(
            lambda carry, each: (carry, pool(each, slopes)[1]), 0, jnp.stack([x, once])
        )
        either = lax.cond(x[0, 0, 0] > 0, lambda: pool(x, slopes)[1], lambda: once)
        looped = lax.fori_loop(0, 2, lambda i, x: pool(x, slopes)[1] + x, x)
        return once, many, either, jax.checkpoint(pool)(looped, slopes)[1]

    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    slopes = np.ones((2, 2, 3), np.float32)
    plain, new, names = plain_and_new(function, x, slopes)
    assert "select_and_scatter_add" not in names
    for before, after in zip(plain(x, slopes), new(x, slopes), strict=True):
        np.testing.assert_array_equal(after, before)


def test_what_needs_no_rewriting_stays_the_same_object() -> None:
    closed = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) @ x))(np.ones((3, 3), np.float32))
    assert rewritten(closed).jaxpr is closed.jaxpr


def network() -> keras.Model:
    layers = keras.layers
    inputs = layers.Input((12, 12, 3))
    x = layers.MaxPooling2D(2)(layers.Conv2D(4, 3, padding="same", activation="relu")(inputs))
    x = layers.Reshape((36, 4))(layers.BatchNormalization()(x))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x))
    x = layers.MaxPooling1D(3)(layers.Dense(5, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_a_network_trains_as_without_rewriting(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(32, 12, 12, 3))).astype(np.float32)  # with ties
    y = rng.normal(size=(32, 2)).astype(np.float32)

    def trained(plain: bool) -> list[np.ndarray]:
        seen = []

        def rewriting(closed: Any) -> Any:
            seen.append(closed if plain else rewritten(closed))
            return seen[-1]

        monkeypatch.setattr(tricks, "rewritten", rewriting)
        keras.utils.set_random_seed(0)
        trainer = ts.Trainer(network(), optimizer=keras.optimizers.SGD(0.05), loss="mse")
        trainer.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, progress=False, steps_per_call=steps
        )
        has_it = {"select_and_scatter_add" in operations(each.jaxpr) for each in seen}
        assert has_it == {plain}
        return trainer.model.get_weights()

    for before, after in zip(trained(True), trained(False), strict=True):
        # Eight steps, each of which rounds in another way.
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-4)


def test_a_program_for_several_devices_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tricks, "rewritten", None)  # a call of it would fail
    w = keras.Variable(np.ones((1, 3), np.float32))

    @ts.function(strategy=ts.Mirrored())
    def step(x):
        return keras.ops.sum(w * x)

    assert float(step(np.ones((4, 3), np.float32))) == 12.0
