"""What a step does besides computing happens once, while it is traced: it is found and reported."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import io
import os
import random
import time
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import gauss
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from numpy.random import uniform as np_uniform

import trainstep as ts
from tests.helpers import assert_same, normal, values_of
from tests.reports import Modules, heard, line_of, place, places, quiet
from tests.twins import everything

X, Y = normal(4, 3, seed=1), normal(4, 1, seed=2)
RNG = np.random.default_rng(0)
KEPT: list[Any] = []
TABLE: dict[str, Any] = {}
COUNTER = 0
FILE = ""
BOX = types.SimpleNamespace(last=None, items=[], table={})


class Settings:
    """Something with an attribute of its class."""

    seen = 0


@pytest.fixture(autouse=True)
def clean() -> None:
    """Each test finds the globals as they are written above."""
    globals().update(COUNTER=0, BOX=types.SimpleNamespace(last=None, items=[0], table={}))
    KEPT.clear()
    TABLE.clear()
    Settings.seen = 0


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    modules = Modules(tmp_path, monkeypatch)
    yield modules
    modules.close()


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file to open, and something to type."""
    (tmp_path / "factor.txt").write_text("2.0")
    monkeypatch.setitem(globals(), "FILE", str(tmp_path / "factor.txt"))
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n2\n2\n2\n"))


# ------------------------------------------------------------------ each kind


def draws_random(x: Any) -> Any:
    return x * random.random()  # draws_random


def draws_imported(x: Any) -> Any:
    return x * gauss(0.0, 1.0)  # draws_imported


def draws_choice(x: Any) -> Any:
    return x * random.choice([1.0, 2.0])  # draws_choice


def draws_numpy(x: Any) -> Any:
    return x * np.random.normal()  # draws_numpy


def draws_numpy_array(x: Any) -> Any:
    return x + np.random.rand(3).sum()  # draws_numpy_array


def draws_numpy_imported(x: Any) -> Any:
    return x * np_uniform(0.5, 1.5)  # draws_numpy_imported


def draws_generator(x: Any) -> Any:
    return x * RNG.normal()  # draws_generator


def draws_from_partial(x: Any) -> Any:
    draw = functools.partial(random.uniform, 0.5, 1.5)
    return x * draw()  # draws_from_partial


def reads_time(x: Any) -> Any:
    return x + time.time()  # reads_time


def reads_counter(x: Any) -> Any:
    return x + time.perf_counter()  # reads_counter


def reads_date(x: Any) -> Any:
    return x + datetime.datetime.now().second  # reads_date


def reads_today(x: Any) -> Any:
    return x + datetime.date.today().day  # reads_today


def reads_urandom(x: Any) -> Any:
    return x + os.urandom(1)[0]  # reads_urandom


def reads_uuid(x: Any) -> Any:
    return x + uuid.uuid4().int % 7  # reads_uuid


def prints(x: Any) -> Any:
    print("x is", x)  # prints
    return x + 1


def asks(x: Any) -> Any:
    return x * float(input())  # asks


def opens(x: Any) -> Any:
    with open(FILE) as file:  # opens
        return x * float(file.read())


def writes_global(x: Any) -> Any:
    global COUNTER
    COUNTER += 1  # writes_global
    return x + 1


def writes_attribute(x: Any) -> Any:
    BOX.last = 1.5  # writes_attribute
    return x + 1


def writes_class_attribute(x: Any) -> Any:
    Settings.seen += 1  # writes_class_attribute
    return x + 1


def calls_setattr(x: Any) -> Any:
    setattr(BOX, "last", 1.5)  # calls_setattr
    return x + 1


def appends(x: Any) -> Any:
    KEPT.append(1.0)  # appends
    return x + 1


def appends_through_an_alias(x: Any) -> Any:
    mine = BOX.items
    mine.append(1.0)  # appends_through_an_alias
    return x + 1


def extends(x: Any) -> Any:
    KEPT.extend([1.0, 2.0])  # extends
    return x + 1


