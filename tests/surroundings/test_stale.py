"""What a step read while it was traced and has changed since is never used in silence."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from tests.reports import Modules, heard, line_of, quiet
from tests.twins import everything

OLD, NEW, NEWER = 0.5, 0.75, 0.875
X, Y = normal(4, 3, seed=1), normal(4, 1, seed=2)
HERE = Path(__file__)

GAIN: Any = OLD
LIMITS: Any = (OLD, 1.0)
CONFIG: Any = {}
MODEL: Any = None
HELPER: Any = None


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Each test finds the globals as they are written above."""
    globals().update(GAIN=OLD, LIMITS=(OLD, 1.0), CONFIG={"alpha": OLD}, MODEL=None, HELPER=None)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    modules = Modules(tmp_path, monkeypatch)
    yield modules
    modules.close()


def put(**values: Any) -> None:
    globals().update(values)


# ------------------------------------------------------------------ kinds of values


@dataclass
class Case:
    """A step that gives its argument times the value, and what changes the value."""

    step: Any
    change: Callable[[float], None]
    name: str  # what a report has to name
    function: Any = None  # the ts.function, if `step` only calls it
    shown: bool = True  # both numbers can be read in a report
    sure: bool = True  # the default retraces; else it may also warn
    kept: bool = True  # a program that is not traced again uses the old value

    def __call__(self, x: float = 1.0) -> float:
        return float(self.step(x))

    @property
    def compiled(self) -> Any:
        return self.function or self.step


Make = Callable[..., Any]
KINDS: dict[str, Callable[[Make, Modules], Case]] = {}


def kind(build: Callable[[Make, Modules], Case]) -> Callable[[Make, Modules], Case]:
    KINDS[build.__name__.replace("_", " ")] = build
    return build


@kind
def a_global(make: Make, modules: Modules) -> Case:
    def step(x: Any) -> Any:
        return x * GAIN

    return Case(make(step), lambda v: put(GAIN=v), "GAIN")


@kind
def a_global_tuple(make: Make, modules: Modules) -> Case:
    return Case(make(lambda x: x * LIMITS[0]), lambda v: put(LIMITS=(v, 1.0)), "LIMITS")


@kind
def a_global_of_a_helper_in_another_module(make: Make, modules: Modules) -> Case:
    helpers = modules.write(
        "stale_helpers", "alpha = 0.5\n\n\ndef scaled(x):\n    return x * alpha\n"
    )
    return Case(make(lambda x: helpers.scaled(x)), lambda v: setattr(helpers, "alpha", v), "alpha")


@kind
def a_module_attribute(make: Make, modules: Modules) -> Case:
    settings = modules.write("stale_settings", "ALPHA = 0.5\n")
    return Case(
        make(lambda x: x * settings.ALPHA), lambda v: setattr(settings, "ALPHA", v), "ALPHA"
    )


@kind
def a_closure_variable(make: Make, modules: Modules) -> Case:
    alpha = OLD

    def step(x: Any) -> Any:
        return x * alpha

    def change(v: float) -> None:
        nonlocal alpha
        alpha = v

    return Case(make(step), change, "alpha")


@kind
def a_closure_variable_of_a_helper(make: Make, modules: Modules) -> Case:
    alpha = OLD

    def helper(x: Any) -> Any:
        return x * alpha

    def change(v: float) -> None:
        nonlocal alpha
        alpha = v

    return Case(make(lambda x: helper(x)), change, "alpha")


@kind
def a_closure_variable_of_a_nested_function(make: Make, modules: Modules) -> Case:
    alpha = OLD

    def step(x: Any) -> Any:
        def inner(z: Any) -> Any:
            return z * alpha

        return inner(x)

    def change(v: float) -> None:
        nonlocal alpha
        alpha = v

    return Case(make(step), change, "alpha")


@kind
def an_attribute_of_self(make: Make, modules: Modules) -> Case:
    class Learner:
        def __init__(self) -> None:
            self.alpha = OLD

        @make
        def step(self, x: Any) -> Any:
            return x * self.alpha

    learner = Learner()
    return Case(
        learner.step, lambda v: setattr(learner, "alpha", v), "alpha", function=Learner.step
    )


@kind
def an_attribute_through_an_alias(make: Make, modules: Modules) -> Case:
    class Learner:
        def __init__(self) -> None:
            self.cfg = types.SimpleNamespace(alpha=OLD)

        @make
        def step(self, x: Any) -> Any:
            cfg = self.cfg
            return x * cfg.alpha

    learner = Learner()
    return Case(
        learner.step, lambda v: setattr(learner.cfg, "alpha", v), "alpha", function=Learner.step
    )


@kind
def an_attribute_behind_a_property(make: Make, modules: Modules) -> Case:
    class Learner:
        def __init__(self) -> None:
            self._alpha = OLD

        @property
        def alpha(self) -> float:
            return self._alpha

        @make
        def step(self, x: Any) -> Any:
            return x * self.alpha

    learner = Learner()
    return Case(
        learner.step, lambda v: setattr(learner, "_alpha", v), "alpha", function=Learner.step
    )


@kind
def a_class_attribute(make: Make, modules: Modules) -> Case:
    class Learner:
        alpha = OLD

        @make
        def step(self, x: Any) -> Any:
            return x * self.alpha

    learner = Learner()
    return Case(
        learner.step, lambda v: setattr(Learner, "alpha", v), "alpha", function=Learner.step
    )


@kind
def an_attribute_of_a_class(make: Make, modules: Modules) -> Case:
    class Settings:
        alpha = OLD

    return Case(
        make(lambda x: x * Settings.alpha), lambda v: setattr(Settings, "alpha", v), "alpha"
    )


@kind
def an_attribute_of_the_instance_over_that_of_the_class(make: Make, modules: Modules) -> Case:
    class Settings:
        alpha = OLD

    settings = Settings()

    def change(v: float) -> None:
        if v == OLD:
            del settings.alpha
        else:
            settings.alpha = v

    return Case(make(lambda x: x * settings.alpha), change, "alpha", sure=False)


@kind
def an_attribute_in_a_slot(make: Make, modules: Modules) -> Case:
    class Settings:
        __slots__ = ("alpha",)

    settings = Settings()
    settings.alpha = OLD
    return Case(
        make(lambda x: x * settings.alpha), lambda v: setattr(settings, "alpha", v), "alpha"
    )


