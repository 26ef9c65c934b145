"""The cost of doctor for a compiled function that is not traced again.

`python -m benchmarks.doctor [--engine jax|tensorflow|torch] [--quick]`

One function of the engine is made and traced under doctor, so that doctor knows its captured
values. Then the cost of doctor per call is measured in three ways:

frames           the number of Python functions of doctor's that run; if none, there is no cost
the hook alone   the Python part of a call with and without the hook; the engine is replaced by
                 nothing, so that a microsecond is a large part of the time
watched / not    whole calls, in alternating blocks. This cannot tell 2 % from the noise of a busy
                 machine: JAX, to whose calls doctor adds nothing, shows the size of the noise.

It also measures the cost of doctor for the start of a process and for a trace.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks import table, timing
from benchmarks.engines import ENGINES, main
from benchmarks.settings import read_loss

RATE, SCALE, MARGIN = 0.01, 2.0, 0.5
CALLS = 256  # calls in which frames are counted; on torch, doctor inspects one of them
BLOCK = 50  # calls timed together: few, so that many blocks are undisturbed
SETTLED = 3000  # calls after which doctor stores no more of their times


def run_here(engine: str, quick: bool) -> None:
    """Measures one engine in this process and prints its table."""
    plan = timing.QUICK if quick else timing.FULL
    make = {"jax": of_jax, "tensorflow": of_tensorflow, "torch": of_torch}[engine]
    under, plain = watched(make, plan)
    lines = [
        ["a call, not watched, in microseconds", f"{min(plain) * 1e6:.0f}"],
        *added(engine, min(plain), 200 if quick else 2000),
        ["a call, watched / not, least of each", f"{min(under) / min(plain):.3f}"],
        ["a call, watched / not, medians", f"{statistics.median(map(truediv, under, plain)):.3f}"],
        ["a trace, watched / not", f"{tracing(make, 3 if quick else 9):.2f}"],
        ["starting Python with doctor, seconds more", f"{starting(3 if quick else 7):.2f}"],
    ]
    title = f"{ENGINES[engine]}: under doctor, on this machine"
    table.console().print(table.Table(["what", "cost"], lines).rich(title))


# The cost of doctor alone.


def added(engine: str, least: float, rounds: int) -> list[list[str]]:
    """Returns the lines on the hooks of a call; `least` is its shortest time without doctor."""
    import trainstep as ts

    makers = {
        "jax": [("call", of_jax)],
        "tensorflow": [
            ("call", of_tensorflow),
            ("call with XLA", partial(of_tensorflow, xla=True)),
        ],
        "torch": [("call", loss_of_torch), ("gradient", gradient_of_torch)],
    }
    lines = []
    for what, make in makers[engine]:
        with ts.doctor():
            call = make()
            number = frames(call)
            lines.append([f"frames of doctor's per {what}", f"{number / CALLS:.3g}"])
            if number:
                owner, name, out = path_of(engine)
                with mock.patch.object(*out):
                    cost = hook(owner, name, call, rounds)
                lines += costs(what, cost, least)
    return lines + costs("train_on_batch", *keras_hook(rounds), of="its time")


def costs(what: str, cost: float, least: float, of: str = "a call") -> list[list[str]]:
    """Returns the lines on a hook; on torch, a call includes the gradient."""
    return [
        [f"the hook alone, per {what}, in microseconds", f"{cost * 1e6:.2f}"],
        [f"the hook alone, per {what}, in % of {of}", f"{100 * cost / least:.2f}"],
    ]


def frames(call: timing.Call) -> int:
    """Returns the number of trainstep's functions that some calls run, after a warm-up."""
    import trainstep as ts

    ours, found = str(Path(ts.__file__).parent), []

    def run(times: int) -> None:  # from one line: doctor counts torch's gradients by line
        for _ in range(times):
            call()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            found.append(frame.f_code)

    run(SETTLED)
    sys.setprofile(profile)
    try:
        run(CALLS)
    finally:
        sys.setprofile(None)
    return len(found)


