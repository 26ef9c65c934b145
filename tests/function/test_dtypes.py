"""One dtype for each argument: what is cast, what is an error, and what costs no trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal, values_of
from tests.reports import quiet
from tests.twins import everything

NUMBERS = np.array([[0, 1], [1, 0], [1, 1]])  # the same in every dtype


def dtype_of(x: Any) -> str:
    return keras.backend.standardize_dtype(x.dtype)


def tensor(x: Any, dtype: str) -> Any:
    return ops.convert_to_tensor(np.asarray(x, dtype))


def value_or_error(step: Any, *args: Any) -> Any:
    try:
        return step(*args)
    except ts.ArgumentError as error:
        return error


# What callers have, and all may bring to an argument of floats.
CALLERS: dict[str, Callable[[np.ndarray], Any]] = {
    "float32": lambda a: a.astype("float32"),
    "float64": lambda a: a.astype("float64"),
    "float16": lambda a: a.astype("float16"),
    "int64": lambda a: a.astype("int64"),
    "int32": lambda a: a.astype("int32"),
    "int8": lambda a: a.astype("int8"),
    "uint8": lambda a: a.astype("uint8"),
    "bool": lambda a: a.astype("bool"),
    "list of floats": lambda a: a.astype("float64").tolist(),
    "list of ints": lambda a: a.astype("int64").tolist(),
    "list of bools": lambda a: a.astype("bool").tolist(),
    "data frame": lambda a: pd.DataFrame(a.astype("float64")),
    "data frame of ints": lambda a: pd.DataFrame(a.astype("int64")),
    "float tensor": lambda a: tensor(a, "float32"),
    "half tensor": lambda a: tensor(a, "float16"),
    "int tensor": lambda a: tensor(a, "int32"),
    "bool tensor": lambda a: tensor(a, "bool"),
    "fortran order": lambda a: np.asfortranarray(a.astype("float64")),
    "read-only": lambda a: np.broadcast_to(a.astype("float32"), a.shape),
    "big-endian": lambda a: a.astype(">f4"),
}
WHOLE = [
    name
    for name in CALLERS
    if ("int" in name or "bool" in name) and "float" not in name
]  # fmt: skip
FLOATS = [name for name in CALLERS if name not in WHOLE]


def floats(x: Any) -> Any:
    """Gives the numbers, and fails unless they are floats."""
    assert dtype_of(x) == "float32"
    return x * 2


def whole(x: Any) -> Any:
    """Gives the numbers, and fails unless they are 32-bit integers."""
    assert dtype_of(x) == "int32"
    return x * 2


# ------------------------------------------------------------------ floats


@pytest.mark.parametrize("first", ["float32", "float64", "list of floats", "float tensor"])
def test_all_callers_of_a_function_share_the_program_of_the_first_float_call(first: str) -> None:
    step = ts.function(floats)

    for name in [first, *CALLERS]:
        np.testing.assert_array_equal(host(step(CALLERS[name](NUMBERS))), NUMBERS * 2.0, name)
        assert step.trace_count == 1, name


def test_all_callers_of_a_function_share_the_program_of_its_signature() -> None:
    step = ts.function(floats, signature=[ts.Spec((3, 2))])

    for name in reversed(CALLERS):
        np.testing.assert_array_equal(host(step(CALLERS[name](NUMBERS))), NUMBERS * 2.0, name)
        assert step.trace_count == 1, name


def test_a_series_of_pandas_is_a_vector() -> None:
    step = ts.function(lambda x: x * 2)

    for values in ([0.5, 1.5], [1, 2], [True, False]):
        got = host(step(pd.Series(values, name="target", index=[7, 3])))
        np.testing.assert_array_equal(got, np.array(values) * 2.0)
    assert step.trace_count == 1


def test_leaves_of_a_structure_have_dtypes_of_their_own() -> None:
    def step(batch: Any) -> Any:
        assert dtype_of(batch["x"]) == "float32"
        assert dtype_of(batch["ids"][0]) == "int32"
        return ops.sum(batch["x"]) + ops.cast(ops.sum(batch["ids"][0]), "float32")

    step = ts.function(step)
    callers = itertools.product(
        (np.float32([1, 2]), np.float64([1, 2]), [1, 2], [1.0, 2.0], np.array([1, 2])),
        (np.int32([3]), np.int64([3]), [3], np.uint8([3])),
    )
    for x, ids in callers:
        assert float(step({"x": x, "ids": (ids,)})) == 6
    assert step.trace_count == 1
    with pytest.raises(ts.ArgumentError, match="ids"):
        step({"x": np.float32([1, 2]), "ids": (np.float32([3.5]),)})


def test_keywords_and_positions_share_the_dtype() -> None:
    step = ts.function(lambda x, y: x - y)
    two = np.float32([2, 2])

    for y in (two, two.astype("int64"), [2, 2]):
        np.testing.assert_array_equal(host(step(two, y)), [0, 0])
        np.testing.assert_array_equal(host(step(y=y, x=two)), [0, 0])
    assert step.trace_count == 1


def test_two_functions_have_dtypes_of_their_own() -> None:
    one, two = ts.function(lambda x: x * 2), ts.function(lambda x: x * 2)

    assert dtype_of(one(np.float32([1]))) == "float32"
    assert dtype_of(two(np.int32([1]))) == "int32"
    assert dtype_of(one(np.int32([1]))) == "float32"


def test_other_shapes_have_the_dtype_of_the_first_call() -> None:
    step = ts.function(floats, shapes="exact")

    step(np.ones(2, "float32"))
    np.testing.assert_array_equal(host(step(np.array([1, 2, 3]))), [2, 4, 6])
    np.testing.assert_array_equal(host(step([1.0, 2.0, 3.0])), [2, 4, 6])
    assert step.trace_count == 2
    assert all("float32" in e.signature and "int" not in e.signature for e in step.ledger)


# ------------------------------------------------------------------ integers


@pytest.fixture
def counted() -> Iterator[tuple[Any, keras.Variable]]:
    """A step that has met int32 once, and counts its runs."""
    runs = keras.Variable(0.0)

    def step(ids: Any) -> Any:
        runs.assign_add(1.0)
        return whole(ids)

    compiled = ts.function(step)
    compiled(NUMBERS.astype("int32"))
    yield compiled, runs
    assert compiled.trace_count == 1
    np.testing.assert_array_equal(host(compiled(NUMBERS.astype("int32"))), NUMBERS * 2)
    assert compiled.trace_count == 1


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_share_the_program_of_the_first_int_call(name: str, counted: Any) -> None:
    step, _ = counted

    np.testing.assert_array_equal(host(step(CALLERS[name](NUMBERS))), NUMBERS * 2)


@pytest.mark.parametrize("numbers", [NUMBERS, NUMBERS + 0.5], ids=["whole", "broken"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_for_an_integer_argument_are_an_error(
    name: str, numbers: np.ndarray, counted: Any
) -> None:
    step, runs = counted

    for _ in range(2):
        with pytest.raises(ts.ArgumentError) as caught:
            step(CALLERS[name](numbers))
        assert "`ids`" in str(caught.value)
        assert "int32" in str(caught.value)
        assert "float" in str(caught.value)
        assert caught.value.argument == "ids"
    assert float(runs.value) == 1


EXTREMES = [2**31 - 1, -(2**31), 0, -1]
BEYOND: dict[str, Any] = {
    "above": np.array([0, 2**31], "int64"),
    "below": np.array([-(2**31) - 1, 0], "int64"),
    "far": np.array([2**62, 0], "int64"),
    "last": np.array([[0, 0], [0, 2**40]], "int64"),
    "uint32": np.array([2**31, 0], "uint32"),
    "uint64": np.array([2**63, 0], "uint64"),
    "list": [0, 2**31],
    "longer list": [2**70, 0],
    "series": pd.Series([0, 2**40]),
}


def test_int64_within_int32_is_cast_without_loss() -> None:
    step = ts.function(lambda ids: ids + 0)
    step(np.zeros(4, "int32"))

    for make in (np.int64, list):
        numbers = np.array(EXTREMES, "int64") if make is np.int64 else list(EXTREMES)
        got = step(numbers)
        assert [int(n) for n in host(got)] == EXTREMES
    assert step.trace_count == 1


@pytest.mark.parametrize("where", ["first call", "signature"])
@pytest.mark.parametrize("name", BEYOND)
def test_int64_beyond_int32_is_an_error(name: str, where: str) -> None:
    came = BEYOND[name]
    shape = np.shape(came)
    runs = keras.Variable(0.0)

    def step(ids: Any) -> Any:
        runs.assign_add(1.0)
        return ids + 0

    compiled = ts.function(
        step, signature=[ts.Spec(shape, "int32")] if where == "signature" else None
    )
    compiled(np.zeros(shape, "int32"))
    for _ in range(2):
        with pytest.raises(ts.ArgumentError, match="`ids`"):
            compiled(came)
    assert float(runs.value) == 1
    assert compiled.trace_count == 1
    np.testing.assert_array_equal(host(compiled(np.ones(shape, "int64"))), np.ones(shape))


def test_a_signature_of_integers_takes_whole_numbers_and_no_floats() -> None:
    step = ts.function(lambda ids: whole(ids), signature=[ts.Spec((3, 2), "int32")])

    for name in WHOLE:
        np.testing.assert_array_equal(host(step(CALLERS[name](NUMBERS))), NUMBERS * 2, name)
    for name in FLOATS:
        with pytest.raises(ts.ArgumentError, match="`ids`"):
            step(CALLERS[name](NUMBERS))
    assert step.trace_count == 1


LOSSES: dict[str, tuple[Any, Any]] = {
    "int64 beyond 32 bits, first": (None, np.array([2**40, 1], "int64")),
    "uint8 and 256": (np.uint8([1, 2]), np.int64([256, 1])),
    "uint8 and -1": (np.uint8([1, 2]), np.int32([-1, 1])),
    "uint8 and a float": (np.uint8([1, 2]), np.float32([0.5, 1])),
    "int8 and 128": (np.int8([1, 2]), np.uint8([128, 1])),
    "int16 and 40000": (np.int16([1, 2]), np.int32([40000, 1])),
    "bool and two": (np.array([True, False]), np.int32([2, 0])),
    "bool and a half": (np.array([True, False]), np.float32([0.5, 0])),
    "float16 and 100000": (np.float16([1, 2]), np.float32([100000, 1])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_number_changes_on_its_way_in(name: str) -> None:
    """It arrives, in a program of its own if need be, or it is an error."""
    first, second = LOSSES[name]
    step = ts.function(lambda ids: ids)
    if first is not None:
        np.testing.assert_array_equal(host(step(first)), first)

    got = value_or_error(step, second)
    if isinstance(got, ts.ArgumentError):
        assert "`ids`" in str(got)
    else:
        np.testing.assert_array_equal(host(got).astype("float64"), second.astype("float64"))
    if first is not None:
        np.testing.assert_array_equal(host(step(first)), first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.uint8([1, 2]), np.int64([255, 0])),
        (np.uint8([1, 2]), [255, 0]),
        (np.int8([1, 2]), np.int64([-128, 127])),
        (np.int16([1, 2]), np.uint8([255, 0])),
        (np.float16([1, 2]), np.float32([0.5, 2048])),
        (np.float16([1, 2]), np.int32([3, 2048])),
    ],
    ids=["uint8", "uint8 list", "int8", "int16", "float16", "float16 of ints"],
)
def test_numbers_that_fit_share_the_program_of_a_narrow_dtype(first: Any, second: Any) -> None:
    def step(x: Any) -> Any:
        assert dtype_of(x) == first.dtype.name
        return ops.cast(x, "float32")

    step = ts.function(step)
    step(first)

    np.testing.assert_array_equal(host(step(second)), np.asarray(second, "float32"))
    assert step.trace_count == 1


STRANGE: dict[str, Any] = {
    "complex": np.array([1 + 2j, 0]),
    "objects": np.array([object(), None], dtype=object),
    "words": np.array(["a", "b"]),
    "dates": np.array(["2020-01-01", "2020-01-02"], "datetime64[D]"),
    "records": np.zeros(2, [("a", "f4")]),
    "categories": pd.Series(["a", "b"], dtype="category"),
    "mixed columns": pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}),
}


def test_a_missing_number_is_no_integer() -> None:
    step = ts.function(lambda ids: ids + 0, signature=[ts.Spec((2,), "int32")])

    for came in (pd.Series([1, None], dtype="Int64"), pd.Series([1, None]), [1, None]):
        with pytest.raises(ts.ArgumentError, match="ids"):
            step(came)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", STRANGE)
def test_what_are_no_numbers_is_an_error(name: str, dtype: str) -> None:
    step = ts.function(lambda x: ops.sum(x), signature=[ts.Spec(np.shape(STRANGE[name]), dtype)])

    with pytest.raises(ts.ArgumentError, match="`x`"):
        step(STRANGE[name])
    assert step.trace_count == 0


# ------------------------------------------------------------------ Python's numbers


ONES: list[Any] = [1, 1.0, True, np.float32(1)]


@pytest.mark.slow
def test_ones_of_four_kinds_have_their_values_in_every_order() -> None:
    def step(x: Any, n: Any) -> Any:
        return ops.multiply(x, 3.0 if n is True else ops.cast(n, "float32"))

    for order in itertools.permutations(ONES):
        compiled = ts.function(step)
        for n in [*order, *order]:
            assert float(compiled(0.5, n)) == (1.5 if n is True else 0.5), (order, n)
        assert compiled.trace_count <= 3, order


def test_numbers_of_many_kinds_share_the_program_of_the_first_float() -> None:
    for first in (0.5, np.float32(0.5), np.float64(0.5), np.array(0.5)):
        step = ts.function(floats)
        numbers = [first, 2, -0.25, np.float32(3), np.float64(0.125), np.int64(7), np.uint8(9)]
        numbers += [np.array(4), np.array(1.5), np.bool_(True), 2**40, tensor(6, "int32")]
        for n in numbers:
            assert float(step(n)) == 2 * float(n), (first, n)
        assert step.trace_count == 1


def test_numbers_of_python_never_retrace() -> None:
    step = ts.function(lambda x, n, m: ops.multiply(ops.multiply(x, n), m))

    with quiet():
        for i in range(20):
            assert float(step(2.0 * i, i, 0.5)) == i * i
    assert step.trace_count == 1


def test_a_float_after_an_int_has_its_value_and_costs_at_most_one_trace() -> None:
    step = ts.function(lambda n: ops.multiply(n, 2))

    assert int(step(3)) == 6
    for n in (0.25, 1.5, 7, 0.75, 9, -2):
        assert float(step(n)) == 2 * n
    assert step.trace_count <= 2
    if step.trace_count == 2:
        assert any("n" in change and "float" in change for change in step.ledger[1].changes)


def test_a_float_for_a_signature_of_an_int_is_an_error() -> None:
    step = ts.function(lambda n: n + 0, signature=[ts.Spec((), "int32")])

    assert [int(step(n)) for n in (3, np.int64(4), np.uint8(5), np.array(6))] == [3, 4, 5, 6]
    for n in (0.5, np.float32(0.5), np.array(0.5), 2**31, 2**70, float("nan")):
        with pytest.raises(ts.ArgumentError, match="`n`"):
            step(n)
    assert step.trace_count == 1


@pytest.mark.parametrize("n", [2**31, -(2**31) - 1, 2**40, 2**64, 10**30])
def test_an_int_beyond_32_bits_is_right_or_an_error(n: int) -> None:
    step = ts.function(lambda n: n + 0)
    step(5)

    got = value_or_error(step, n)
    if isinstance(got, ts.ArgumentError):
        assert "`n`" in str(got)
    else:
        assert float(got) in (float(n), float(np.float32(n)))
    assert int(step(6)) == 6


@pytest.mark.parametrize("n", [10**400, -(10**400)], ids=["above", "below"])
def test_an_int_beyond_all_floats_is_an_error(n: int) -> None:
    total = keras.Variable(0.0)

    def step(n: Any) -> Any:
        total.assign_add(n)
        return total.value

    step = ts.function(step)
    step(1.0)
    with pytest.raises(ts.ArgumentError, match="`n`"):
        step(n)
    assert float(total.value) == 1


# ------------------------------------------------------------------ optional arguments


def test_an_argument_that_comes_and_goes_costs_one_program_and_is_explained() -> None:
    @ts.function
    def step(x: Any, weight: Any = None) -> Any:
        return ops.sum(x) if weight is None else ops.sum(x * weight)

    x = np.float32([1, 2])
    weights = [np.float32([1, 3]), np.float64([1, 3]), [1, 3], [1.0, 3.0], np.int64([1, 3])]
    with quiet():
        for weight in weights:
            assert float(step(x)) == 3
            assert float(step(x, weight)) == 7
            assert float(step(x, weight=weight)) == 7
            assert float(step(x, None)) == 3
    assert step.trace_count == 2
    (change,) = step.ledger[1].changes
    assert "weight" in change
    assert "None" in change
    assert "float32[2]" in change


def test_an_argument_that_goes_and_comes_keeps_its_dtype() -> None:
    @ts.function
    def step(x: Any, ids: Any = None) -> Any:
        return x if ids is None else x + ops.cast(whole(ids), "float32")

    step(1.0, np.int32([1]))
    step(1.0)
    assert float(step(1.0, np.int64([2]))[0]) == 5
    with pytest.raises(ts.ArgumentError, match="`ids`"):
        step(1.0, np.float32([2]))
    assert step.trace_count == 2


def test_two_optional_arguments_cost_one_program_for_each_combination() -> None:
    @ts.function
    def step(x: Any, a: Any = None, b: Any = None) -> Any:
        return x + (0 if a is None else 10 * a) + (0 if b is None else 100 * b)

    for a, b in [*itertools.product((None, 1.0), repeat=2)] * 3:
        assert float(step(1.0, a=a, b=b)) == 1 + 10 * (a or 0) + 100 * (b or 0)
    assert step.trace_count == 4
    assert all(e.changes for e in list(step.ledger)[1:])


# ------------------------------------------------------------------ a Trainer


def regression() -> ts.Trainer:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    return ts.Trainer(model, keras.optimizers.SGD(0.0), "mse")


def test_all_callers_of_a_trainer_share_one_program() -> None:
    trainer = regression()
    wanted = float(
        trainer.train_on_batch(NUMBERS.astype("float32"), NUMBERS.astype("float32"))["loss"]
    )

    makers = list(CALLERS.values())
    for x, y in zip(makers, makers[::-1], strict=True):
        got = float(trainer.train_on_batch(x(NUMBERS), y(NUMBERS))["loss"])
        assert got == pytest.approx(wanted, rel=1e-6)
    assert trainer.trace_count == 1


def test_weights_that_come_and_go_cost_a_trainer_one_program() -> None:
    trainer = regression()
    x = y = NUMBERS.astype("float32")
    ones = np.ones(3, "float32")

    plain = float(trainer.train_on_batch(x, y)["loss"])
    for weight in (ones, None, ones.astype("float64"), [1, 1, 1], None, np.ones(3, "int64")):
        got = float(trainer.train_on_batch(x, y, sample_weight=weight)["loss"])
        assert got == pytest.approx(plain, rel=1e-6)
    assert trainer.trace_count == 2
    assert "sample_weight" in " ".join(trainer.ledger[1].changes)


def classifier() -> ts.Trainer:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return ts.Trainer(model, keras.optimizers.Adam(0.1), loss)


def test_labels_of_a_trainer_keep_to_their_dtype() -> None:
    trainer = classifier()
    x, labels = NUMBERS.astype("float32"), np.array([0, 2, 1])

    trainer.train_on_batch(x, labels.astype("int32"))
    for y in (labels, labels.astype("uint8"), labels.tolist(), pd.Series(labels)):
        trainer.train_on_batch(x, y)
    assert trainer.trace_count == 1
    before = everything(trainer)
    for y in (labels + 0.5, labels * 1.0, labels + 2**40):
        with pytest.raises(ts.ArgumentError, match="`y`"):
            trainer.train_on_batch(x, y)
    assert_same(everything(trainer), before, 0, 0)
    assert trainer.trace_count == 1


# ------------------------------------------------------------------ images


SEEN: list[str] = []


class Sees(layers.Layer):
    """Scales its input, and remembers the dtype that it saw."""

    def call(self, x: Any) -> Any:
        SEEN.append(dtype_of(x))
        return ops.cast(x, "float32") / 255.0


class Images(keras.Model):
    """A model that scales images itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Sees()
        self.flat = layers.Flatten()
        self.out = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.flat(self.scale(x)))