def inserts(x: Any) -> Any:
    KEPT.insert(0, 1.0)  # inserts
    return x + 1


def adds_in_place(x: Any) -> Any:
    BOX.items += [1.0]  # adds_in_place
    return x + 1


def sets_an_element(x: Any) -> Any:
    BOX.items[0] = 5.0  # sets_an_element
    return x + 1


def sets_an_entry(x: Any) -> Any:
    TABLE["loss"] = 1.0  # sets_an_entry
    return x + 1


def updates_a_dict(x: Any) -> Any:
    TABLE.update(loss=1.0)  # updates_a_dict
    return x + 1


def sets_an_inner_entry(x: Any) -> Any:
    BOX.table["loss"] = 1.0  # sets_an_inner_entry
    return x + 1


RANDOM = ("keras.random", "SeedGenerator")
ARGUMENT = ("argument", "pass ")
RETURN = ("return",)
SHOW = ("ts.print", "trainstep.print", "return")
KINDS: list[tuple[Callable[[Any], Any], str, tuple[str, ...]]] = [
    (draws_random, "random", RANDOM),
    (draws_imported, "gauss", RANDOM),
    (draws_choice, "choice", RANDOM),
    (draws_numpy, "normal", RANDOM),
    (draws_numpy_array, "rand", RANDOM),
    (draws_numpy_imported, "uniform", RANDOM),
    (draws_generator, "normal", RANDOM),
    (draws_from_partial, "uniform", RANDOM),
    (reads_time, "time", ARGUMENT),
    (reads_counter, "perf_counter", ARGUMENT),
    (reads_date, "now", ARGUMENT),
    (reads_today, "today", ARGUMENT),
    (reads_urandom, "urandom", ARGUMENT + RANDOM),
    (reads_uuid, "uuid", ARGUMENT + RANDOM),
    (prints, "print", SHOW),
    (asks, "input", ARGUMENT),
    (opens, "open", ARGUMENT),
    (writes_global, "COUNTER", RETURN),
    (writes_attribute, "last", RETURN),
    (writes_class_attribute, "seen", RETURN),
    (calls_setattr, "last", RETURN),
    (appends, "KEPT", RETURN),
    (appends_through_an_alias, "mine", RETURN),
    (extends, "KEPT", RETURN),
    (inserts, "KEPT", RETURN),
    (adds_in_place, "items", RETURN),
    (sets_an_element, "items", RETURN),
    (sets_an_entry, "TABLE", RETURN),
    (updates_a_dict, "TABLE", RETURN),
    (sets_an_inner_entry, "table", RETURN),
]
BY_NAME = pytest.mark.parametrize(
    ("fn", "name", "cures"), KINDS, ids=[fn.__name__ for fn, *_ in KINDS]
)


@BY_NAME
def test_each_kind_is_reported_once_with_its_line_what_happens_and_the_cure(
    fn: Any, name: str, cures: tuple[str, ...], outside: None
) -> None:
    step = ts.function(fn)

    with heard(ts.SideEffectWarning) as found:
        for _ in range(3):
            step(X)

    assert set(places(found)) == {place(fn.__name__, __file__)}
    assert len(found) == 1 or (fn is adds_in_place and len(found) == 2)  # a list, and an attribute
    text = str(found[0].message)
    assert name in text or (name == "mine" and "items" in text)
    assert any(cure in text for cure in cures)
    if cures is RANDOM:
        assert all(cure in text for cure in cures)
    happens = ("frozen", "once", "constant", "the same", "only", "while tracing", "traced")
    assert any(word in text for word in happens)
    assert "ts.print" not in text or hasattr(ts, "print")
    assert step.trace_count == 1