@kind
def an_attribute_through_getattr(make: Make, modules: Modules) -> Case:
    settings = types.SimpleNamespace(alpha=OLD)
    return Case(
        make(lambda x: x * getattr(settings, "alpha")),
        lambda v: setattr(settings, "alpha", v),
        "alpha",
        sure=False,
    )


@kind
def an_attribute_of_an_argument(make: Make, modules: Modules) -> Case:
    class Thing:
        def __init__(self) -> None:
            self.alpha = OLD

    thing = Thing()
    step = make(lambda thing, x: x * thing.alpha)
    return Case(
        lambda x: step(thing, x), lambda v: setattr(thing, "alpha", v), "alpha", function=step
    )


@kind
def an_attribute_in_a_partial(make: Make, modules: Modules) -> Case:
    settings = types.SimpleNamespace(alpha=OLD)
    step = make(functools.partial(lambda cfg, x: x * cfg.alpha, settings))
    return Case(step, lambda v: setattr(settings, "alpha", v), "alpha", sure=False)


@kind
def an_attribute_that_a_helper_reads_from_its_parameter(make: Make, modules: Modules) -> Case:
    settings = types.SimpleNamespace(alpha=OLD)

    def helper(cfg: Any, x: Any) -> Any:
        return x * cfg.alpha

    return Case(
        make(lambda x: helper(settings, x)),
        lambda v: setattr(settings, "alpha", v),
        "alpha",
        sure=False,
    )


@kind
def an_entry_that_a_helper_in_another_module_reads(make: Make, modules: Modules) -> Case:
    helpers = modules.write(
        "stale_reader",
        "def scaled(x, cfg):\n    inner = cfg['inner']\n    return x * inner['alpha']\n",
    )
    config = {"inner": {"alpha": OLD}}
    return Case(
        make(lambda x: helpers.scaled(x, cfg=config)),
        lambda v: config["inner"].update(alpha=v),
        "alpha",
        sure=False,
    )


@kind
def a_dataclass_field(make: Make, modules: Modules) -> Case:
    @dataclass
    class Settings:
        alpha: float = OLD

    settings = Settings()
    return Case(
        make(lambda x: x * settings.alpha), lambda v: setattr(settings, "alpha", v), "alpha"
    )


@kind
def a_frozen_dataclass_that_is_replaced(make: Make, modules: Modules) -> Case:
    @dataclass(frozen=True)
    class Settings:
        alpha: float = OLD

    put(CONFIG=Settings())
    return Case(
        make(lambda x: x * CONFIG.alpha),
        lambda v: put(CONFIG=dataclasses.replace(CONFIG, alpha=v)),
        "alpha",
    )


@kind
def a_dict_entry(make: Make, modules: Modules) -> Case:
    return Case(make(lambda x: x * CONFIG["alpha"]), lambda v: CONFIG.update(alpha=v), "alpha")


@kind
def an_entry_of_a_dict_in_a_dict(make: Make, modules: Modules) -> Case:
    config = {"loss": {"alpha": OLD}}
    return Case(
        make(lambda x: x * config["loss"]["alpha"]),
        lambda v: config["loss"].update(alpha=v),
        "alpha",
    )


@kind
def a_dict_entry_by_get(make: Make, modules: Modules) -> Case:
    return Case(
        make(lambda x: x * CONFIG.get("alpha", 3.0)), lambda v: CONFIG.update(alpha=v), "CONFIG"
    )


@kind
def a_dict_that_is_unpacked(make: Make, modules: Modules) -> Case:
    def scaled(x: Any, alpha: Any) -> Any:
        return x * alpha

    return Case(
        make(lambda x: scaled(x, **CONFIG)), lambda v: CONFIG.update(alpha=v), "CONFIG", sure=False
    )


@kind
def a_dict_that_is_iterated(make: Make, modules: Modules) -> Case:
    def step(x: Any) -> Any:
        for _, v in CONFIG.items():
            x = x * v
        return x

    return Case(make(step), lambda v: CONFIG.update(alpha=v), "CONFIG", sure=False)


@kind
def a_list_element(make: Make, modules: Modules) -> Case:
    factors = [OLD, 1.0]
    return Case(make(lambda x: x * factors[0]), lambda v: factors.__setitem__(0, v), "factors")


@kind
def a_list_that_is_summed(make: Make, modules: Modules) -> Case:
    factors = [OLD, 0.0]
    return Case(
        make(lambda x: x * sum(factors)), lambda v: factors.__setitem__(0, v), "factors", sure=False
    )


@kind
def a_list_that_grows(make: Make, modules: Modules) -> Case:
    factors = [OLD]

    def step(x: Any) -> Any:
        return x * sum([f for f in factors])  # noqa: C416

    def change(v: float) -> None:
        factors[1:] = [] if v == OLD else [v - OLD]

    return Case(make(step), change, "factors", shown=False, sure=False)


@kind
def a_default_of_a_helper(make: Make, modules: Modules) -> Case:
    def helper(x: Any, alpha: Any = OLD) -> Any:
        return x * alpha

    return Case(make(lambda x: helper(x)), lambda v: setattr(helper, "__defaults__", (v,)), "alpha")


@kind
def a_keyword_default_of_a_helper(make: Make, modules: Modules) -> Case:
    def helper(x: Any, *, alpha: Any = OLD) -> Any:
        return x * alpha

    return Case(make(lambda x: helper(x)), lambda v: helper.__kwdefaults__.update(alpha=v), "alpha")


@kind
def a_default_that_is_a_dict(make: Make, modules: Modules) -> Case:
    def helper(x: Any, cfg: Any = {"alpha": OLD}) -> Any:
        return x * cfg["alpha"]

    return Case(
        make(lambda x: helper(x)), lambda v: helper.__defaults__[0].update(alpha=v), "alpha"
    )


