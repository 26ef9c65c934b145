"""Whatever comes in: a call runs, with the right numbers, or raises a documented error and changes nothing.

`TRAINSTEP_FUZZ` is the number of calls of each test, 300 unless told; 10000 is the full run. With `-s`
a table of the outcomes is printed. The examples are the same in every run.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, configuration, given, settings
from hypothesis import strategies as st
from keras import layers, ops

import trainstep as ts
from tests.helpers import host

CALLS = int(os.environ.get("TRAINSTEP_FUZZ", "300"))
pytestmark = pytest.mark.timeout(max(600, CALLS))

FUZZ = settings(
    max_examples=CALLS,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def no_folder(tmp_path: Any) -> None:
    """Hypothesis keeps its files with the other temporary ones."""
    configuration.set_hypothesis_home_dir(tmp_path)


# ------------------------------------------------------------------ what may come in


class Odd:
    """Nothing that a step could use."""

    def __repr__(self) -> str:
        return "Odd()"


class Raises:
    """Says that it is an array and is not."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("not an array after all")

    def __repr__(self) -> str:
        return "Raises()"


DTYPES = [
    "float32",
    "float64",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]
STRANGE = ["complex64", "complex128", "object", "U3", "S3", "datetime64[s]", "timedelta64[s]"]
numbers = st.sampled_from([0, 1, 2, 3, 5, 100, -1, -3, 0.5, -2.25])
sizes = st.sampled_from([2, 3])
odd_sizes = st.sampled_from([0, 1, 2, 3, 4])
huge = st.sampled_from(
    [2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400]
)
odd_numbers = st.sampled_from(
    [float("nan"), float("inf"), -float("inf"), 1e39, 1e300, -0.0, 5e-324]
)


@st.composite
def arrays(draw: Any, shape: tuple[int, ...], dtypes: Sequence[str] = DTYPES) -> np.ndarray:
    """Of a shape, with few different numbers, and now and then one that does not fit."""
    dtype = draw(st.sampled_from(dtypes))
    count = int(np.prod(shape))
    values = draw(st.lists(numbers, min_size=count, max_size=count))
    if values and draw(st.integers(0, 7)) == 5:
        values[draw(st.integers(0, count - 1))] = draw(st.one_of(odd_numbers, huge))
    plain = np.empty(count, dtype=object)
    plain[:] = values
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            array = plain.astype(dtype)
        except (OverflowError, ValueError, TypeError):
            array = np.array([int(abs(v) < 2) for v in values]).astype(dtype)
    return array.reshape(shape)


def dressed(array: np.ndarray, dress: str) -> Any:
    """The same numbers in what callers have."""
    if dress == "list":
        return array.tolist()
    if dress == "tuple":
        return tuple(array.tolist()) if array.ndim else array.item()
    if dress == "pandas" and array.ndim in (1, 2):
        return pd.Series(array) if array.ndim == 1 else pd.DataFrame(array)
    if dress == "tensor" and array.dtype.kind in "fiub" and array.dtype.name != "uint64":
        try:
            return ops.convert_to_tensor(array)
        except Exception:
            return array
    if dress == "fortran":
        return np.asfortranarray(array)
    if dress == "strided":
        return np.repeat(array, 2, axis=0)[::2] if array.ndim else array
    if dress == "big-endian" and array.dtype.kind in "fiu":
        return array.astype(array.dtype.newbyteorder(">"))
    if dress == "masked":
        return np.ma.masked_array(array)
    if dress == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


DRESSES = [
    *["array"] * 4,
    "list",
    "tuple",
    "pandas",
    "tensor",
    "fortran",
    "strided",
    "big-endian",
    "masked",
    "read-only",
]


@st.composite
def fitting(draw: Any, shape: Sequence[int | None], rows: int) -> Any:
    """The right shape, None being the rows, in any dress and dtype of numbers."""
    full = tuple(rows if n is None else n for n in shape)
    return dressed(draw(arrays(full)), draw(st.sampled_from(DRESSES)))