@BY_NAME
def test_each_kind_is_reported_on_a_python_whose_instructions_are_unknown(
    fn: Any, name: str, cures: tuple[str, ...], outside: None, unknown_python: None
) -> None:
    """Some lines are those of the function then."""
    step = ts.function(fn)

    with heard(ts.SideEffectWarning) as found:
        for _ in range(3):
            step(X)

    first = fn.__code__.co_firstlineno
    last = max(line for *_, line in fn.__code__.co_lines() if line)
    assert {file for file, _ in places(found)} == {__file__}
    assert all(first <= line <= last for _, line in places(found))
    text = str(found[0].message)
    assert name in text or name in ("mine", "normal")  # the line would show these names
    assert any(cure in text for cure in cures)
    assert step.trace_count == 1


@BY_NAME
def test_each_kind_is_an_error_if_asked_for(
    fn: Any, name: str, cures: tuple[str, ...], outside: None
) -> None:
    total = keras.Variable(0.0)

    def counted(x: Any) -> Any:
        total.assign_add(1.0)
        return fn(x)

    step = ts.function(counted, side_effects="raise")

    for _ in range(2):  # a refused trace is not kept
        with heard(ts.SideEffectWarning) as found, pytest.raises(ts.SideEffectError) as caught:
            step(X)
        assert not found
        assert f"{Path(__file__).name}:{line_of(fn.__name__, __file__)}" in str(caught.value)
        assert any(cure in str(caught.value) for cure in cures)
    assert float(total.value) == 0
    assert step.trace_count == 0
    assert isinstance(caught.value, ts.TrainstepError)