@kind
def an_argument_of_a_decorator(make: Make, modules: Modules) -> Case:
    settings = {"alpha": OLD}

    def times(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapped(x: Any) -> Any:
            return fn(x) * settings["alpha"]

        return wrapped

    @times
    def helper(x: Any) -> Any:
        return x

    return Case(make(lambda x: helper(x)), lambda v: settings.update(alpha=v), "alpha")


@kind
def a_global_under_value_and_grad(make: Make, modules: Modules) -> Case:
    def step(x: Any) -> Any:
        return ts.grad(lambda z: z * GAIN, argnums=0)(x) * x

    return Case(make(step), lambda v: put(GAIN=v), "GAIN")


@kind
def a_global_of_a_function_in_the_function(make: Make, modules: Modules) -> Case:
    inner = ts.function(lambda x: x * GAIN)
    return Case(make(lambda x: inner(x)), lambda v: put(GAIN=v), "GAIN")


@kind
def a_number_of_numpy(make: Make, modules: Modules) -> Case:
    put(GAIN=np.float32(OLD))
    return Case(make(lambda x: x * GAIN), lambda v: put(GAIN=np.float32(v)), "GAIN")


@kind
def an_array_in_another_ones_place(make: Make, modules: Modules) -> Case:
    put(GAIN=np.full(3, OLD, "float32"))
    return Case(
        make(lambda x: x * ops.mean(GAIN)),
        lambda v: put(GAIN=np.full(3, v, "float32")),
        "GAIN",
        shown=False,
        sure=False,
    )


@kind
def an_array_edited_in_place(make: Make, modules: Modules) -> Case:
    scale = np.full(3, OLD, "float32")
    return Case(
        make(lambda x: x * ops.max(scale)),
        lambda v: scale.__setitem__(1, v),
        "scale",
        shown=False,
        kept=False,
    )


@kind
def an_array_in_an_attribute_edited_in_place(make: Make, modules: Modules) -> Case:
    box = types.SimpleNamespace(scale=np.full((2, 2), OLD, "float32"))
    return Case(
        make(lambda x: x * ops.max(box.scale)),
        lambda v: box.scale.__setitem__((1, 0), v),
        "scale",
        shown=False,
        kept=False,
    )


@kind
def a_large_array_edited_in_place(make: Make, modules: Modules) -> Case:
    """One number in the middle of a megabyte."""
    scale = np.full(262_144, OLD, "float32")
    return Case(
        make(lambda x: x * ops.max(scale)),
        lambda v: scale.__setitem__(123_457, v),
        "scale",
        shown=False,
        sure=False,
        kept=False,
    )


@kind
def an_attribute_of_a_users_layer(make: Make, modules: Modules) -> Case:
    layer = Factor()
    return Case(
        make(lambda x: ops.reshape(layer(ops.reshape(x, (1, 1))), ())),
        lambda v: setattr(layer, "factor", v),
        "factor",
    )


@kind
def an_attribute_of_a_layer_in_a_model(make: Make, modules: Modules) -> Case:
    layer = Factor()
    model = keras.Sequential([keras.Input((1,)), layer])
    return Case(
        make(lambda x: ops.reshape(model(ops.reshape(x, (1, 1))), ())),
        lambda v: setattr(layer, "factor", v),
        "factor",
    )


@kind
def a_helper_that_is_bound_anew(make: Make, modules: Modules) -> Case:
    helpers = {v: functools.partial(lambda v, x: x * v, v) for v in (OLD, NEW, NEWER)}
    put(HELPER=helpers[OLD])
    return Case(make(lambda x: HELPER(x)), lambda v: put(HELPER=helpers[v]), "HELPER", shown=False)


@kind
def a_function_that_is_bound_anew(make: Make, modules: Modules) -> Case:
    def half(x: Any) -> Any:
        return x * OLD

    def more(x: Any) -> Any:
        return x * NEW

    def most(x: Any) -> Any:
        return x * NEWER

    functions = {OLD: half, NEW: more, NEWER: most}
    put(HELPER=half)
    return Case(
        make(lambda x: HELPER(x)), lambda v: put(HELPER=functions[v]), "HELPER", shown=False
    )


@kind
def a_method_that_is_bound_anew(make: Make, modules: Modules) -> Case:
    class Learner:
        def scaled(self, x: Any) -> Any:
            return x * OLD

    learner = Learner()
    original = Learner.scaled

    def change(v: float) -> None:
        Learner.scaled = original if v == OLD else lambda self, x: x * v  # type: ignore[method-assign]

    return Case(make(lambda x: learner.scaled(x)), change, "scaled", shown=False, sure=False)


@kind
def a_model_that_is_bound_anew(make: Make, modules: Modules) -> Case:
    def network(v: float) -> keras.Model:
        dense = layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(v))
        return keras.Sequential([keras.Input((1,)), dense])

    networks = {v: network(v) for v in (OLD, NEW, NEWER)}
    put(MODEL=networks[OLD])
    return Case(
        make(lambda x: ops.reshape(MODEL(ops.reshape(x, (1, 1))), ())),
        lambda v: put(MODEL=networks[v]),
        "MODEL",
        shown=False,
    )


