"""What doctor costs a compiled function that is not traced again.

`python -m benchmarks.doctor [--engine jax|tensorflow|torch] [--quick]`

One function of the engine, made and traced under doctor, so that what it takes from around it is
known. Then three ways to see what doctor adds to a call:

frames           the Python functions of doctor's that run, counted: where there are none, nothing
the hook alone   Python's part of a call with the hook and without; the engine is taken out, so that
                 a microsecond is a large part of what is left
watched / not    whole calls, in blocks in turn. That does not tell 2 % from the noise of a busy
                 machine: JAX, to which nothing is added, shows how far it is off.

And what doctor adds to the start of a process, and to a trace.
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
CALLS = 256  # in which frames are counted, one of them looked at closely on torch
BLOCK = 50  # calls that are timed at once: so short that many blocks are not disturbed
SETTLED = 3000  # calls after which doctor keeps no more of their moments


def run_here(engine: str, quick: bool) -> None:
    """Measure one engine in this process and print its table."""
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


# What doctor adds, by itself.


def added(engine: str, least: float, rounds: int) -> list[list[str]]:
    """The lines on what is on the path of a call, which takes so long at least when unwatched."""
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
    """The lines on a hook; on torch, a call is that of the function and its gradient."""
    return [
        [f"the hook alone, per {what}, in microseconds", f"{cost * 1e6:.2f}"],
        [f"the hook alone, per {what}, in % of {of}", f"{100 * cost / least:.2f}"],
    ]


def frames(call: timing.Call) -> int:
    """How many functions of trainstep's some calls run, once all has settled."""
    import trainstep as ts

    ours, found = str(Path(ts.__file__).parent), []

    def run(times: int) -> None:  # all from one line, by which torch's gradients are known
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
    """Seconds that a hook takes of a call: the median, as a single difference is off by half."""
    parts = 9
    return statistics.median(difference(owner, name, call, rounds // parts) for _ in range(parts))


def difference(owner: Any, name: str, call: timing.Call, rounds: int) -> float:
    """The least of many blocks with a hook, less the least of those without."""
    hooked = vars(owner)[name]
    times: dict[Any, list[float]] = {hooked: [], hooked.__wrapped__: []}
    for _ in range(rounds):
        for each, seconds in times.items():
            setattr(owner, name, each)
            timing.time_end(call, id, BLOCK)  # Python's own caches settle
            seconds.append(timing.time_end(call, id, BLOCK))
    setattr(owner, name, hooked)
    return min(times[hooked]) - min(times[hooked.__wrapped__])


def path_of(engine: str) -> tuple[Any, str, tuple[Any, str, Any]]:
    """Where doctor's hook is; and where the engine is, with something that does nothing instead."""
    if engine == "tensorflow":
        from tensorflow.python.eager.polymorphic_function import polymorphic_function as module

        return module.Function, "_call", (module.tracing_compilation, "call_function", nothing)
    from torch.autograd import graph

    idle = SimpleNamespace(run_backward=nothing)
    return graph.log, "getEffectiveLevel", (graph.Variable, "_execution_engine", idle)


def keras_hook(rounds: int) -> tuple[float, float]:
    """Seconds that the hook of a Keras method takes, and the least that it takes as a whole."""
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

        def call() -> object:  # asks for the method each time
            return model.train_on_batch(x, y)

        least = min(timing.time_end(call, id, 10) for _ in range(rounds // 20))
        run = nothing
        timing.time_end(call, id, SETTLED)
        return hook(owner, name, call, rounds), least


def nothing(*args: object, **kwargs: object) -> None:
    """Does nothing."""


# Whole calls.


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


def of_tensorflow(*, xla: bool = False) -> timing.Call:
    """A `tf.function` that does the same."""
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
    """A loss of a compiled function, and its gradient, taken outside of it, as is usual."""
    loss_of = loss_of_torch()

    def step() -> object:
        loss = loss_of()
        loss.backward()
        return loss.detach()

    return step


def gradient_of_torch() -> timing.Call:
    """The gradient alone, as often as one likes."""
    return partial(loss_of_torch()().backward, retain_graph=True)


def loss_of_torch() -> Callable[[], Any]:
    """A `torch.compile` that computes the loss."""
    import torch

    torch._dynamo.reset()  # which would know the next one by its code
    weights, x = torch.ones((20, 10), requires_grad=True), torch.ones((32, 20))

    @torch.compile(backend="aot_eager")
    def loss_of(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ weights * SCALE - MARGIN) ** 2).mean()

    return partial(loss_of, weights, x)


if __name__ == "__main__":
    main("doctor", __doc__, run_here)