@pytest.mark.parametrize(
    "fn", [draws_random, draws_generator, prints, writes_global, writes_attribute, appends],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_each_kind_may_be_allowed(fn: Any) -> None:
    step = ts.function(fn, side_effects="allow")

    with quiet():
        first, second = step(X), step(X)

    assert_same([second], [first], 0, 0)
    assert step.trace_count == 1


@pytest.mark.parametrize("make", [ts.function, lambda fn, **options: ts.Trainer(small(), "sgd", "mse", **options)], ids=["function", "Trainer"])  # fmt: skip
def test_another_word_for_the_policy_is_refused(make: Any) -> None:
    with pytest.raises(ts.ArgumentError, match="side_effects"):
        make(lambda x: x, side_effects="loud")


# ------------------------------------------------------------------ the step


def test_append_print_and_numpy_are_three_reports_and_the_clean_step_has_none() -> None:
    history: list[Any] = []
    seeds = keras.random.SeedGenerator(3)

    @ts.function
    def dirty(x: Any) -> Any:
        noise = np.random.normal(size=(3,)).astype("float32")  # three: draw
        value = ops.mean(ops.add(x, noise) ** 2)
        history.append(value)  # three: append
        print("loss", value)  # three: print
        return value

    @ts.function
    def clean(x: Any) -> Any:
        noise = keras.random.normal((3,), seed=seeds)
        value = ops.mean(ops.add(x, noise) ** 2)
        return value, noise

    with heard(ts.SideEffectWarning) as found:
        for _ in range(5):
            dirty(X)
    wanted = [place(f"three: {mark}", __file__) for mark in ("draw", "append", "print")]
    assert places(found) == wanted
    with quiet():
        for _ in range(5):
            clean(X)


def test_a_line_that_runs_often_in_one_trace_is_reported_once() -> None:
    @ts.function
    def step(x: Any) -> Any:
        for _ in range(4):
            x = x * random.random()  # often
        return x

    with heard(ts.SideEffectWarning) as found:
        step(X)

    assert places(found) == [place("often", __file__)]


def test_two_lines_are_two_reports() -> None:
    @ts.function
    def step(x: Any) -> Any:
        a = random.random()  # two: first
        b = random.random()  # two: second
        return x * a + b

    with heard(ts.SideEffectWarning) as found:
        step(X)

    assert places(found) == [place("two: first", __file__), place("two: second", __file__)]


def test_every_trace_reports_anew() -> None:
    step = ts.function(draws_random, shapes="exact")

    with heard(ts.SideEffectWarning) as found:
        step(X)
        step(X[:2])
        step(X)

    assert step.trace_count == 2
    assert places(found) == [place("draws_random", __file__)] * 2


def test_what_runs_outside_of_a_trace_is_nobodys_business(outside: None) -> None:
    step = ts.function(lambda x: x + 1)

    with quiet():
        step(X)
        for fn, *_ in KINDS:
            fn(1.0)
            step(X)
        step(X[:2])
        prints(1.0)


def test_a_draw_before_an_error_of_the_step_leaves_nothing_behind() -> None:
    """The watch ends with the trace, also with one that failed."""

    @ts.function
    def step(x: Any) -> Any:
        random.random()
        raise ValueError("mine")

    builtin = print, input, open
    with heard(ts.SideEffectWarning), pytest.raises(ValueError, match="mine"):
        step(X)

    assert (print, input, open) == builtin
    with quiet():
        random.random()
        np.random.normal()
        ts.function(lambda x: x * 2)(X)


# ------------------------------------------------------------------ where user code may be


class Learner:
    """A user's class with a compiled method."""

    def __init__(self) -> None:
        self.calls = 0
        self.losses: list[Any] = []

    @ts.function
    def step(self, x: Any) -> Any:
        self.calls += 1  # method: attribute
        self.losses.append(0.0)  # method: list
        return self.helped(x)

    def helped(self, x: Any) -> Any:
        return x * random.random()  # method: helper

    @staticmethod
    def fixed(x: Any) -> Any:
        return x * random.random()  # static method


def test_methods() -> None:
    learner = Learner()

    with heard(ts.SideEffectWarning) as found:
        learner.step(X)
        learner.step(X)

    marks = ("attribute", "list", "helper")
    assert places(found) == [place(f"method: {mark}", __file__) for mark in marks]
    texts = " ".join(str(w.message) for w in found)
    assert "calls" in texts
    assert "losses" in texts


def loud(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        time.monotonic()  # decorator
        return fn(*args)

    return wrapped


@loud
def decorated(x: Any) -> Any:
    return x * random.random()  # decorated


def with_factor(factor: float, x: Any) -> Any:
    return x * factor * random.random()  # partial


def numbers() -> Iterator[float]:
    yield random.random()  # generator


def through_a_lambda(x: Any) -> Any:
    twist = lambda z: z * random.random()  # noqa: E731  # lambda
    return twist(x)


def through_a_nested_function(x: Any) -> Any:
    def inner(z: Any) -> Any:
        return z * random.random()  # nested

    return inner(x)


def through_a_comprehension(x: Any) -> Any:
    return sum([x * random.random() for _ in range(2)])  # comprehension


def through_map(x: Any) -> Any:
    return sum(map(lambda z: z * random.random(), [x, x]))  # noqa: C417  # map


def through_grad(x: Any) -> Any:
    def loss(z: Any) -> Any:
        return ops.sum(z * random.random())  # grad

    return ts.value_and_grad(loss, argnums=0)(x)[1]


def through_a_branch(x: Any) -> Any:
    def double() -> Any:
        return x * random.random()  # branch

    return ops.cond(ops.sum(x) > 0, double, lambda: x)


def writes_nonlocal(x: Any) -> Any:
    return OUTER(x)


def make_outer() -> Any:
    count = 0

    def outer(x: Any) -> Any:
        nonlocal count
        count += 1  # nonlocal
        return x + 1

    return outer


OUTER = make_outer()
INNER = ts.function(lambda z: z * random.random())  # nested function

PATHS: dict[str, tuple[Any, list[str]]] = {
    "a decorated helper": (lambda x: decorated(x), ["decorated", "decorator"]),
    "a partial": (functools.partial(with_factor, 2.0), ["partial"]),
    "a helper in a partial": (lambda x: functools.partial(with_factor, 2.0)(x), ["partial"]),
    "a lambda": (through_a_lambda, ["lambda"]),
    "a generator": (lambda x: x * next(numbers()), ["generator"]),
    "a nested function": (through_a_nested_function, ["nested"]),
    "a comprehension": (through_a_comprehension, ["comprehension"]),
    "map": (through_map, ["map"]),
    "a static method": (lambda x: Learner.fixed(x), ["static method"]),
    "a function under value_and_grad": (through_grad, ["grad"]),
    "a branch of cond": (through_a_branch, ["branch"]),
    "a closure's variable": (writes_nonlocal, ["nonlocal"]),
    "a ts.function in it": (lambda x: INNER(x), ["nested function"]),
}


@pytest.mark.parametrize("path", PATHS)
def test_user_code_is_watched_wherever_it_is(path: str) -> None:
    fn, marks = PATHS[path]
    step = ts.function(fn)

    with heard(ts.SideEffectWarning) as found:
        step(X)
        step(X)

    assert places(found) == sorted(place(mark, __file__) for mark in marks)


HELPERS = """
import random
import time
from random import gauss

CALLS = []
COUNT = 0


def noisy(x):
    return x * gauss(1.0, 0.1)  # module: draw


def timed(x):
    global COUNT
    COUNT += 1  # module: global
    CALLS.append(time.time())  # module: list
    return x
"""


def test_helpers_in_another_module_have_that_modules_lines(modules: Modules) -> None:
    helpers = modules.write("noisy_helpers", HELPERS)
    step = ts.function(lambda x: helpers.timed(helpers.noisy(x)))

    with heard(ts.SideEffectWarning) as found:
        step(X)
        step(X)

    marks = {place(f"module: {mark}", helpers.__file__) for mark in ("draw", "global", "list")}
    assert set(places(found)) == marks
    texts = [str(w.message) for w in found if w.lineno == line_of("module: list", helpers.__file__)]
    assert 1 <= len(texts) <= 2  # a clock and an append on one line
    assert "CALLS" in " ".join(texts)
    assert "time" in " ".join(texts)


def test_a_module_that_is_written_to_is_named(modules: Modules) -> None:
    settings = modules.write("written_settings", "LAST = 0\n")

    @ts.function
    def step(x: Any) -> Any:
        settings.LAST = 1  # module attribute
        return x + 1

    with heard(ts.SideEffectWarning) as found:
        step(X)

    assert places(found) == [place("module attribute", __file__)]
    assert "LAST" in str(found[0].message)


# ------------------------------------------------------------------ a Trainer


class Noisy(layers.Layer):
    """A user's layer that does what it should not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1  # layer: attribute
        return x * random.random()  # layer: draw


def noisy_loss(y: Any, p: Any) -> Any:
    KEPT.append(p)  # loss
    return ops.mean((y - p) ** 2, axis=-1)


class NoisyMean(keras.metrics.Mean):
    """A user's metric that looks at the clock."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return super().update_state(p * (time.time() > 0))  # metric


def noisy_metric(y: Any, p: Any) -> Any:
    print("seen")  # metric function
    return ops.mean(p, axis=-1)


def small(*extra: Any) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *extra, layers.Dense(1)])