class Factor(layers.Layer):
    """A user's layer with a number that is no variable."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = OLD

    def call(self, x: Any) -> Any:
        return x * self.factor


# ------------------------------------------------------------------ each kind, each policy


def names(case: Case, text: str) -> bool:
    return case.name in text and (not case.shown or (str(OLD) in text and str(NEW) in text))


@pytest.mark.parametrize("name", KINDS)
def test_by_default_a_change_takes_effect_or_is_warned_of(name: str, modules: Modules) -> None:
    case = KINDS[name](ts.function, modules)

    with quiet():
        assert [case() for _ in range(4)] == [OLD] * 4
    assert case.compiled.trace_count == 1

    case.change(NEW)
    with heard(ts.StaleCaptureWarning) as found:
        got = [case(), case()]
    if not case.sure and got != [NEW, NEW]:
        assert [names(case, str(w.message)) for w in found] == [True]
        return
    assert got == [NEW, NEW]
    assert not found
    assert case.compiled.trace_count == 2
    entry = case.compiled.ledger[-1]
    assert any(names(case, text) for text in entry.changes), entry.changes
    assert case.name in entry.reason

    case.change(OLD)
    with quiet():
        assert [case(), case(2.0)] == [OLD, 2 * OLD]
    assert case.compiled.trace_count == 2  # the first program


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KINDS)
def test_a_change_takes_effect_on_a_python_whose_instructions_are_unknown(
    name: str, modules: Modules, unknown_python: None
) -> None:
    case = KINDS[name](ts.function, modules)

    with quiet():
        assert [case() for _ in range(3)] == [OLD] * 3
    assert case.compiled.trace_count == 1

    case.change(NEW)
    with heard(ts.StaleCaptureWarning) as found:
        got = [case(), case()]
    if case.sure or got == [NEW, NEW]:
        assert got == [NEW, NEW]
        assert not found
    else:
        assert [names(case, str(w.message)) for w in found] == [True]


@pytest.mark.parametrize("name", KINDS)
def test_with_warn_the_old_value_goes_on_and_each_change_is_named_once(
    name: str, modules: Modules
) -> None:
    case = KINDS[name](functools.partial(ts.function, captures="warn"), modules)

    with quiet():
        assert [case(), case()] == [OLD, OLD]
    for value in (NEW, NEWER):
        case.change(value)
        with heard(ts.StaleCaptureWarning) as found:
            got = [case() for _ in range(3)]
        (warning,) = found
        assert case.name in str(warning.message)
        if case.shown:
            assert str(OLD) in str(warning.message)
            assert str(value) in str(warning.message)
        if case.kept:
            assert got == [OLD] * 3
    assert case.compiled.trace_count == 1


# How a change is found depends on its kind; what is then done about it does not.
FEW = list(KINDS)[::8]


@pytest.mark.parametrize("name", FEW)
def test_with_raise_nothing_runs_until_the_value_is_back(name: str, modules: Modules) -> None:
    total = keras.Variable(0.0)

    def make(fn: Any) -> Any:
        @functools.wraps(fn)
        def counted(*args: Any) -> Any:
            total.assign_add(1.0)
            return fn(*args)

        return ts.function(counted, captures="raise")

    case = KINDS[name](make, modules)
    assert [case(), case()] == [OLD, OLD]
    before = float(total.value)

    case.change(NEW)
    for _ in range(2):
        with pytest.raises(ts.StaleCaptureError) as caught:
            case()
        assert names(case, str(caught.value))
    assert float(total.value) == before
    assert case.compiled.trace_count == 1
    assert isinstance(caught.value, ts.TrainstepError)

    case.change(OLD)
    assert case(2.0) == 2 * OLD
    assert case.compiled.trace_count == 1


@pytest.mark.parametrize("name", FEW)
def test_with_ignore_the_old_value_is_used_in_silence(name: str, modules: Modules) -> None:
    case = KINDS[name](functools.partial(ts.function, captures="ignore"), modules)

    with quiet():
        case()
        case.change(NEW)
        got = [case(), case()]

    if case.kept:
        assert got == [OLD, OLD]
    assert case.compiled.trace_count == 1


@pytest.mark.parametrize(
    "make",
    [ts.function, lambda fn, **options: ts.Trainer(small(), "sgd", "mse", **options)],
    ids=["function", "Trainer"],
)
def test_another_word_for_the_policy_is_refused(make: Any) -> None:
    with pytest.raises(ts.ArgumentError, match="captures"):
        make(lambda x: x, captures="loud")


# ------------------------------------------------------------------ the check


def test_a_global_an_attribute_and_a_closure_float_are_never_stale() -> None:
    """Of a step that trains: each change costs one trace and takes effect in that very step."""
    weight = keras.Variable(np.float32(0))
    beta = 1.0

    class Learner:
        def __init__(self) -> None:
            self.alpha = 1.0

        @ts.function
        def step(self, x: Any) -> Any:
            weight.assign_add(x * GAIN * self.alpha * beta)
            return weight.value

    learner = Learner()
    put(GAIN=1.0)
    wanted = 0.0

    def advance(by: float, traces: int) -> None:
        nonlocal wanted
        for _ in range(3):
            wanted += by
            assert float(learner.step(1.0)) == wanted
        assert Learner.step.trace_count == traces

    advance(1.0, 1)
    put(GAIN=2.0)
    advance(2.0, 2)
    learner.alpha = 4.0
    advance(8.0, 3)
    beta = 8.0
    advance(64.0, 4)
    changed = [" ".join(e.changes) for e in Learner.step.ledger][1:]
    assert ["GAIN" in changed[0], "alpha" in changed[1], "beta" in changed[2]] == [True] * 3
    assert all(len(e.changes) == 1 for e in list(Learner.step.ledger)[1:])


def test_an_entry_says_where_the_value_was_read_and_which_call_found_the_change() -> None:
    @ts.function
    def step(x: Any) -> Any:
        return x * GAIN  # the read

    step(1.0)
    put(GAIN=NEW)
    called = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    step(1.0)

    entry = step.ledger[-1]
    (text,) = entry.changes
    assert f"{HERE.name}:{line_of('the read', HERE)}" in text
    assert f"{HERE.name}:{called}" in entry.site


def test_a_warning_is_at_the_users_line() -> None:
    @ts.function(captures="warn")
    def step(x: Any) -> Any:
        return x * GAIN  # the warned read

    step(1.0)
    put(GAIN=NEW)
    with heard(ts.StaleCaptureWarning) as found:
        called = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        step(1.0)

    (warning,) = found
    assert Path(warning.filename).resolve() == HERE.resolve()
    assert warning.lineno in (called, line_of("the warned read", HERE))


def test_two_changes_at_once_are_one_trace_that_names_both() -> None:
    step = ts.function(lambda x: x * GAIN * CONFIG["alpha"])
    step(1.0)

    put(GAIN=NEW)
    CONFIG["alpha"] = 2.0
    assert float(step(1.0)) == 2 * NEW

    assert step.trace_count == 2
    texts = " ".join(step.ledger[-1].changes)
    assert "GAIN" in texts
    assert "alpha" in texts


def test_every_earlier_value_has_its_program() -> None:
    step = ts.function(lambda x: x * GAIN)

    for value in (OLD, NEW, NEWER, OLD, NEWER, NEW, OLD):
        put(GAIN=value)
        assert float(step(1.0)) == value

    assert step.trace_count == 3


def test_a_retrace_counts_against_the_limit_and_is_named_there() -> None:
    total = keras.Variable(0.0)

    @ts.function(max_traces=1)
    def step(x: Any) -> Any:
        total.assign_add(x * GAIN)
        return total.value

    step(1.0)
    put(GAIN=NEW)
    with pytest.raises(ts.RetraceLimitError, match="GAIN"):
        step(1.0)
    assert float(total.value) == OLD
    put(GAIN=OLD)
    assert float(step(1.0)) == 2 * OLD


def by_value(x: Any) -> Any:
    """Gives another result for every value of the test below."""
    if GAIN is None:
        return x + 100
    if isinstance(GAIN, bool):
        return x + (200 if GAIN else 300)
    if isinstance(GAIN, str):
        return x + 400 + len(GAIN)
    return x / GAIN


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mean", "sum"),
        (True, False),
        (None, 2.0),
        (2.0, None),
        (1, 2),
        (1, True),
        (1, "1"),
        pytest.param(
            0.0,
            -0.0,
            marks=pytest.mark.skipif(
                keras.backend.backend() != "torch",
                reason="JAX and TensorFlow keep constants that they have met, and -0.0 == 0.0",
            ),
        ),
    ],
    ids=str,
)
def test_values_of_any_kind_are_compared(old: Any, new: Any) -> None:
    step = ts.function(by_value)
    results = []
    for value in (old, new):
        put(GAIN=value)
        results.append(float(step(1.0)))
        assert results[-1] == float(by_value(ops.convert_to_tensor(1.0)))

    assert results[0] != results[1]
    assert step.trace_count == 2


def test_a_value_that_is_gone_is_not_used() -> None:
    total = keras.Variable(0.0)

    def step(x: Any) -> Any:
        total.assign_add(x)
        return x * CONFIG["alpha"]

    step, strict = ts.function(step), ts.function(step, captures="raise")
    step(1.0)
    strict(1.0)
    del CONFIG["alpha"]

    with pytest.raises((KeyError, ts.TrainstepError)):
        step(1.0)
    with pytest.raises(ts.StaleCaptureError, match="alpha"):
        strict(1.0)
    assert float(total.value) == 2


def test_a_value_that_changed_while_another_program_ran_is_found_by_each() -> None:
    """Each program compares with what it was traced with."""
    step = ts.function(lambda x: ops.sum(x) * GAIN, shapes="exact")
    one, two = np.ones(1, "float32"), np.ones(2, "float32")

    assert (float(step(one)), float(step(two))) == (OLD, 2 * OLD)
    put(GAIN=NEW)
    assert (float(step(one)), float(step(two))) == (NEW, 2 * NEW)
    put(GAIN=OLD)
    assert (float(step(one)), float(step(two))) == (OLD, 2 * OLD)
    assert step.trace_count == 4


def test_other_sizes_do_not_hide_a_change() -> None:
    """Where one record serves all sizes, the record too is compared."""
    step = ts.function(lambda x: ops.sum(x) * GAIN)

    for value in (OLD, NEW):
        put(GAIN=value)
        for n in (2, 3, 5, 2, 7):
            assert float(step(np.ones(n, "float32"))) == n * value
    assert step.trace_count <= 4


def test_a_step_that_is_made_again_around_a_model_is_not_stale() -> None:
    model = small()
    for value in (OLD, NEW):

        @ts.function
        def step(x: Any) -> Any:
            return ops.sum(model(x)) * GAIN * value

        put(GAIN=value)
        wanted = float(ops.sum(model(X))) * value * value
        assert float(step(X)) == pytest.approx(wanted, rel=1e-5)
    put(GAIN=NEWER)
    assert float(step(X)) == pytest.approx(float(ops.sum(model(X))) * NEWER * NEW, rel=1e-5)


def test_instances_have_values_of_their_own() -> None:
    class Learner:
        def __init__(self, alpha: float) -> None:
            self.alpha = alpha

        @ts.function
        def step(self, x: Any) -> Any:
            return x * self.alpha

    a, b = Learner(2.0), Learner(4.0)
    assert [float(o.step(1.0)) for o in (a, b, a, b)] == [2, 4, 2, 4]
    a.alpha = 8.0
    assert [float(o.step(1.0)) for o in (a, b, a, b)] == [8, 4, 8, 4]
    assert Learner.step.trace_count == 3


# ------------------------------------------------------------------ Keras's own objects


def test_the_rate_of_a_dropout_layer() -> None:
    drop = layers.Dropout(0.5, seed=1)
    step = ts.function(lambda x: drop(x, training=True))
    ones = np.ones((8, 8), "float32")

    assert set(np.unique(host(step(ones)))) == {0.0, 2.0}
    drop.rate = 0.0
    assert set(np.unique(host(step(ones)))) == {1.0}
    drop.rate = 0.5
    assert set(np.unique(host(step(ones)))) == {0.0, 2.0}

    assert step.trace_count == 2
    assert any("rate" in t and "0.5" in t and "0.0" in t for t in step.ledger[-1].changes)


def test_the_rate_of_a_dropout_layer_in_a_trainers_model() -> None:
    drop = layers.Dropout(0.5, seed=1)
    ones = keras.initializers.Ones()
    model = keras.Sequential([keras.Input((8,)), drop, layers.Dense(1, kernel_initializer=ones)])
    trainer = ts.Trainer(model, keras.optimizers.SGD(0.0), "mae")
    x, y = np.ones((4, 8), "float32"), np.full((4, 1), 100.0, "float32")

    losses = {float(trainer.train_on_batch(x, y)["loss"]) for _ in range(4)}
    assert len(losses) > 1
    drop.rate = 0.0
    assert {float(trainer.train_on_batch(x, y)["loss"]) for _ in range(2)} == {92.0}
    assert trainer.trace_count == 2
    assert any("rate" in t for t in trainer.ledger[-1].changes)


def test_a_plain_number_of_an_optimizer() -> None:
    v = keras.Variable(np.float32(0))
    optimizer = keras.optimizers.SGD(1.0)

    @ts.function
    def step(x: Any) -> Any:
        optimizer.apply([ts.grad(lambda: v * x, [v])()[0]], [v])
        return v.value

    assert float(step(4.0)) == -4
    optimizer.clipvalue = 1.0
    with heard(ts.StaleCaptureWarning) as found:
        got = float(step(4.0))
    assert got == -5 or any("clipvalue" in str(w.message) for w in found)


# ------------------------------------------------------------------ a Trainer


def small(*extra: Any) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *extra, layers.Dense(1)])


def scaled_loss(y: Any, p: Any) -> Any:
    return GAIN * ops.mean(ops.abs(y - p * 0), axis=-1)


class Scaled(keras.losses.Loss):
    """A user's loss with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = OLD

    def call(self, y: Any, p: Any) -> Any:
        return self.gain * ops.mean(ops.abs(y - p * 0), axis=-1)


