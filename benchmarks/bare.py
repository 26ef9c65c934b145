"""The bare call of the engine: a compiled function, and the few lines that store its state.

This is the least that any library can add to a compiled step.
"""

from collections.abc import Callable
from typing import Any

import keras

from benchmarks import steps
from benchmarks.models import Case

Tensors = list[Any]
# (state, ...) -> (result, new state), and the same with its state stored: (...) -> result.
Pure = Callable[..., tuple[Any, Tensors]]
Kept = Callable[..., Any]


def keep_jax(pure: Pure, state: Tensors, *example: Any) -> Kept:
    """Returns a jitted function of a donated list of arrays."""
    import jax

    compiled = jax.jit(pure, donate_argnums=0)

    def call(*args: Any) -> Any:
        nonlocal state
        result, state = compiled(state, *args)
        return result

    return call


def keep_torch(pure: Pure, state: Tensors, *example: Any) -> Kept:
    """Returns a function that replays the graph of a function of a list of tensors."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(pure)(state, *example)

    def call(*args: Any) -> Any:
        nonlocal state
        with torch.no_grad():
            result, state = graph(state, *args)
        return result

    return call


KEEP = {"jax": keep_jax, "torch": keep_torch}


def keep(pure: Pure, state: Tensors, *example: Any) -> Kept:
    """Compiles a function with the engine that Keras runs on, if that has pure functions."""
    return KEEP[keras.backend.backend()](pure, state, *example)


def train_on_batch(case: Case, *example: Any) -> Kept:
    """Returns the step of a Trainer, run by the engine alone; it returns the logs as tensors."""
    trainer = steps.trainer(case)
    for _ in range(2):
        trainer.train_on_batch(*example)  # builds the optimizer and the metrics
    if keras.backend.backend() == "tensorflow":
        # In another `tf.function`, the step would become a different, slower graph.
        ((program,),) = trainer._functions.step("train")._programs._by_key.values()
        concrete = program.executable.graph
        return lambda *args: program.build.of(concrete(*args))
    parts = (trainer.model, trainer.optimizer, *trainer.metrics)
    variables = list({id(v): v for part in parts for v in part.variables}.values())

    def pure(state: Tensors, *args: Any) -> tuple[dict[str, Any], Tensors]:
        pairs = list(zip(variables, state, strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:
            logs = trainer.train_on_batch(*args)  # in a scope, it becomes part of the trace
            return dict(logs), [scope.get_current_value(v) for v in variables]

    state = [keras.ops.copy(v.value) for v in variables]
    return keep(pure, state, *example)