def test_layers_losses_and_metrics_of_a_trainer_are_watched() -> None:
    trainer = ts.Trainer(
        small(Noisy()), "sgd", noisy_loss, metrics=[NoisyMean(name="m"), noisy_metric]
    )
    marks = ("layer: attribute", "layer: draw", "loss", "metric", "metric function")
    wanted = sorted(place(mark, __file__) for mark in marks)

    with heard(ts.SideEffectWarning) as found:
        for _ in range(3):
            trainer.train_on_batch(X, Y)
    assert places(found) == wanted

    with heard(ts.SideEffectWarning) as found:  # a trace of its own, and its own reports
        trainer.test_on_batch(X, Y)
        trainer.test_on_batch(X, Y)
    assert places(found) == wanted


def test_fit_reports_once() -> None:
    trainer = ts.Trainer(small(), "sgd", noisy_loss)

    with heard(ts.SideEffectWarning) as found:
        trainer.fit(X, Y, batch_size=2, epochs=3, progress=False)

    assert trainer.trace_count == 1
    assert places(found) == [place("loss", __file__)]


def test_a_trainer_raises_if_asked_for_and_nothing_has_changed() -> None:
    trainer = ts.Trainer(small(), "adam", noisy_loss, side_effects="raise")
    trainer.optimizer.build(trainer.model.trainable_variables)  # which the trace does otherwise
    before = everything(trainer)

    for _ in range(2):
        with pytest.raises(ts.SideEffectError) as caught:
            trainer.train_on_batch(X, Y)
        assert f"{Path(__file__).name}:{line_of('loss', __file__)}" in str(caught.value)
        assert_same(everything(trainer), before, 0, 0)
    assert trainer.predict(X).shape == (4, 1)  # what does not use the loss goes on