class ScaledMean(keras.metrics.Mean):
    """A user's metric with a number."""

    def __init__(self) -> None:
        super().__init__(name="scaled")
        self.gain = OLD

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return super().update_state(ops.abs(y) * self.gain)


def loss_function(**options: Any) -> tuple[ts.Trainer, Callable[[float], None], str, str]:
    trainer = ts.Trainer(small(), keras.optimizers.SGD(0.0), scaled_loss, **options)
    return trainer, lambda v: put(GAIN=v), "loss", "GAIN"


def loss_object(**options: Any) -> tuple[ts.Trainer, Callable[[float], None], str, str]:
    loss = Scaled()
    trainer = ts.Trainer(small(), keras.optimizers.SGD(0.0), loss, **options)
    return trainer, lambda v: setattr(loss, "gain", v), "loss", "gain"


def metric(**options: Any) -> tuple[ts.Trainer, Callable[[float], None], str, str]:
    mean = ScaledMean()
    trainer = ts.Trainer(small(), keras.optimizers.SGD(0.0), "mse", metrics=[mean], **options)
    return trainer, lambda v: setattr(mean, "gain", v), "scaled", "gain"


def metric_function(**options: Any) -> tuple[ts.Trainer, Callable[[float], None], str, str]:
    trainer = ts.Trainer(
        small(), keras.optimizers.SGD(0.0), "mse", metrics=[scaled_loss], **options
    )
    return trainer, lambda v: put(GAIN=v), "scaled_loss", "GAIN"