@st.composite
def misshapen(draw: Any) -> Any:
    """Any rank from 0 to 4, empty ones too, and dtypes that are no numbers."""
    shape = tuple(draw(st.lists(odd_sizes, max_size=4)))
    array = draw(arrays(shape, [*DTYPES, *STRANGE]))
    return dressed(array, draw(st.sampled_from(DRESSES)))


def things() -> Any:
    """What is no array at all; made anew each time."""
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: True,
        lambda: "text",
        lambda: "",
        lambda: b"bytes",
        lambda: 1 + 2j,
        lambda: ...,
        lambda: NotImplemented,
        lambda: Odd(),
        lambda: Odd,
        lambda: Raises(),
        lambda: len,
        lambda: lambda x: x,
        lambda: object(),
        lambda: {1, 2},
        lambda: frozenset({1.0}),
        lambda: range(3),
        lambda: slice(2),
        lambda: iter([1.0, 2.0]),
        lambda: (n for n in (1.0, 2.0)),
        lambda: decimal.Decimal("1.5"),
        lambda: fractions.Fraction(1, 3),
        lambda: memoryview(b"ab"),
        lambda: bytearray(b"ab"),
        lambda: np.dtype("float32"),
        lambda: np.float32,
        lambda: keras.KerasTensor((2, 2)),
        lambda: [[1.0, 2.0], [3.0]],
        lambda: [[], []],
        lambda: [None, None],
        lambda: [1.0, "a"],
        lambda: [[1.0, None], [2.0, 3.0]],
        lambda: np.array([[1.0, 2.0], [3.0]], dtype=object),
        lambda: np.array([np.ones(2), None], dtype=object),
        lambda: np.array([2**70, 1], dtype=object),
        lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
        lambda: pd.Series(["a", "b"]),
        lambda: pd.Series([1, None], dtype="Int64"),
        lambda: pd.Series([1.0, None]),
        lambda: pd.Series(["a", "b"], dtype="category"),
        lambda: pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}),
        lambda: pd.DataFrame(),
        lambda: pd.Timestamp("2020-01-01"),
        lambda: ts.Spec((2, 2)),
        lambda: keras.Variable(np.ones((2, 2), "float32")),
    ]
    return st.sampled_from(makers).map(lambda make: make())


def structures(leaf: Any) -> Any:
    """Lists, tuples and dicts of whatever, two deep."""
    keys = st.sampled_from(["w", "b", "x", 0, None, (1, 2)])
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.lists(inner, max_size=2).map(tuple),
            st.dictionaries(keys, inner, max_size=2),
            st.lists(inner, max_size=2).map(lambda v: collections.OrderedDict(enumerate(v))),
        ),
        max_leaves=3,
    )


anything = st.one_of(
    misshapen(),
    things(),
    huge,
    odd_numbers,
    numbers,
    structures(st.one_of(things(), misshapen(), numbers, huge)),
)


def mostly(good: Any) -> Any:
    """Seven in eight fit, so that one wrong argument often comes among right ones."""
    return st.integers(0, 7).flatmap(lambda n: anything if n == 5 else good)


def rarely(draw: Any) -> bool:
    """One in sixteen, and neither the first nor the last choice, which are drawn more often."""
    return bool(draw(st.integers(0, 15)) == 9)


# ------------------------------------------------------------------ what comes out


def shown(value: Any) -> str:
    text = repr(value)
    dtype = getattr(value, "dtype", None)
    return f"{type(value).__name__}({dtype}) {text}"[:200].replace("\n", " ")