def hook(owner: Any, name: str, call: timing.Call, rounds: int) -> float:
    """Returns the seconds of a hook per call: a median, as single differences vary by half."""
    parts = 9
    return statistics.median(difference(owner, name, call, rounds // parts) for _ in range(parts))


def difference(owner: Any, name: str, call: timing.Call, rounds: int) -> float:
    """Returns the shortest block with a hook minus the shortest block without."""
    hooked = vars(owner)[name]
    times: dict[Any, list[float]] = {hooked: [], hooked.__wrapped__: []}
    for _ in range(rounds):
        for each, seconds in times.items():
            setattr(owner, name, each)
            timing.time_end(call, id, BLOCK)  # warms up Python's own caches
            seconds.append(timing.time_end(call, id, BLOCK))
    setattr(owner, name, hooked)
    return min(times[hooked]) - min(times[hooked.__wrapped__])


def path_of(engine: str) -> tuple[Any, str, tuple[Any, str, Any]]:
    """Returns the place of doctor's hook, and the engine's place with a replacement for it."""
    if engine == "tensorflow":
        from tensorflow.python.eager.polymorphic_function import polymorphic_function as module

        return module.Function, "_call", (module.tracing_compilation, "call_function", nothing)
    from torch.autograd import graph

    idle = SimpleNamespace(run_backward=nothing)
    return graph.log, "getEffectiveLevel", (graph.Variable, "_execution_engine", idle)


def keras_hook(rounds: int) -> tuple[float, float]:
    """Returns the seconds of the hook of a Keras method, and the shortest whole call."""
    import keras
    import numpy as np

    import trainstep as ts

    name = "train_on_batch"
    owner = next(each for each in keras.Model.__mro__ if name in vars(each))
    run = vars(owner)[name]

    def train_on_batch(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    with mock.patch.object(owner, name, train_on_batch), ts.doctor():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10)])
        model.compile("sgd", "mse")
        x, y = np.ones((32, 20), "float32"), np.ones((32, 10), "float32")

        def call() -> object:  # looks the method up each time
            return model.train_on_batch(x, y)

        least = min(timing.time_end(call, id, 10) for _ in range(rounds // 20))
        run = nothing
        timing.time_end(call, id, SETTLED)
        return hook(owner, name, call, rounds), least


def nothing(*args: object, **kwargs: object) -> None:
    """Does nothing."""


# Whole calls.


def watched(make: Callable[[], timing.Call], plan: timing.Plan) -> tuple[list[float], list[float]]:
    """Returns the seconds per call of each round: of a block under doctor, and of one without."""
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
    """Returns the seconds per call, after as many calls that warm up the processor's caches."""
    timing.time_each(call, read_loss, length)
    return timing.time_each(call, read_loss, length)


def under_doctor(block: Callable[[], float]) -> float:
    """Returns the seconds of a block with doctor's hooks installed."""
    import trainstep as ts

    with ts.doctor():
        return block()


def tracing(make: Callable[[], timing.Call], times: int) -> float:
    """Returns the time of a first call under doctor, divided by one without; a median."""

    def first() -> float:
        call = make()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    first()
    return statistics.median(under_doctor(first) / first() for _ in range(times))


def starting(times: int) -> float:
    """Returns the seconds that importing and installing doctor adds to a process; a median."""
    plain, doctor = "pass", "import trainstep as ts; ts.doctor().start().stop()"
    return statistics.median(run_python(doctor) - run_python(plain) for _ in range(times))


def run_python(code: str) -> float:
    """Returns the seconds of a process that runs this code."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


# The functions: one small step each, with three captured values.


def of_jax() -> timing.Call:
    """Returns a `jax.jit` that computes a gradient and updates."""
    import jax
    import jax.numpy as jnp

    weights, x = jnp.ones((20, 10)), jnp.ones((32, 20))

    @jax.jit
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.mean((x @ w * SCALE - MARGIN) ** 2))(weights)
        return jnp.sum(weights - RATE * gradient)

    return partial(step, weights, x)


def of_tensorflow(*, xla: bool = False) -> timing.Call:
    """Returns a `tf.function` that does the same."""
    import tensorflow as tf

    weights, x = tf.Variable(tf.ones((20, 10))), tf.ones((32, 20))

    @tf.function(jit_compile=xla)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights * SCALE - MARGIN) ** 2)
        weights.assign_sub(RATE * tape.gradient(loss, weights))
        return loss

    return partial(step, x)


def of_torch() -> timing.Call:
    """Returns a compiled loss whose gradient is computed outside of it, as is usual."""
    loss_of = loss_of_torch()

    def step() -> object:
        loss = loss_of()
        loss.backward()
        return loss.detach()

    return step


def gradient_of_torch() -> timing.Call:
    """Returns a function that computes the gradient alone, any number of times."""
    return partial(loss_of_torch()().backward, retain_graph=True)


def loss_of_torch() -> Callable[[], Any]:
    """Returns a `torch.compile` that computes the loss."""
    import torch

    torch._dynamo.reset()  # otherwise dynamo would reuse the next one by its code
    weights, x = torch.ones((20, 10), requires_grad=True), torch.ones((32, 20))

    @torch.compile(backend="aot_eager")
    def loss_of(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ weights * SCALE - MARGIN) ** 2).mean()

    return partial(loss_of, weights, x)


if __name__ == "__main__":
    main("doctor", __doc__, run_here)
