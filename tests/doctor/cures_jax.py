"""Cures on JAX: programs, and values, counted with and without them."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .cure import Cures, Runs
from .running import python, written

CURES = Cures()


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, "float32")


@CURES.add("shape", before=3, after=1)
def pad_to_one_size_with_a_mask(cured: bool) -> int:
    runs = Runs()

    @jax.jit
    def mean(x: Any, mask: Any) -> Any:
        runs()
        return (x.sum(1) * mask).sum() / mask.sum()

    for size in (8, 5, 3):
        x, mask = 2 * ones(size, 4), ones(size)
        if cured:
            x, mask = (np.pad(a, [(0, 8 - size)] + [(0, 0)] * (a.ndim - 1)) for a in (x, mask))
        assert float(mean(x, mask)) == 8.0
    return runs.number


@CURES.add("dtype", before=2, after=1)
def cast_before_the_call(cured: bool) -> int:
    runs = Runs()

    @jax.jit
    def total(x: Any) -> Any:
        runs()
        return x.sum()

    for x in (ones(4), np.ones(4, "int32")):
        assert float(total(x.astype("float32") if cured else x)) == 4.0
    return runs.number


@CURES.add("weak", before=2, after=1)
def make_every_number_an_array_of_one_dtype(cured: bool) -> int:
    runs = Runs()

    @jax.jit
    def scaled(x: Any, rate: Any) -> Any:
        runs()
        return x * rate

    for rate in (0.5, jnp.float32(0.25), 0.125):
        scaled(ones(3), jnp.asarray(rate, "float32") if cured else rate)
    return runs.number


@CURES.add("number", before=2, after=1)
def keep_to_one_type_of_number(cured: bool) -> int:
    runs = Runs()

    @jax.jit
    def scaled(x: Any, rate: Any) -> Any:
        runs()
        return x * rate

    for rate in (1, 0.5, 2, 0.25):
        scaled(ones(3), float(rate) if cured else rate)
    return runs.number


@CURES.add("static", before=4, after=1)
def make_a_value_an_ordinary_argument(cured: bool) -> int:
    runs = Runs()

    def scaled(x: Any, rate: Any) -> Any:
        runs()
        return x * rate

    compiled = jax.jit(scaled, static_argnums=() if cured else (1,))
    for rate in (0.1, 0.2, 0.3, 0.4):
        np.testing.assert_allclose(compiled(ones(3), rate), rate * ones(3), rtol=1e-6)
    return runs.number


@CURES.add("structure", before=2, after=1)
def pass_the_same_entries_every_time(cured: bool) -> int:
    runs = Runs()

    @jax.jit
    def forward(params: Any, x: Any) -> Any:
        runs()
        return x @ params["kernel"] + params.get("bias", 0.0)

    kernel, bias = ones(3, 1), np.zeros(1, "float32")
    with_bias = {"kernel": kernel, "bias": bias}
    for params in (with_bias if cured else {"kernel": kernel}, with_bias):
        forward(params, ones(2, 3))
    return runs.number


@CURES.add("function", before=4, after=1)
def jit_once_before_the_loop(cured: bool) -> int:
    runs = Runs()
    once = jax.jit(lambda x: (runs(), x * 2)[1])
    for _ in range(4):
        (once if cured else jax.jit(lambda x: (runs(), x * 2)[1]))(ones(3))
    return runs.number


@CURES.add("function", before=3, after=1)
def pass_what_a_partial_binds_as_an_argument(cured: bool) -> int:
    runs = Runs()

    def scaled(factor: Any, x: Any) -> Any:
        runs()
        return factor * x

    once = jax.jit(scaled)
    for factor in (1.0, 2.0, 3.0):
        compiled = functools.partial(once, factor)
        if not cured:
            compiled = jax.jit(functools.partial(scaled, factor))
        assert float(compiled(ones(3))[0]) == factor
    return runs.number


@CURES.add("instance", before=4, after=1)
def pass_what_the_object_holds_as_an_argument(cured: bool) -> int:
    runs = Runs()

    class Scaler:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def apply(self, x: Any) -> Any:
            runs()
            return x * self.factor

    @jax.jit
    def apply(factor: Any, x: Any) -> Any:
        runs()
        return x * factor

    for turn in range(4):
        scaler = Scaler(float(turn))
        value = apply(scaler.factor, ones(3)) if cured else jax.jit(scaler.apply)(ones(3))
        assert float(value[0]) == turn
    return runs.number


@CURES.add("function", before=4, after=1)
def keep_the_compiled_method(cured: bool) -> int:
    runs = Runs()

    class Scaler:
        def apply(self, x: Any) -> Any:
            runs()
            return x * 2

    scaler = Scaler()
    once = jax.jit(scaler.apply)
    for _ in range(4):
        (once if cured else jax.jit(scaler.apply))(ones(3))
    return runs.number


SHARDING = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np

double = jax.jit(lambda x: x * 2)
for device in jax.devices():
    double(jax.device_put(np.ones(4), jax.devices()[0] if CURED else device))
print(double._cache_size())
"""