def test_a_trainer_allows_if_asked_for() -> None:
    trainer = ts.Trainer(small(), "sgd", noisy_loss, side_effects="allow")

    with quiet():
        assert np.isfinite(trainer.train_on_batch(X, Y)["loss"])


# ------------------------------------------------------------------ what stays behind


def leaves_in_a_list(x: Any) -> Any:
    KEPT.append(x * 2)  # left: KEPT
    return x


def leaves_in_a_slot(x: Any) -> Any:
    BOX.items[0] = x * 2  # left: items
    return x


def leaves_in_an_attribute(x: Any) -> Any:
    BOX.last = x * 2  # left: last
    return x


def leaves_in_a_dict(x: Any) -> Any:
    TABLE["x"] = {"deep": [x * 2]}  # left: TABLE
    return x


def leaves_by_setdefault(x: Any) -> Any:
    BOX.table.setdefault("x", []).append(x * 2)  # left: table
    return x


LEFT: dict[str, tuple[Any, str]] = {
    "a list": (leaves_in_a_list, "KEPT"),
    "a slot of a list": (leaves_in_a_slot, "items"),
    "an attribute": (leaves_in_an_attribute, "last"),
    "a dict": (leaves_in_a_dict, "TABLE"),
    "a list in a dict": (leaves_by_setdefault, "table"),
}


@pytest.mark.parametrize("where", LEFT)
def test_what_a_tensor_of_the_trace_is_left_in_is_named(where: str) -> None:
    fn, name = LEFT[where]
    step = ts.function(fn)

    with heard(ts.SideEffectWarning) as found:
        assert_same([step(X)], [X], 0, 0)
        step(X)

    assert set(places(found)) == {place(f"left: {name}", __file__)}
    assert any(name in str(w.message) for w in found)


LIBRARY = '''
import logging
import os
import random
import time
import uuid

import numpy as np

CACHE = {}
CALLS = []
COUNT = 0
LOG = logging.getLogger("library")


class Registry:
    last = None

    def __init__(self):
        self.seen = []


REGISTRY = Registry()


def transform(x):
    """Does all that a user's step should not, for reasons of its own."""
    global COUNT
    COUNT += 1
    CACHE.setdefault("started", time.time())
    CACHE[COUNT] = uuid.uuid4()
    CALLS.append(random.random() + np.random.rand() + len(os.urandom(2)))
    REGISTRY.seen.append(COUNT)
    Registry.last = COUNT
    REGISTRY.name = "seen"
    with open(__file__) as file:
        file.readline()
    LOG.warning("transformed %s times", COUNT)
    print("from the library")
    return x + 1


def push(target, value):
    target.append(value)


def apply(fn, x):
    return fn(x)


def clip(limit):
    """In the manner of optax: pure functions around a closure."""

    def init(params):
        return {"count": 0, "limit": limit}

    def update(updates, state):
        kept = []
        for u in updates:
            kept.append(u * state["limit"])
        state = dict(state)
        state["count"] += 1
        return kept, state

    return init, update
'''


@pytest.fixture
def library(modules: Modules) -> Any:
    return modules.write("some_library", LIBRARY, under="lib/python3/site-packages")


