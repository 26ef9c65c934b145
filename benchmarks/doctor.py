"""What doctor costs a compiled function that is not traced again: its time watched / unwatched.

`python -m benchmarks.doctor [--engine jax|tensorflow|torch] [--quick]`

One function of the engine, made and traced under doctor, so that what it takes from around it is
known. Then blocks of calls in turn, with doctor's hooks in place and without. And what doctor adds
to the start of a process, and to a trace.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import truediv

from benchmarks import table, timing
from benchmarks.engines import ENGINES, main
from benchmarks.settings import read_loss

RATE, SCALE, MARGIN = 0.01, 2.0, 0.5


def run_here(engine: str, quick: bool) -> None:
    """Measure one engine in this process and print its table."""
    plan = timing.QUICK if quick else timing.FULL
    make = {"jax": of_jax, "tensorflow": of_tensorflow, "torch": of_torch}[engine]
    under, plain = watched(make, plan)
    lines = [
        ["a call, watched / not, least of each", f"{min(under) / min(plain):.3f}"],
        ["a call, watched / not, medians", f"{statistics.median(map(truediv, under, plain)):.3f}"],
        ["a call, not watched, in microseconds", f"{min(plain) * 1e6:.0f}"],
        ["a trace, watched / not", f"{tracing(make, 3 if quick else 9):.2f}"],
        ["starting Python with doctor, seconds more", f"{starting(3 if quick else 7):.2f}"],
    ]
    title = f"{ENGINES[engine]}: under doctor, on this machine"
    table.console().print(table.Table(["what", "cost"], lines).rich(title))


def watched(make: Callable[[], timing.Call], plan: timing.Plan) -> tuple[list[float], list[float]]:
    """Seconds per call of each round: of a block of calls under doctor, and of one without."""
    import trainstep as ts

    with ts.doctor():
        call = make()
        length = timing.block_length(call, read_loss, plan)
    under, plain = [], []
    block = partial(settled, call, length)
    for turn in range(2 * plan.rounds):
        if turn % 2:
            under.append(under_doctor(block))
        plain.append(block())
        if not turn % 2:
            under.append(under_doctor(block))
    return under, plain


def settled(call: timing.Call, length: int) -> float:
    """Seconds per call, after as many that let the processor's caches settle."""
    timing.time_each(call, read_loss, length)
    return timing.time_each(call, read_loss, length)


def under_doctor(block: Callable[[], float]) -> float:
    """What a block takes with doctor's hooks in place."""
    import trainstep as ts

    with ts.doctor():
        return block()


def tracing(make: Callable[[], timing.Call], times: int) -> float:
    """How much longer the first call of a function takes under doctor; the median of several."""

    def first() -> float:
        call = make()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    first()
    return statistics.median(under_doctor(first) / first() for _ in range(times))


def starting(times: int) -> float:
    """Seconds that importing and installing doctor adds to a process; the median of several."""
    plain, doctor = "pass", "import trainstep as ts; ts.doctor().start().stop()"
    return statistics.median(run_python(doctor) - run_python(plain) for _ in range(times))


def run_python(code: str) -> float:
    """How long a process takes that runs this code."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


# The functions: one small step each, which takes three numbers from around it.


def of_jax() -> timing.Call:
    """A `jax.jit` that takes a gradient and updates."""
    import jax
    import jax.numpy as jnp

    weights, x = jnp.ones((20, 10)), jnp.ones((32, 20))

    @jax.jit
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.mean((x @ w * SCALE - MARGIN) ** 2))(weights)
        return jnp.sum(weights - RATE * gradient)

    return partial(step, weights, x)


def of_tensorflow() -> timing.Call:
    """A `tf.function` that does the same."""
    import tensorflow as tf

    weights, x = tf.Variable(tf.ones((20, 10))), tf.ones((32, 20))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights * SCALE - MARGIN) ** 2)
        weights.assign_sub(RATE * tape.gradient(loss, weights))
        return loss

    return partial(step, x)


def of_torch() -> timing.Call:
    """A `torch.compile` that computes the loss; the gradient is taken outside, as is usual."""
    import torch

    torch._dynamo.reset()  # which would know the next one by its code
    weights, x = torch.ones((20, 10), requires_grad=True), torch.ones((32, 20))

    @torch.compile(backend="aot_eager")
    def loss_of(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ weights * SCALE - MARGIN) ** 2).mean()

    def step() -> torch.Tensor:
        loss = loss_of(weights, x)
        loss.backward()
        return loss.detach()

    return step


if __name__ == "__main__":
    main("doctor", __doc__, run_here)