def pictures(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (4, 3, 3, 1)).astype("uint8")


def test_images_stay_uint8_up_to_a_function() -> None:
    def step(x: Any) -> Any:
        assert dtype_of(x) == "uint8"
        return ops.cast(x, "float32") / 255.0

    step = ts.function(step)
    for seed in range(3):
        np.testing.assert_allclose(host(step(pictures(seed))), pictures(seed) / 255.0, rtol=1e-6)
    assert step.trace_count == 1
    assert "uint8[4,3,3,1]" in step.ledger[0].signature


@pytest.mark.parametrize("call", ["train_on_batch", "test_on_batch", "predict_on_batch", "fit"])
def test_images_stay_uint8_up_to_the_model(call: str) -> None:
    SEEN.clear()
    keras.utils.set_random_seed(5)
    trainer = ts.Trainer(Images(), "sgd", "mse", side_effects="allow")
    x, y = pictures(), normal(4, 1, seed=2)

    if call == "fit":
        trainer.fit(x, y, batch_size=4, epochs=2, progress=False)
    else:
        for _ in range(2):
            getattr(trainer, call)(*((x,) if call == "predict_on_batch" else (x, y)))

    assert SEEN[-1] == "uint8"
    assert "uint8[4,3,3,1]" in trainer.ledger[-1].signature
    assert trainer.trace_count == 1


def test_images_give_the_numbers_of_the_same_floats() -> None:
    x, y = pictures(), normal(4, 1, seed=2)
    weights = []
    for dtype in ("uint8", "float32"):
        keras.utils.set_random_seed(5)
        trainer = ts.Trainer(Images(), "sgd", "mse", side_effects="allow")
        for _ in range(2):
            trainer.train_on_batch(x.astype(dtype), y)
        weights.append(values_of(trainer.model.trainable_variables))
    assert_same(weights[0], weights[1], 1e-6, 1e-6)


def test_images_for_an_argument_of_floats_have_their_values() -> None:
    step = ts.function(floats)
    step(pictures().astype("float32"))

    np.testing.assert_array_equal(host(step(pictures(1))), pictures(1) * 2.0)
    assert step.trace_count == 1