def layer(**options: Any) -> tuple[ts.Trainer, Callable[[float], None], str, str]:
    factor = Factor()
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(1, use_bias=False, kernel_initializer="ones"), factor]
    )
    trainer = ts.Trainer(
        model, keras.optimizers.SGD(0.0), lambda y, p: ops.mean(ops.abs(p), axis=-1), **options
    )
    return trainer, lambda v: setattr(factor, "factor", v), "loss", "factor"


PARTS = pytest.mark.parametrize(
    "part", [loss_function, loss_object, metric, metric_function, layer]
)


@PARTS
def test_the_parts_of_a_trainer_are_watched(part: Any) -> None:
    trainer, change, log, name = part()

    def call() -> list[float]:
        return [
            float(trainer.train_on_batch(X, Y)[log]),
            float(trainer.train_on_batch(X, Y)[log]),
            float(trainer.test_on_batch(X, Y)[log]),
        ]

    with quiet():
        first = call()
        call()
    assert trainer.trace_count == 2
    change(NEW)
    with quiet():
        second = call()
    np.testing.assert_allclose(second, np.array(first) * NEW / OLD, rtol=1e-5)
    assert trainer.trace_count == 4
    for entry in list(trainer.ledger)[2:]:
        assert any(name in t and str(OLD) in t and str(NEW) in t for t in entry.changes)
    change(OLD)
    np.testing.assert_allclose(call(), first, rtol=1e-5)
    assert trainer.trace_count == 4


@PARTS
def test_the_parts_of_a_trainer_raise_if_asked_for(part: Any) -> None:
    trainer, change, _, name = part(captures="raise")
    trainer.train_on_batch(X, Y)
    before = everything(trainer)

    change(NEW)
    with pytest.raises(ts.StaleCaptureError, match=name):
        trainer.train_on_batch(X, Y)
    assert_same(everything(trainer), before, 0, 0)
    change(OLD)
    trainer.train_on_batch(X, Y)
    assert trainer.trace_count == 1


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_a_trainer_warns_or_ignores_if_asked_for(policy: str) -> None:
    trainer, change, log, name = loss_object(captures=policy)
    first = float(trainer.train_on_batch(X, Y)[log])

    change(NEW)
    with heard(ts.StaleCaptureWarning) as found:
        got = [float(trainer.train_on_batch(X, Y)[log]) for _ in range(3)]

    np.testing.assert_allclose(got, first, rtol=1e-6)
    assert [name in str(w.message) for w in found] == ([True] if policy == "warn" else [])
    assert trainer.trace_count == 1


def test_what_a_callback_changes_takes_effect_in_the_next_epoch() -> None:
    loss = Scaled()
    trainer = ts.Trainer(small(), keras.optimizers.SGD(0.0), loss)

    class Later(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            loss.gain = NEW if epoch == 0 else OLD

    history = trainer.fit(X, Y, epochs=4, batch_size=2, callbacks=[Later()], progress=False)

    got = np.array(history.history["loss"])
    np.testing.assert_allclose(got / got[0], [1, NEW / OLD, 1, 1], rtol=1e-5)
    assert trainer.trace_count == 2


# ------------------------------------------------------------------ nothing changed: one trace


@pytest.mark.slow
def test_many_steps_that_read_many_things_are_one_trace() -> None:
    config = {"loss": {"alpha": OLD}, "sizes": [3, 1], "names": ("a", "b")}
    table = np.arange(3, dtype="float32")
    large = np.ones(262_144, "float32")
    settings = types.SimpleNamespace(alpha=OLD, mode="mean", limit=None, inner=Factor())
    model = small(layers.BatchNormalization(), layers.Dropout(0.3, seed=1), Factor())
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10))
    mae = keras.metrics.MeanAbsoluteError()

    def step(x: Any, y: Any) -> Any:
        def loss_of() -> Any:
            p = model(ops.add(x * settings.alpha, table), training=True)
            mae.update_state(y, p)
            return getattr(ops, settings.mode)((y - p) ** 2) * config["loss"]["alpha"] * GAIN

        value, grads = ts.value_and_grad(loss_of, model.trainable_variables)()
        if settings.limit is None and len(config["sizes"]) == 2:
            optimizer.apply(grads, model.trainable_variables)
        for _ in config["names"]:
            value = settings.inner(value) * ops.mean(large)
        return value

    for policy in ("retrace", "raise", "warn"):
        compiled = ts.function(step, captures=policy)
        with quiet():
            for _ in range(10):
                compiled(X, Y)
        assert compiled.trace_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["retrace", "raise"])