@CURES.add("sharding", before=2, after=1, slow=True)
def keep_arrays_on_one_device(cured: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        done = python(written(Path(folder), f"CURED = {cured}\n{SHARDING}"))
    return int(done.stdout)


@CURES.add("context", before=2, after=1)
def set_the_precision_once(cured: bool) -> int:
    runs = Runs()

    @jax.jit
    def product(a: Any) -> Any:
        runs()
        return a @ a

    for precision in ("float32" if cured else None, "float32"):
        with jax.default_matmul_precision(precision):
            product(ones(3, 3))
    return runs.number


@CURES.add("small", before=5, after=0)
def compute_small_things_with_numpy(cured: bool) -> int:
    """Programs that XLA is given by operations of sizes that no other test uses."""
    compiled = []

    def listen(event: str, seconds: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    arrays = [np.ones(size, "float32") for size in range(1031, 1036)]
    jax.clear_caches()  # another test may have compiled these sizes
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for x in arrays:
            (np if cured else jnp).tanh(x)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(compiled)


@CURES.add("eager", before=5, after=1)
def jit_the_gradient(cured: bool) -> int:
    runs = Runs()

    def loss_of(w: Any) -> Any:
        runs()
        return (w**2).sum()

    gradient_of = jax.jit(jax.grad(loss_of)) if cured else jax.grad(loss_of)
    weights = jnp.ones(3)
    for _ in range(5):
        weights = weights - 0.25 * gradient_of(weights)
    np.testing.assert_allclose(weights, 0.5**5 * ones(3), rtol=1e-6)
    return runs.number


@CURES.add("side-effects", before=3, after=0)
def pass_a_key_for_random_numbers(cured: bool) -> int:
    """How many of four draws repeat another."""

    @jax.jit
    def drawn(key: Any) -> Any:
        return jax.random.uniform(key) if cured else jnp.asarray(random.random())

    keys = jax.random.split(jax.random.key(0), 4)
    return 4 - len({float(drawn(key)) for key in keys})


@CURES.add("side-effects", before=3, after=0)
def carry_a_counter_through_the_function(cured: bool) -> int:
    """How many of four steps a counter misses."""
    seen = Runs()

    @jax.jit
    def step(count: Any) -> Any:
        seen()
        return count + 1

    count = jnp.zeros((), "int32")
    for _ in range(4):
        count = step(count)
    return 4 - (int(count) if cured else seen.number)


@CURES.add("leaks", before=4, after=0)
def return_what_is_to_be_kept(cured: bool) -> int:
    """How many of four losses cannot be read afterwards."""
    inside: list[Any] = []

    @jax.jit
    def step(x: Any) -> Any:
        loss = x.mean()
        inside.append(loss)
        return loss

    outside = [step(ones(3)) for _ in range(4)]
    kept = outside if cured else inside
    return 4 - sum(not isinstance(v, jax.core.Tracer) for v in kept)


@CURES.add("stale", before=2, after=0)
def pass_what_changes_as_an_argument(cured: bool) -> int:
    """How many of three results have an old value in them."""
    scale = 1.0

    @jax.jit
    def scaled(x: Any, by: Any) -> Any:
        return x * (by if cured else scale)

    wrong = 0
    for value in (1.0, 2.0, 3.0):
        scale = value
        wrong += float(scaled(ones(1), scale)[0]) != value
    return wrong
