"""Rules of the masked evaluation, one operation at a time, against the operation itself.

Every function is traced with symbolic sizes and evaluated on arrays padded with NaN (or with the
largest integer); what counts of the result has to be what the function gives unpadded.
With `gradient`, that of a weighted sum of the result, by the first argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("JAX evaluates with masks", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax import export, lax

from trainstep._engines.contract import Refused
from trainstep._engines.jax.masking import evaluate
from trainstep._engines.jax.masking.bucket import Bucket
from trainstep._engines.jax.symbolic_sizes import Assumptions, assuming, true_shape

PADDED = {"b": 8, "t": 9}
SIZES = ({"b": 5, "t": 6}, {"b": 3, "t": 9})

# Arguments: x f32[b,t,3], y f32[b,t,3], i i32[b] (places in the batch), v f32[b].
Function = Callable[[Any, Any, Any, Any], Any]
KERNEL = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3, 2)), jnp.float32)


def conv(x: Any, **settings: Any) -> Any:
    return lax.conv_general_dilated(
        x, KERNEL, dimension_numbers=("NHC", "HIO", "NHC"), **{"window_strides": (1,), **settings}
    )


def window(x: Any, start: Any, operation: Any, size: int, stride: int, padding: str) -> Any:
    return lax.reduce_window(x, start, operation, (1, size, 1), (1, stride, 1), padding)


def turn(carry: Any, x: Any) -> Any:
    return 0.5 * carry + x, jnp.tanh(carry)


BY_VALUE: dict[str, Function] = {
    "sum of the batch": lambda x, y, i, v: x.sum(0),
    "sum of all": lambda x, y, i, v: x.sum(),
    "mean over time": lambda x, y, i, v: x.mean(1),
    "variance": lambda x, y, i, v: x.var((0, 1)),
    "product": lambda x, y, i, v: jnp.prod(x, 0),
    "maximum": lambda x, y, i, v: x.max(0),
    "minimum over time": lambda x, y, i, v: x.min(1),
    "softmax over time": lambda x, y, i, v: jax.nn.softmax(x, 1),
    "softmax over the batch": lambda x, y, i, v: jax.nn.softmax(x, 0),
    "logsumexp": lambda x, y, i, v: jax.nn.logsumexp(x, (0, 1)),
    "norm": lambda x, y, i, v: jnp.sqrt((x * x).sum((0, 2))),
    "product of matrices over time": lambda x, y, i, v: jnp.einsum("btc,btd->bcd", x, y),
    "product of matrices over the batch": lambda x, y, i, v: jnp.einsum("btc,btd->tcd", x, y),
    "batch by batch": lambda x, y, i, v: jnp.einsum("btc,atc->ba", x, y),
    "attention": lambda x, y, i, v: jax.nn.softmax(x @ y.swapaxes(1, 2), -1) @ y,
    "running sum": lambda x, y, i, v: jnp.cumsum(x, 1),
    "running sum from behind": lambda x, y, i, v: lax.cumsum(x, 1, reverse=True),
    "running sum of the batch": lambda x, y, i, v: lax.cumsum(x, 0, reverse=True),
    "running product": lambda x, y, i, v: jnp.cumprod(x, 1),
    "reversed": lambda x, y, i, v: jnp.flip(x, 1),
    "reversed both ways": lambda x, y, i, v: jnp.flip(x, (0, 1)) * y,
    "shifted": lambda x, y, i, v: x[:, 1:] - x[:, :-1],
    "from the third": lambda x, y, i, v: x[:, 2:],
    "the last": lambda x, y, i, v: x[:, -1],
    "the last two": lambda x, y, i, v: x[:, -2:],
    "every second": lambda x, y, i, v: x[:, ::2],
    "rolled": lambda x, y, i, v: jnp.roll(x, 2, 1),
    "joined over time": lambda x, y, i, v: jnp.concatenate([x, y, x], 1),
    "joined with one more": lambda x, y, i, v: jnp.concatenate([x, jnp.ones_like(x[:, :1]), y], 1),
    "joined batches": lambda x, y, i, v: jnp.concatenate([x, y], 0),
    "padded in front": lambda x, y, i, v: jnp.pad(x, ((0, 0), (2, 0), (0, 0))),
    "padded behind": lambda x, y, i, v: jnp.pad(x, ((0, 0), (0, 3), (0, 0)), constant_values=7.0),
    "padded between": lambda x, y, i, v: lax.pad(x, 1.0, ((0, 0, 0), (1, 1, 1), (0, 0, 0))),
    "cropped": lambda x, y, i, v: lax.pad(x, 0.0, ((0, 0, 0), (-1, -1, 0), (0, 0, 0))),
    "flattened": lambda x, y, i, v: x.reshape(-1, 3) * 2,
    "flattened and back": lambda x, y, i, v: jnp.tanh(x.reshape(-1, 3)).reshape(x.shape),
    "flat": lambda x, y, i, v: x.reshape(-1),
    "wide": lambda x, y, i, v: x.reshape(x.shape[0], -1),
    "wide and back": lambda x, y, i, v: x.reshape(x.shape[0], -1).reshape(x.shape[0], -1, 3),
    "split features": lambda x, y, i, v: x.reshape(*x.shape[:2], 3, 1),
    "transposed": lambda x, y, i, v: x.transpose(1, 0, 2).reshape(-1, 3),
    "repeated rows": lambda x, y, i, v: jnp.broadcast_to(x[None], (4, *x.shape)),
    "rows in pairs": lambda x, y, i, v: jnp.repeat(x, 2, axis=2),
    "convolution": lambda x, y, i, v: conv(x, padding="SAME"),
    "convolution, valid": lambda x, y, i, v: conv(x, padding="VALID"),
    "convolution, causal": lambda x, y, i, v: conv(x, padding=((2, 0),)),
    "convolution, dilated": lambda x, y, i, v: conv(x, padding=((2, 2),), rhs_dilation=(2,)),
    "convolution, spread": lambda x, y, i, v: conv(x, padding=((2, 2),), lhs_dilation=(2,)),
    "maximum of windows": lambda x, y, i, v: window(x, -jnp.inf, lax.max, 2, 2, "VALID"),
    "maximum of windows, same": lambda x, y, i, v: window(x, -jnp.inf, lax.max, 3, 1, "SAME"),
    "sum of windows": lambda x, y, i, v: window(x, 0.0, lax.add, 2, 2, "VALID"),
    "sum of windows, same": lambda x, y, i, v: window(x, 0.0, lax.add, 3, 1, "SAME"),
    "sorted": lambda x, y, i, v: jnp.sort(x, 1),
    "sorted batch": lambda x, y, i, v: x[jnp.argsort(v)],
    "the two largest": lambda x, y, i, v: lax.top_k(x.swapaxes(1, 2), 2)[0],
    "rows by place": lambda x, y, i, v: x[i],
    "rows by place, from behind": lambda x, y, i, v: x[-1 - i],
    "rows by place, clipped": lambda x, y, i, v: jnp.take(x, i + 100, axis=0, mode="clip"),
    "rows by place, filled": lambda x, y, i, v: jnp.take(
        x, i * 2, axis=0, mode="fill", fill_value=3.0
    ),
    "from a table": lambda x, y, i, v: jnp.arange(30.0).reshape(10, 3)[i] * x[:, 0],
    "one of time each": lambda x, y, i, v: jnp.take_along_axis(x, (i * 0 + 1)[:, None, None], 1),
    "summed by class": lambda x, y, i, v: jnp.zeros((4, 3)).at[i % 4].add(x[:, 0]),
    "largest by class": lambda x, y, i, v: jnp.full((4, 3), -9.0).at[i % 4].max(x[:, 0]),
    "written rows": lambda x, y, i, v: x.at[i].set(0.0),
    "added rows": lambda x, y, i, v: x.at[i].add(y),
    "written by value": lambda x, y, i, v: (
        jnp.zeros((64, 3)).at[jnp.arange(x.shape[0])].set(x[:, 0])
    ),
    "a slice at a place": lambda x, y, i, v: lax.dynamic_slice_in_dim(x, i[0], 2, 1),
    "a slice past the end": lambda x, y, i, v: lax.dynamic_slice_in_dim(x, i[0] + 99, 2, 1),
    "a written slice": lambda x, y, i, v: lax.dynamic_update_slice_in_dim(
        x, jnp.ones_like(x[:, :2]), i[0] + 99, 1
    ),
    "scan over time": lambda x, y, i, v: lax.scan(turn, x[:, 0], x.swapaxes(0, 1))[1],
    "carry of a scan": lambda x, y, i, v: lax.scan(turn, x[:, 0], x.swapaxes(0, 1))[0],
    "scan from behind": lambda x, y, i, v: lax.scan(turn, x[:, 0], x.swapaxes(0, 1), reverse=True)[
        0
    ],
    "scan over the batch": lambda x, y, i, v: lax.scan(turn, x[0], x)[0],
    "branch on a sum": lambda x, y, i, v: lax.cond(
        v.sum() > 0, lambda: x * 2, lambda: jnp.flip(x, 1)
    ),
    "by the number of rows": lambda x, y, i, v: x.sum() / x.shape[0] / x.shape[1],
    "positions": lambda x, y, i, v: x * jnp.arange(x.shape[1])[None, :, None],
    "distances": lambda x, y, i, v: jnp.abs(v[:, None] - v[None, :]) @ x[:, 0],
    "any": lambda x, y, i, v: jnp.where(jnp.any(x > 2.9), 2.0, 1.0) * x,
    "all": lambda x, y, i, v: jnp.where(jnp.all(x > -9.0), 2.0, 1.0) * x,
    "decomposed": lambda x, y, i, v: jnp.linalg.cholesky(
        jnp.einsum("btc,btd->bcd", x, x) + 3 * jnp.eye(3)
    ),
}
ONLY_VALUES: dict[str, Function] = {
    "place of the largest": lambda x, y, i, v: jnp.argmax(x, 1),
    "place of the smallest in the batch": lambda x, y, i, v: jnp.argmin(x, 0),
    "order": lambda x, y, i, v: jnp.argsort(x, 0),
    "counts": lambda x, y, i, v: jnp.bincount(i % 4, length=4),
    "one hot": lambda x, y, i, v: jax.nn.one_hot(i, 8),
    "loop until": lambda x, y, i, v: lax.while_loop(
        lambda s: jnp.abs(s).max() > 0.1, lambda s: s * 0.5, x
    ),
    "uniform over the batch": lambda x, y, i, v: jax.random.uniform(
        jax.random.key(1), (x.shape[0], 3)
    ),
    "normal over time": lambda x, y, i, v: jax.random.normal(jax.random.key(1), x.shape),
    "dropout": lambda x, y, i, v: jax.random.bernoulli(jax.random.key(7), 0.4, x.shape),
    "categorical": lambda x, y, i, v: jax.random.categorical(jax.random.key(2), x[:, 0]),
    "gamma": lambda x, y, i, v: jax.random.gamma(jax.random.key(4), jnp.abs(v) + 1),
    "integers": lambda x, y, i, v: jax.random.randint(jax.random.key(5), x.shape[:2], 0, 9),
    "half precision draws": lambda x, y, i, v: jax.random.uniform(
        jax.random.key(6), x.shape[:2], jnp.float16
    ),
    "exclusive or": lambda x, y, i, v: lax.reduce_xor(i, (0,)),
    "all bits": lambda x, y, i, v: lax.reduce_and(i, (0,)),
}
REFUSED: dict[str, Function] = {
    "solved": lambda x, y, i, v: jnp.linalg.solve(
        jnp.einsum("btc,btd->bcd", y, y) + 3 * jnp.eye(3), x[:, 0, :, None]
    ),
    "Fourier transform": lambda x, y, i, v: jnp.abs(jnp.fft.fft(x, axis=1)),
    "determinant of a batch": lambda x, y, i, v: jnp.linalg.cholesky(
        jnp.einsum("btc,atc->ba", x, x)
    ),
    "callback": lambda x, y, i, v: jax.pure_callback(
        lambda a: a, jax.ShapeDtypeStruct(v.shape, v.dtype), v
    ),
}


def arguments(sizes: dict[str, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(sizes.values()))
    b, t = sizes["b"], sizes["t"]
    x, y = (rng.normal(size=(b, t, 3)).astype("float32") for _ in range(2))
    return [x, y, rng.permutation(b).astype("int32"), rng.normal(size=b).astype("float32")]


def padded(x: np.ndarray, axes: tuple[str, ...]) -> np.ndarray:
    beyond = np.iinfo(x.dtype).max if x.dtype.kind == "i" else np.nan
    full = np.full((*(PADDED[name] for name in axes), *x.shape[len(axes) :]), beyond, x.dtype)
    full[tuple(map(slice, x.shape))] = x
    return full


AXES = (("b", "t"), ("b", "t"), ("b",), ("b",))


def check(fn: Function) -> None:
    b, t = export.symbolic_shape("b, t")
    shapes = [((b, t, 3), "float32"), ((b, t, 3), "float32"), ((b,), "int32"), ((b,), "float32")]
    assumptions = Assumptions({"b": 8, "t": 9})
    with assuming(assumptions):
        closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, d) for s, d in shapes))
    (shape,) = [v.aval.shape for v in closed.jaxpr.outvars]

    @jax.jit
    def masked(true: dict[str, Any], inputs: list[Any]) -> Any:
        return evaluate(Bucket(PADDED, true), closed.jaxpr, closed.consts, inputs)[0]

    for sizes in SIZES:
        if assumptions.violated_assumption(sizes):
            continue
        args = arguments(sizes)
        wanted = np.asarray(jax.jit(fn)(*args))
        inputs = [jnp.asarray(padded(x, axes)) for x, axes in zip(args, AXES, strict=True)]
        true = {name: jnp.int32(size) for name, size in sizes.items()}
        cut = np.asarray(masked(true, inputs))[tuple(map(slice, true_shape(shape, sizes)))]
        np.testing.assert_allclose(cut, wanted, rtol=2e-5, atol=2e-6, err_msg=str(sizes))


def gradient(fn: Function) -> Function:
    def taken(x: Any, y: Any, i: Any, v: Any) -> Any:
        def scalar(x: Any) -> Any:
            result = fn(x, y, i, v)
            if not result.ndim:
                return result
            places = lax.broadcasted_iota(jnp.float32, result.shape, result.ndim - 1)
            return jnp.sum(result * jnp.cos(places))

        return jax.grad(scalar)(x)

    return taken


@pytest.mark.parametrize("name", [*BY_VALUE, *ONLY_VALUES])
def test_a_value_is_that_of_the_exact_shape(name: str) -> None:
    check({**BY_VALUE, **ONLY_VALUES}[name])


# JAX itself cannot take these with symbols.
WITHOUT_GRADIENT = ("product", "running product")


@pytest.mark.parametrize("name", [name for name in BY_VALUE if name not in WITHOUT_GRADIENT])
def test_a_gradient_is_that_of_the_exact_shape(name: str) -> None:
    check(gradient(BY_VALUE[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_by_name(name: str) -> None:
    with pytest.raises(Refused, match="has no rule"):
        check(REFUSED[name])