def test_a_tensor_that_a_library_leaves_in_the_users_list_is_named(library: Any) -> None:
    mine: list[Any] = []

    @ts.function
    def step(x: Any) -> Any:
        library.push(mine, x * 2)
        return x

    with heard(ts.SideEffectWarning) as found:
        step(X)

    assert not mine or any("mine" in str(w.message) for w in found)
    here = Path(__file__).resolve()
    assert all(Path(w.filename).resolve() == here for w in found)


# ------------------------------------------------------------------ no false report


def test_the_internals_of_a_library_are_not_reported(library: Any) -> None:
    step = ts.function(lambda x: library.transform(x), side_effects="raise")

    with quiet():
        for _ in range(3):
            step(X)

    assert library.COUNT >= 1
    assert step.trace_count == 1


def test_user_code_that_a_library_calls_is_reported(library: Any) -> None:
    @ts.function
    def step(x: Any) -> Any:
        return library.apply(lambda z: z * random.random(), x)  # called back

    with heard(ts.SideEffectWarning) as found:
        step(X)

    assert places(found) == [place("called back", __file__)]


def test_pure_functions_with_closures_are_not_reported(library: Any) -> None:
    """Written by a library, and the same text written by the user."""
    namespace: dict[str, Any] = {}
    exec(compile(LIBRARY, str(Path(__file__).with_name("optax_style.py")), "exec"), namespace)
    weights = [keras.Variable(normal(3, seed=i)) for i in range(2)]

    for clip in (library.clip, namespace["clip"]):
        init, update = clip(0.5)
        state = init(weights)

        @ts.function(side_effects="raise")
        def step(x: Any) -> Any:
            grads = ts.grad(lambda: ops.sum(weights[0] * weights[1] * x), weights)()
            grads, _ = update(grads, state)
            for v, g in zip(weights, grads, strict=True):
                v.assign_sub(0.1 * g)
            return grads

        with quiet():
            step(X)
            step(X)
        assert step.trace_count == 1


def local_list(x: Any) -> Any:
    parts = []
    for i in range(3):
        parts.append(x * i)
    parts[0] = x
    parts += [x]
    parts.reverse()
    return ops.sum(ops.stack(parts), axis=0)


def local_comprehension(x: Any) -> Any:
    parts = [x * i for i in range(3)]
    named = {f"p{i}": p for i, p in enumerate(parts)}
    return sum(named[k] for k in named)


def local_dict(x: Any) -> Any:
    logs: dict[str, Any] = {}
    logs["loss"] = ops.mean(x)
    logs.update(twice=x * 2)
    logs.setdefault("more", []).append(x)
    counts: Any = collections.defaultdict(list)
    counts["a"].append(x)
    return logs["twice"] + counts["a"][0]


@dataclasses.dataclass
class Carry:
    """Made in the step."""

    value: Any
    steps: int = 0