@dataclass
class Outcomes:
    """How often what came out, and an example of each thing that must not."""

    name: str
    variables: Callable[[], list[Any]]
    reset: Callable[[], None]
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def state(self) -> list[tuple[str, Any, bytes]]:
        """All variables, bit for bit."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = [(v.path, np.asarray(keras.ops.convert_to_numpy(v))) for v in self.variables()]
        return [(path, value.shape, value.tobytes()) for path, value in values]

    def blame(self, what: str, call: str) -> None:
        self.counts[f"WRONG: {what}"] += 1
        self.wrong.setdefault(what, call)

    def watch(
        self,
        call: Callable[[], Any],
        text: Callable[[], str],
        arity: bool,
        check: Callable[[Any], str | None] = lambda result: None,
    ) -> None:
        """Makes a call. `arity` says that Python itself would refuse it; `check` looks at the result."""
        before = self.state()
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                result = call()
        except ts.TrainstepError as error:
            kind = type(error).__name__
            self.counts[kind] += 1
            if not str(error).strip():
                self.blame(f"{kind} without a word", text())
        except TypeError as error:
            if arity:
                self.counts["TypeError for the number of arguments"] += 1
            else:
                self.blame(f"TypeError: {last_line(error)}", text())
        except Exception as error:
            self.blame(f"{type(error).__name__}: {last_line(error)}", text())
        else:
            complaint = (
                "a wrong number of arguments was taken" if arity else self.look(check, result)
            )
            if complaint:
                self.blame(complaint, text())
            else:
                self.counts["ran"] += 1
            self.reset()
            return
        if self.state() != before:
            self.blame("the state is another after an error", text())
            self.reset()

    def look(self, check: Callable[[Any], str | None], result: Any) -> str | None:
        """What is wrong with the result of a call that ran."""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                return check(result)
            except Exception as error:
                return f"a result that cannot be read: {type(error).__name__}: {last_line(error)}"

    def table(self) -> str:
        total = sum(self.counts.values())
        rows = [f"{n:8d}  {what}" for what, n in self.counts.most_common()]
        return "\n".join([f"\n{self.name} on {keras.backend.backend()}: {total} calls", *rows])

    def judge(self) -> None:
        """Prints the table; fails if anything was wrong, or if too little happened."""
        print(self.table())
        examples = "\n".join(f"  {what}\n      {call}" for what, call in self.wrong.items())
        if self.wrong:
            pytest.fail(f"{len(self.wrong)} kinds of wrong outcomes:\n{examples}", pytrace=False)
        total = sum(self.counts.values())
        assert total >= 0.9 * CALLS
        assert self.counts["ran"] > 0.05 * total, "hardly a call that runs: nothing is tested"
        assert self.counts["ArgumentError"] > 0.05 * total, "hardly an error: nothing is tested"


def last_line(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = (str(error).splitlines() or [""])[0][:80]
    return f"{words} ({os.path.basename(place.filename)}:{place.lineno})"


# ------------------------------------------------------------------ a function with a signature


def as_numbers(value: Any) -> np.ndarray:
    return np.asarray(value).astype("float64")


def near(got: Any, wanted: np.ndarray) -> bool:
    if not np.isfinite(wanted).all() or np.abs(wanted).max(initial=0) > 1e30:
        return True  # overflow in float32 has no one right answer
    got = host(got)
    return got.shape == wanted.shape and bool(np.allclose(got, wanted, rtol=1e-3, atol=1e-3))


@pytest.mark.slow
def test_a_function_with_a_signature_takes_or_refuses_whatever_comes() -> None:
    weights = keras.Variable(np.ones((2,), "float32"), name="weights")
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([weights])
    metric = keras.metrics.Mean()
    seeds = keras.random.SeedGenerator(1)

    @ts.function(
        signature=[
            ts.Spec((None, 2)),
            ts.Spec((None,), "int32"),
            {"w": ts.Spec((2,)), "b": ts.Spec(())},
        ]
    )
    def step(x: Any, ids: Any, extra: Any) -> Any:
        noise = keras.random.uniform((2,), seed=seeds)
        grads = ts.grad(lambda: ops.sum(weights * (extra["w"] + noise)), [weights])()
        optimizer.apply(grads, [weights])
        metric.update_state(ops.sum(x) * extra["b"])
        return {
            "x": ops.sum(x, axis=0),
            "ids": ids,
            "w": extra["w"] * 2,
            "b": extra["b"] * 2,
        }

    def variables() -> list[Any]:
        return [weights, *optimizer.variables, *metric.variables, seeds.state]

    start = [np.array(host(v), copy=True) for v in variables()]

    def reset() -> None:
        for v, value in zip(variables(), start, strict=True):
            v.assign(value)

    outcomes = Outcomes("a function with a signature", variables, reset)

    @st.composite
    def calls(draw: Any) -> tuple[list[Any], dict[str, Any]]:
        rows = draw(sizes)
        inner = {
            "w": draw(mostly(fitting((2,), rows))),
            "b": draw(mostly(st.one_of(fitting((), rows), numbers))),
        }
        if rarely(draw):
            inner.pop(draw(st.sampled_from(["w", "b"])))
        elif rarely(draw):
            inner["more"] = draw(anything)
        args = [
            draw(mostly(fitting((None, 2), rows))),
            draw(mostly(fitting((None,), rows))),
            draw(mostly(st.just(inner))),
        ]
        names = ["x", "ids", "extra"]
        keep = draw(st.integers(0, 3))
        kwargs = dict(zip(names[keep:], args[keep:], strict=True))
        args = args[:keep]
        shape = draw(st.integers(0, 40))
        if shape == 17 and kwargs:
            kwargs.pop(next(iter(kwargs)))
        elif shape == 18:
            kwargs["other"] = 1.0
        elif shape == 19:
            args = [*args, *range(4)]
        return args, kwargs

    def check(args: list[Any], kwargs: dict[str, Any]) -> Callable[[Any], str | None]:
        def look(result: Any) -> str | None:
            given_ = dict(zip(["x", "ids", "extra"], args, strict=False)) | kwargs
            x, ids = as_numbers(given_["x"]), as_numbers(given_["ids"])
            w, b = as_numbers(given_["extra"]["w"]), as_numbers(given_["extra"]["b"])
            if x.ndim != 2 or x.shape[1] != 2 or ids.ndim != 1 or w.shape != (2,) or b.shape != ():
                return "a shape ran that the signature does not have"
            if not np.array_equal(host(result["ids"]).astype("float64"), ids):
                return "integers came out otherwise than they went in"
            wanted = {"x": x.sum(axis=0), "w": w * 2, "b": b * 2}
            bad = [name for name, value in wanted.items() if not near(result[name], value)]
            return f"wrong numbers for {bad}" if bad else None

        return look

    def text(args: list[Any], kwargs: dict[str, Any]) -> Callable[[], str]:
        parts = lambda: [*map(shown, args), *(f"{k}={shown(v)}" for k, v in kwargs.items())]  # noqa: E731
        return lambda: "; ".join(parts())

    @FUZZ
    @given(calls())
    def run(call: tuple[list[Any], dict[str, Any]]) -> None:
        args, kwargs = call
        named = ["x", "ids", "extra"]
        taken = named[: len(args)]
        fits = len(args) <= 3 and sorted([*taken, *kwargs]) == sorted(named)
        outcomes.watch(
            lambda: step(*args, **kwargs),
            text(args, kwargs),
            arity=not fits,
            check=check(args, kwargs),
        )

    step(np.ones((2, 2)), np.ones(2, "int32"), {"w": np.ones(2), "b": np.float32(1)})
    reset()
    run()
    outcomes.judge()
    got = step(np.ones((3, 2)), [1, 2, 3], {"w": [1, 2], "b": 3})  # and all goes on
    np.testing.assert_array_equal(host(got["x"]), [3, 3])
    assert step.trace_count <= 3


# ------------------------------------------------------------------ a Trainer


@pytest.mark.slow
def test_a_trainer_takes_or_refuses_whatever_comes() -> None:
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(2, "relu", kernel_initializer="ones"),
            layers.BatchNormalization(),
            layers.Dropout(0.1, seed=1),
            layers.Dense(1),
        ]
    )
    trainer = ts.Trainer(model, keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
    trainer.train_on_batch(x, y)
    trainer.test_on_batch(x, y)
    trainer.predict_on_batch(x)

    def variables() -> list[Any]:
        metrics = [v for m in trainer.metrics for v in m.variables]
        return [*model.variables, *trainer.optimizer.variables, *metrics]

    start = [np.array(host(v), copy=True) for v in variables()]

    def reset() -> None:
        for v, value in zip(variables(), start, strict=True):
            v.assign(value)

    outcomes = Outcomes("a Trainer", variables, reset)
    parameters = {
        "train_on_batch": ["x", "y", "sample_weight"],
        "test_on_batch": ["x", "y", "sample_weight"],
        "predict_on_batch": ["x"],
    }

    @st.composite
    def calls(draw: Any) -> tuple[str, list[Any], dict[str, Any], bool]:
        rows = draw(sizes)
        method = draw(
            st.sampled_from([*["train_on_batch"] * 3, "test_on_batch", "predict_on_batch"])
        )
        values = {
            "x": draw(mostly(fitting((None, 2), rows))),
            "y": draw(mostly(fitting((None, 1), rows))),
        }
        if method != "predict_on_batch" and draw(st.booleans()):
            values["sample_weight"] = draw(mostly(fitting((None,), rows)))
        if method == "train_on_batch" and rarely(draw):
            values["class_weight"] = draw(
                st.one_of(anything, st.just({0: 1.0, 1: 2.0}), st.just({0: "a"}))
            )
        values = {k: v for k, v in values.items() if method != "predict_on_batch" or k == "x"}
        keep = draw(st.integers(0, len(parameters[method])))
        args, kwargs = [], dict(values)
        for name in parameters[method][:keep]:
            if name not in kwargs:
                break
            args.append(kwargs.pop(name))
        wrong = False
        shape = draw(st.integers(0, 40))
        if shape == 17:
            kwargs["other"] = 1.0
            wrong = True
        elif shape == 18:
            args = [*args, *range(6)]
            wrong = True
        elif shape == 19 and "x" in kwargs:
            kwargs.pop("x")
            wrong = True
        return method, args, kwargs, wrong

    def predicted(x: np.ndarray) -> np.ndarray:
        """What the model gives, computed with NumPy from its weights."""
        kernel, bias, gamma, beta, mean, variance, out, shift = weights
        x = np.maximum(x @ kernel + bias, 0)
        x = (x - mean) / np.sqrt(variance + 1e-3) * gamma + beta
        return x @ out + shift

    weights = [np.array(host(v), "float64") for v in model.weights if "seed" not in v.path]

    def check(method: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[[Any], str | None]:
        def look(result: Any) -> str | None:
            came = dict(zip(parameters[method], args, strict=False)) | kwargs
            if method == "predict_on_batch":
                x = as_numbers(came["x"])
                return None if near(result, predicted(x)) else "wrong predictions"
            missing = {"loss", "mae"} - set(result)
            [float(v) for v in result.values()]  # all of them can be read
            if missing:
                return f"no {missing} among the logs"
            weight = came.get("sample_weight")
            weight = np.ones(1) if weight is None else as_numbers(weight)
            x, y = as_numbers(came["x"]), as_numbers(came["y"])
            if method == "train_on_batch" or y.shape != (len(x), 1) or weight.ndim != 1:
                return None
            wanted = np.mean((y - predicted(x)) ** 2 * weight[:, None])
            return None if near(result["loss"], wanted) else "a wrong loss"

        return look

    @FUZZ
    @given(calls())
    def run(call: tuple[str, list[Any], dict[str, Any], bool]) -> None:
        method, args, kwargs, wrong = call
        outcomes.watch(
            lambda: getattr(trainer, method)(*args, **kwargs),
            lambda: "; ".join(
                [method, *map(shown, args), *(f"{k}={shown(v)}" for k, v in kwargs.items())]
            ),
            arity=wrong,
            check=check(method, args, kwargs),
        )

    run()
    outcomes.judge()
    wanted = trainer.train_on_batch(x, y)["loss"]  # and all goes on
    assert np.isfinite(wanted)
