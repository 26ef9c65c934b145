"""Constant memory: steps add nothing, and models that are dropped give everything back."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts

CALLS = {"jax": 20_000, "tensorflow": 6_000, "torch": 6_000}
MODELS = 36
MB = 2**20

if not sys.platform.startswith("linux"):
    pytest.skip("resident memory is read from /proc", allow_module_level=True)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tracked() -> int:
    gc.collect()
    return len(gc.get_objects())


RECORDS = (
    "trainstep._explain.ledger",
    "trainstep._explain.signature",
    "trainstep._surroundings.captures._Identity",
)  # an entry per trace stays in the ledger: modules, and a class


def programs() -> int:
    """How many of trainstep's own objects are alive, besides the ledger's records."""
    # Twice: a model's death in the first frees its programs, which are cycles of their own.
    gc.collect()
    gc.collect()
    kinds = [type(o) for o in gc.get_objects()]
    names = [(str(getattr(kind, "__module__", "")), kind.__name__) for kind in kinds]
    ours = [(m, f"{m}.{n}") for m, n in names if m.split(".")[0] == "trainstep"]
    return sum(not {*pair} & {*RECORDS} for pair in ours)


X = np.linspace(0.0, 1.0, 32, dtype="float32").reshape(8, 4)


def make_model() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def train(model: Any, x: Any) -> Any:
    loss, grads = ts.value_and_grad(lambda: ops.mean(model(x) ** 2), model.trainable_variables)()
    for v, g in zip(model.trainable_variables, grads, strict=True):
        v.assign_sub(0.01 * g)
    return loss


@pytest.mark.slow
def test_calls_at_one_signature_add_no_objects_and_no_memory(backend: str) -> None:
    model = make_model()
    seed = keras.random.SeedGenerator(1)

    @ts.function
    def step(x: Any, scale: float, mode: str) -> dict[str, Any]:
        return {
            "loss": train(model, keras.random.dropout(x, 0.1, seed=seed)),
            "scale": scale + ops.sum(x),
        }

    def run(n: int) -> None:
        for i in range(n):
            float(step(X + i, float(i), mode="train")["loss"])

    run(CALLS[backend] // 10)
    objects, memory = tracked(), [resident()]

    for _ in range(2):  # the heap of a process that has run other tests may grow once
        run(CALLS[backend])
        memory.append(resident())

    assert tracked() - objects < 100
    assert min(after - before for before, after in pairwise(memory)) < 10 * MB
    assert step.trace_count == 1


@pytest.mark.slow
def test_results_that_are_not_read_add_nothing(backend: str) -> None:
    total = keras.Variable(np.zeros(1000, "float32"))

    @ts.function
    def step(x: Any) -> Any:
        total.assign_add(x)
        return total.value * 2

    batch = np.ones(1000, "float32")
    for _ in range(1000):
        step(batch)
    objects, memory = tracked(), resident()

    for _ in range(CALLS[backend]):
        step(batch)

    assert ops.convert_to_numpy(total)[0] == CALLS[backend] + 1000
    assert tracked() - objects < 100
    assert resident() - memory < 10 * MB


@pytest.mark.slow
def test_calls_that_fail_add_nothing() -> None:
    signature = [ts.Spec((None, 4))]
    step = ts.function(lambda x: ops.sum(x), signature=signature, max_traces=1, shapes="exact")
    step(X)

    def fail(n: int) -> None:
        for _ in range(n):
            with pytest.raises(ts.ArgumentError):
                step(np.zeros((2, 5), "float32"))
            with pytest.raises(ts.RetraceLimitError):
                step(np.zeros((2, 4), "float32"))

    fail(50)
    objects = tracked()
    fail(300)

    assert tracked() - objects < 100
    assert step.trace_count == 1


def by_argument() -> Callable[[Any], None]:
    step = ts.function(train)

    def use(model: Any) -> None:
        for _ in range(3):
            step(model, X)

    return use


def by_closure() -> Callable[[Any], None]:
    def use(model: Any) -> None:
        step = ts.function(lambda x: train(model, x))
        for _ in range(3):
            step(X)
        assert step.trace_count == 1

    return use


def by_attribute() -> Callable[[Any], None]:
    """The function hangs on the model that it trains: a cycle, which the collector has to see."""

    def use(model: Any) -> None:
        model.step = ts.function(lambda x: train(model, x))
        for _ in range(3):
            model.step(X)

    return use


@pytest.mark.slow
@pytest.mark.parametrize("make", [by_argument, by_closure, by_attribute])
def test_models_that_are_dropped_are_freed_with_their_programs(
    make: Callable[[], Callable[[Any], None]],
) -> None:
    use = make()
    use(make_model())
    models: list[weakref.ref[Any]] = []
    variables: list[weakref.ref[Any]] = []
    left = None

    for i in range(5):
        model = make_model()
        models.append(weakref.ref(model))
        variables += [weakref.ref(v) for v in model.variables]
        use(model)
        del model
        keras.backend.clear_session(free_memory=False)  # Keras's own global name tables
        if i == 0:
            left = programs()

    gc.collect()
    gc.collect()

    assert [i for i, ref in enumerate(models) if ref() is not None] == []
    assert [i for i, ref in enumerate(variables) if ref() is not None] == []
    assert left is not None
    assert programs() <= left


@pytest.mark.slow
@pytest.mark.parametrize("make", [by_argument, by_closure])
def test_many_models_in_a_loop_do_not_add_up(make: Callable[[], Callable[[Any], None]]) -> None:
    use = make()

    def run(n: int) -> None:
        for _ in range(n):
            use(make_model())
        keras.backend.clear_session(free_memory=False)
        gc.collect()

    run(MODELS // 3)
    first = resident()
    run(MODELS // 3)
    second = resident()
    run(MODELS // 3)
    third = resident()

    print(f"resident MB: {first / MB:.1f}, {second / MB:.1f}, {third / MB:.1f}")  # seen if it fails
    # Twenty models: growth that goes on at more than half a MB for each is a leak of programs.
    assert min(second - first, third - second) < 10 * MB


@pytest.mark.slow
def test_a_dropped_function_frees_what_it_closed_over() -> None:
    class Owner:
        pass

    def make() -> tuple[Any, list[weakref.ref[Any]]]:
        owner = Owner()
        variable = keras.Variable(np.zeros(8, "float32"))
        step = ts.function(lambda x: (owner, variable.assign_add(x))[1] + 1)
        return step, [weakref.ref(owner), weakref.ref(variable), weakref.ref(step)]

    step, gone = make()
    step(1.0)

    del step
    gc.collect()
    gc.collect()

    assert [ref() for ref in gone] == [None, None, None]


def test_an_argument_is_not_kept_alive() -> None:
    class Batch(np.ndarray):
        """An array that can be watched."""

    step = ts.function(lambda x: ops.sum(x))
    step(np.ones((64, 4), "float32").view(Batch))
    batch = np.ones((64, 4), "float32").view(Batch)
    gone = weakref.ref(batch)

    float(step(batch))
    del batch
    gc.collect()

    assert gone() is None