class Accumulator:
    """Made in the step."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.count = 0

    def add(self, x: Any) -> Any:
        self.parts.append(x)
        self.count += 1
        return self


def local_object(x: Any) -> Any:
    carry = Carry(x)
    carry.value = carry.value * 2
    carry.steps += 1
    mine = types.SimpleNamespace()
    mine.last = x
    return Accumulator().add(carry.value).add(mine.last).parts[0]


def local_list_of_a_helper(x: Any) -> Any:
    def fill(target: list[Any], n: int) -> None:
        for i in range(n):
            target.append(x * i)

    parts: list[Any] = []
    fill(parts, 3)
    return parts[-1]


def local_nonlocal(x: Any) -> Any:
    total = x

    def add() -> None:
        nonlocal total
        total = total + x

    add()
    return total


def changes_its_arguments_copy(x: Any) -> Any:
    batch = {"x": x}
    batch["x"] = batch.pop("x") / 2
    return batch["x"]


def pure_python(x: Any) -> Any:
    when = datetime.timedelta(seconds=2).total_seconds()
    text = "-".join(sorted(str(n) for n in range(3)))
    array = np.zeros(3, "float32")
    array[0] = 1.0
    array += 1.0
    return x * when + len(text) + array.sum()


@functools.lru_cache
def cached(n: int) -> float:
    return n * 2.0


def cached_helper(x: Any) -> Any:
    return x * cached(3)


def draws_with_keras(x: Any) -> Any:
    return keras.random.dropout(x, 0.5, seed=SEEDS) + keras.random.normal((3,), seed=SEEDS)


SEEDS = keras.random.SeedGenerator(1)
CLEAN = [
    local_list,
    local_comprehension,
    local_dict,
    local_object,
    local_list_of_a_helper,
    local_nonlocal,
    changes_its_arguments_copy,
    pure_python,
    cached_helper,
    draws_with_keras,
]


@pytest.mark.parametrize("fn", CLEAN, ids=lambda fn: fn.__name__)
def test_what_stays_in_the_step_is_not_reported(fn: Any) -> None:
    with quiet():
        step = ts.function(fn, side_effects="raise")
        got = step(X)
        warning = ts.function(fn)
        warning(X)
        warning(X)

    if fn is not draws_with_keras:
        assert_same([got], [fn(ops.convert_to_tensor(X))], 1e-6, 1e-6)
    assert step.trace_count == 1


class Built(layers.Layer):
    """A user's layer with weights of its own, made when it is first called."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")
        self.inner = layers.Dense(2)
        self.inner.build((None, 2))

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(x) * 0.01)
        return self.inner(x @ self.kernel)


class Share(keras.metrics.Metric):
    """A user's metric, written as Keras's guide writes it."""

    def __init__(self, name: str = "share") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(p))
        self.count.assign(self.count + 1)

    def result(self) -> Any:
        return self.total / self.count


class Whole(keras.Model):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
        self.last = layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        for part in self.parts:
            x = part(x) if isinstance(part, layers.Dense) else part(x, training=training)
        return self.last(x)


def test_layers_optimizers_and_metrics_that_build_themselves_in_a_step_are_not_reported() -> None:
    model = keras.Sequential(
        [Built(), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.01)
    mae, share = keras.metrics.MeanAbsoluteError(), Share()
    loss = keras.losses.Huber()

    @ts.function(side_effects="raise")
    def step(x: Any, y: Any) -> Any:
        def loss_of() -> Any:
            p = model(x, training=True)
            mae.update_state(y, p)
            share.update_state(y, p)
            return loss(y, p) + sum(model.losses)

        value, grads = ts.value_and_grad(loss_of, lambda: model.trainable_variables)()
        optimizer.apply(ts.clip_by_global_norm(grads, 1.0), model.trainable_variables)
        return value, mae.result(), share.result()

    with quiet():
        for _ in range(3):
            step(X, Y)

    assert step.trace_count == 1
    assert int(optimizer.iterations.value) == 3


@pytest.mark.slow
def test_a_whole_training_is_not_reported() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    trainer = ts.Trainer(
        Whole(),
        keras.optimizers.AdamW(schedule),
        "mse",
        metrics=["mae", Share()],
        side_effects="raise",
        clip_norm=1.0,
    )

    with quiet():
        trainer.fit(X, Y, validation_data=(X, Y), epochs=2, batch_size=2, progress=False)
        trainer.evaluate(X, Y)
        trainer.predict(X)
        trainer.train_on_batch(X, Y, sample_weight=np.ones(4))
        trainer.run(["loss", "gradient_norm"], X, Y)


def test_a_refused_trace_leaves_a_model_as_it_was() -> None:
    """Also one that was built meanwhile: its weights, if it has any, are the fresh ones."""
    model = small()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    before = values_of([*model.variables, *optimizer.variables])

    @ts.function(side_effects="raise")
    def step(x: Any, y: Any) -> Any:
        grads = ts.grad(lambda: ops.mean((model(x) - y) ** 2), model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        print("done")

    with pytest.raises(ts.SideEffectError):
        step(X, Y)

    assert_same([*model.variables, *optimizer.variables], before, 0, 0)