def test_a_whole_training_is_one_trace_of_each_step(policy: str) -> None:
    model = keras.Sequential(
        [
            layers.Dense(4, "relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )
    trainer = ts.Trainer(model, "adam", "mse", metrics=["mae"], captures=policy, clip_norm=1.0)

    with quiet():
        trainer.fit(
            X,
            Y,
            validation_data=(X, Y),
            epochs=4,
            batch_size=4,
            progress=False,
            callbacks=[keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=10.0)],
        )
        trainer.optimizer.learning_rate = 0.01
        trainer.clip_norm = 0.5
        trainer.train_on_batch(X, Y)
        trainer.test_on_batch(X, Y)

    assert trainer.trace_count == 2


class Counting:
    """Has a number that the step reads and others that change."""

    def __init__(self) -> None:
        self.alpha = OLD
        self.calls = 0
        self.history: list[float] = []
        self.table = {"alpha": OLD, "calls": 0}
        self.pair = [OLD, 0]

    @functools.cached_property
    def slow(self) -> float:
        return OLD

    @property
    def made(self) -> np.ndarray:
        return np.full(2, OLD, "float32")

    def note(self, value: float) -> None:
        self.calls += 1
        self.history.append(value)
        self.table["calls"] += 1
        self.table[f"at {self.calls}"] = self.calls
        self.pair[1] += 1
        self.later = self.calls


OTHERS: dict[str, Callable[[Counting, Any], Any]] = {
    "other attributes": lambda c, x: x * c.alpha,
    "other entries of a dict": lambda c, x: x * c.table["alpha"],
    "other elements of a list": lambda c, x: x * c.pair[0],
    "a property that makes a new array": lambda c, x: x * ops.max(c.made),
    "a property that is cached": lambda c, x: x * c.slow,
    "a method": lambda c, x: (x * c.alpha, c.note)[0],
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_the_step_did_not_read_may_change(what: str) -> None:
    counting = Counting()
    read = OTHERS[what]
    step = ts.function(lambda x: read(counting, x), captures="raise")

    with quiet():
        for _ in range(5):
            counting.note(float(step(1.0)))

    assert counting.history == [OLD] * 5
    assert step.trace_count == 1


def test_self_may_change_where_the_method_does_not_look() -> None:
    class Learner(Counting):
        @ts.function
        def step(self, x: Any) -> Any:
            return x * self.alpha

    learner = Learner()
    with quiet():
        for _ in range(5):
            learner.note(float(learner.step(1.0)))

    assert Learner.step.trace_count == 1


class Difficult:
    """Compares with nothing."""

    alpha = OLD

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


UNCHANGED: dict[str, Callable[[], Any]] = {
    "not a number": lambda: float("nan"),
    "not a number of numpy": lambda: np.float32("nan"),
    "an array with nan": lambda: np.array([np.nan, 1.0], "float32"),
    "an object that refuses comparison": Difficult,
    "a series of pandas": lambda: pytest.importorskip("pandas").Series([1.0, 2.0]),
    "a list with an array": lambda: [np.ones(2, "float32")],
    "a generator of numpy": lambda: np.random.default_rng(0),
}


@pytest.mark.parametrize("what", UNCHANGED)
@pytest.mark.parametrize("policy", ["retrace", "raise"])
def test_a_value_that_is_hard_to_compare_and_did_not_change(what: str, policy: str) -> None:
    put(GAIN=UNCHANGED[what]())

    @ts.function(captures=policy)
    def step(x: Any) -> Any:
        thing = GAIN
        if isinstance(thing, float | np.floating | np.ndarray):
            return x * ops.max(thing)
        return x * getattr(thing, "alpha", OLD)

    with quiet():
        for _ in range(4):
            step(1.0)

    assert step.trace_count == 1


def test_a_value_that_went_and_came_back_between_calls_did_not_change() -> None:
    step = ts.function(lambda x: x * GAIN * CONFIG["alpha"], captures="raise")

    with quiet():
        for _ in range(3):
            step(1.0)
            put(GAIN=NEW)
            CONFIG["alpha"] = NEW
            put(GAIN=OLD)
            CONFIG["alpha"] = OLD

    assert step.trace_count == 1


class Writing:
    """Changes, while it is traced, what it has read."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[Any] = []
        self.table: dict[str, int] = {"n": 0}


WRITES: dict[str, Callable[[Writing], Any]] = {
    "an attribute": lambda w: setattr(w, "calls", w.calls + 1),
    "a list": lambda w: w.seen.append(len(w.seen)),
    "a dict": lambda w: w.table.update(n=w.table["n"] + 1),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_the_trace_itself_changed_has_not_changed_since(what: str) -> None:
    writing = Writing()

    @ts.function(side_effects="allow")
    def step(x: Any) -> Any:
        WRITES[what](writing)
        return x + 1

    with quiet():
        for _ in range(5):
            assert float(step(1.0)) == 2

    assert step.trace_count == 1


def test_variables_are_state_and_never_stale() -> None:
    scale = keras.Variable(np.float32(OLD))
    seeds = keras.random.SeedGenerator(1)
    holder = types.SimpleNamespace(v=scale, s=seeds)
    step = ts.function(
        lambda x: x * holder.v + 0 * keras.random.uniform((), seed=holder.s), captures="raise"
    )

    for value in (OLD, NEW, NEWER):
        scale.assign(value)
        assert float(step(1.0)) == value

    assert step.trace_count == 1


def test_objects_that_a_step_reads_live_no_longer_than_their_owners() -> None:
    """Watching a value does not keep its owner alive."""
    import gc
    import weakref

    class Settings:
        def __init__(self, alpha: float) -> None:
            self.alpha = alpha

    step = ts.function(lambda cfg, x: x * cfg.alpha)
    gone = []
    for i in range(3):
        cfg = Settings(float(i))
        assert float(step(cfg, 1.0)) == i
        gone.append(weakref.ref(cfg))
    del cfg
    gc.collect()

    assert [r() for r in gone] == [None] * 3


def test_a_library_below_the_step_may_change_its_own_values(modules: Modules) -> None:
    """A counter and a cache that a library keeps for itself do not retrace the user's step."""
    library = modules.write(
        "stale_library",
        "CALLS = 0\nCACHE = {}\n\n\n"
        "def times(x, n):\n"
        "    global CALLS\n"
        "    CALLS += 1\n"
        "    return x * CACHE.setdefault(n, n)\n",
        under="lib/python3/site-packages",
    )
    step = ts.function(lambda x: library.times(x, 2.0))

    with quiet():
        for i in range(4):
            step(1.0)
            library.times(1.0, float(i))

    assert step.trace_count == 1


def test_state_is_unchanged_after_the_error_of_a_whole_step() -> None:
    model, optimizer = small(), keras.optimizers.Adam(0.1)
    metric = keras.metrics.Mean()

    @ts.function(captures="raise")
    def step(x: Any, y: Any) -> Any:
        loss, grads = ts.value_and_grad(
            lambda: GAIN * ops.mean((model(x) - y) ** 2), model.trainable_variables
        )()
        optimizer.apply(grads, model.trainable_variables)
        metric.update_state(loss)
        return loss

    step(X, Y)
    state = [*model.variables, *optimizer.variables, *metric.variables]
    before = values_of(state)
    put(GAIN=NEW)
    for _ in range(2):
        with pytest.raises(ts.StaleCaptureError):
            step(X, Y)
    for got, wanted in zip(values_of(state), before, strict=True):
        assert got.tobytes() == wanted.tobytes()


COUNT = 0
NOTED: list[tuple[int, float]] = []
SEEN: list[Any] = []


def note(value: Any) -> None:
    NOTED.append((COUNT, float(value)))


def test_what_a_callback_reads_is_live_and_costs_no_trace() -> None:
    @ts.function(side_effects="raise")
    def step(x: Any) -> Any:
        def local(value: Any) -> None:
            note(value)

        ts.callback(note, x)
        ts.callback(local, x)
        ts.callback(lambda value: NOTED.append((COUNT, float(value))), x)
        ts.callback(SEEN.append, x)
        return x * 1

    NOTED.clear()
    SEEN.clear()
    for count in range(3):
        put(COUNT=count)
        step(2.0)

    assert [n for n, _ in NOTED] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [float(value) for value in SEEN] == [2.0, 2.0, 2.0]
    assert step.trace_count == 1


class Part:
    """An object with two numbers, in a list or behind a name."""

    def __init__(self, alpha: float = OLD) -> None:
        self.alpha, self.other = alpha, 1.0

    def reset(self) -> None:
        self.alpha = OLD


def scaled(x: Any, part: Any) -> Any:
    return x * part.alpha


def hidden_parameter(x: Any, part: Any) -> Any:
    [part.reset() for part in [Part(), Part()]]
    return x * part.alpha


def bound_twice_inside(x: Any, part: Any) -> Any:
    c = part
    q = [c for c in ((1.0,),) for c in c]
    return x * c.alpha * q[0]


async def one() -> Any:
    yield 1.0


async def asynchronous(x: Any, part: Any) -> Any:
    return scaled(sum([each async for each in one()]) * x, part)


def awaited(x: Any, part: Any) -> Any:
    try:
        asynchronous(x, part).send(None)
    except StopIteration as ended:
        return ended.value


def nested(x: Any, part: Any) -> Any:
    def inner(p: Any) -> Any:
        return x * p.alpha

    return inner(p=part)


def made_in_a_comprehension(x: Any, part: Any) -> Any:
    makers = [(lambda: x * c.alpha) for c in PARTS]
    return sum(each() for each in makers)


PARTS: list[Part] = []
# Each uses the attribute of a part, which is the only one in `PARTS` too.
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "a comprehension's variable that hides a parameter": hidden_parameter,
    "a name that a comprehension binds twice": bound_twice_inside,
    "an asynchronous comprehension": awaited,
    "a list comprehension": lambda x, part: x * sum([c.other * c.alpha for c in PARTS]),
    "a generator expression": lambda x, part: x * sum(c.alpha for c in PARTS),
    "a nested comprehension": lambda x, part: x * sum([c.alpha for _ in (1,) for c in PARTS]),
    "a loop that calls": lambda x, part: sum([scaled(x, c) for c in PARTS]),
    "one of three by or": lambda x, part: x * (None or {} or part).alpha,
    "one of three by if": lambda x, part: x * (CONFIG if MODEL else part if PARTS else GAIN).alpha,
    "one of two as an argument": lambda x, part: scaled(x, part if PARTS else CONFIG),
    "one of two by keyword": lambda x, part: scaled(x, part=part if PARTS else CONFIG),
    "a nested function by keyword": nested,
    "a lambda in a comprehension": made_in_a_comprehension,
}


@pytest.mark.parametrize("form", FORMS)
def test_an_attribute_is_found_in_every_form_of_code(form: str) -> None:
    part, fn = Part(), FORMS[form]
    PARTS[:] = [part]
    step = ts.function(lambda x: fn(x, part))
    assert [float(step(1.0)) for _ in range(2)] == [OLD] * 2

    part.alpha = NEW

    assert float(step(1.0)) == NEW


@pytest.mark.parametrize("name", ["item", "chain", "argument", "super"])
def test_names_alone_find_as_much(name: str, unknown_python: None) -> None:
    part = Part()
    box = types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace(c=part)))
    table = {"part": part}

    class Base:
        def run(self, x: Any) -> Any:
            return x * self.part.alpha

    class Derived(Base):
        part = box.a.b.c

        def run(self, x: Any) -> Any:
            return super().run(x)

    derived = Derived()
    steps: dict[str, Callable[[Any], Any]] = {
        "item": lambda x: x * table["part"].alpha,
        "chain": lambda x: x * box.a.b.c.alpha,
        "argument": lambda x: scaled(x, box.a.b.c),
        "super": lambda x: derived.run(x),
    }
    step = ts.function(steps[name])
    assert [float(step(1.0)) for _ in range(2)] == [OLD] * 2

    part.alpha = NEW

    assert float(step(1.0)) == NEW
