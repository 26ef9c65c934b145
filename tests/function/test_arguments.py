"""What goes in and out of a step: numbers, arrays, structures, objects; signatures; other compilers."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import inspect
import itertools
import pickle
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts

HERE = Path(__file__).name


def host(x: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(x))


# ------------------------------------------------------------------ Python values


@pytest.mark.parametrize(
    "numbers", [[0.5, 1.5, -2.0, float("inf"), 1e-30], [0, 3, -7, 2**30]], ids=["float", "int"]
)
def test_a_python_number_that_varies_does_not_retrace(numbers: list[Any]) -> None:
    step = ts.function(lambda x, n: ops.multiply(x, n))

    results = [float(step(np.float32(2.0), n)) for n in numbers]

    assert results == [float(np.float32(2 * n)) for n in numbers]
    assert step.trace_count == 1


def test_one_and_one_point_zero_and_true_are_never_confused() -> None:
    def kind(n: Any) -> Any:
        if isinstance(n, bool):
            return {"bool": ops.ones(()) * (100 if n else -100)}
        return {"int" if "int" in keras.backend.standardize_dtype(n.dtype) else "float": n + n}

    wanted_in_turn = [(1, "int", 2), (1.0, "float", 2), (True, "bool", 100)]
    for order in itertools.permutations(wanted_in_turn):
        step = ts.function(kind)
        kinds = [key for _, key, _ in order]
        floats_come_first = kinds.index("float") < kinds.index("int")
        for value, key, number in [*order, *order]:
            (got,) = step(value).items()
            # An int enters the program of a float, if that came first.
            wanted = "float" if key == "int" and floats_come_first else key
            assert (got[0], float(got[1])) == (wanted, number)
        assert step.trace_count == (2 if floats_come_first else 3)


def test_zero_and_false_and_none_and_nothing_are_never_confused() -> None:
    def kind(n: Any) -> Any:
        return n if n is None or isinstance(n, bool | str | tuple) else n + 1

    cases: list[tuple[Any, Any]] = [
        (False, False),
        (0, 1),
        (None, None),
        (0.0, 1.0),
        ("", ""),
        ((), ()),
    ]
    for order in (cases, cases[::-1]):
        step = ts.function(kind)
        for value, wanted in [*order, *order]:
            got = step(value)
            if wanted is None or isinstance(wanted, bool | str | tuple):
                assert got == wanted
                assert type(got) is type(wanted)
            else:
                assert float(got) == wanted
        # Where 0.0 came first, 0 enters its program.
        assert step.trace_count == len(cases) - (order is not cases)


def test_numbers_inside_structures_are_not_confused() -> None:
    def kind(d: Any) -> Any:
        return ops.convert_to_tensor(10.0 if isinstance(d["n"][0], bool) else 20.0) + d["n"][1]

    for first, second in ((True, 1), (1, True)):
        step = ts.function(kind)
        for n in (first, second, first):
            assert float(step({"n": (n, 0.5)})) == (10.5 if n is True else 20.5)


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, False),
        ("a", "b"),
        (None, "None"),
        (Mode.TRAIN, Mode.TEST),
        (Level.LOW, Level.HIGH),
        (Level.LOW, True),
    ],
    ids=str,
)
def test_bool_str_none_and_enum_are_static(one: Any, other: Any) -> None:
    seen: list[Any] = []

    @ts.function
    def step(x: Any, mode: Any) -> Any:
        seen.append(mode)
        return x + (1 if mode is one or (mode == one and type(mode) is type(one)) else 2)

    results = [float(step(0.0, mode)) for mode in (one, other, one, other)]

    assert results == [1, 2, 1, 2]
    assert [(type(s), s) for s in seen] == [(type(one), one), (type(other), other)]
    assert step.trace_count == 2


@pytest.mark.parametrize("make", [np.float32, np.float64, np.int32, np.int64, np.int8, np.bool_])
def test_numpy_scalars_go_in_as_arrays(make: Any) -> None:
    step = ts.function(lambda n: ops.cast(n, "float32") * 2)

    assert [float(step(make(n))) for n in (0, 1, 1)] == [0, 2, 2]
    assert step.trace_count == 1


def test_an_integer_beyond_32_bits_is_right_or_an_error() -> None:
    step = ts.function(lambda n: n + 0)
    assert int(step(5)) == 5

    try:
        got = int(step(2**40))
    except (ts.ArgumentError, OverflowError):
        got = 2**40
    assert got == 2**40
    assert int(step(6)) == 6


# ------------------------------------------------------------------ arrays


def test_float64_and_float32_callers_share_one_program() -> None:
    seen = []

    @ts.function
    def step(x: Any) -> Any:
        seen.append(keras.backend.standardize_dtype(x.dtype))
        return ops.sum(x)

    assert float(step(np.ones(3, "float64"))) == 3
    assert float(step(np.ones(3, "float32"))) == 3
    assert seen == ["float32"]
    assert step.trace_count == 1


def test_keras_tensors_and_the_engines_arrays_share_the_program_of_numpy() -> None:
    step = ts.function(lambda x: ops.sum(x))
    array = np.arange(6, dtype="float32").reshape(2, 3)

    for x in (
        array,
        ops.convert_to_tensor(array),
        array.astype("float64"),
        np.asfortranarray(array),
        array[::1],
        array.tolist(),
    ):
        assert float(step(x)) == 15

    assert step.trace_count == 1


def test_a_variable_as_argument_is_taken_by_its_value() -> None:
    v = keras.Variable(np.ones(3, "float32"))
    step = ts.function(lambda x: ops.sum(x * 1))

    assert float(step(v)) == 3
    v.assign(np.full(3, 2.0, "float32"))
    assert float(step(v)) == 6


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "int8"])
def test_integers_keep_their_values(dtype: str) -> None:
    table = keras.Variable(np.arange(5, dtype="float32") * 10)
    step = ts.function(lambda i: ops.take(table, ops.cast(i, "int32")))

    np.testing.assert_array_equal(host(step(np.array([1, 0], dtype))), [10, 0])
    np.testing.assert_array_equal(host(step(np.array([0, 1], dtype))), [0, 10])
    assert step.trace_count == 1


def test_lists_of_numbers_and_nested_lists_are_arrays() -> None:
    step = ts.function(lambda x: (ops.sum(x), ops.shape(ops.convert_to_tensor(x))))

    assert float(step([1.0, 2.0, 3.0])[0]) == 6
    assert float(step([4.0, 5.0, 6.0])[0]) == 15
    assert step.trace_count == 1
    total, shape = step([[1.0, 2.0], [3.0, 4.0]])
    assert float(total) == 10
    assert tuple(int(n) for n in shape) == (2, 2)
    step([[5.0, 6.0], [7.0, 8.0]])
    assert step.trace_count == 2


def test_arrays_that_are_not_contiguous_keep_their_values() -> None:
    base = np.arange(24, dtype="float32").reshape(4, 6)
    step = ts.function(lambda x: x + 0)

    for view in (base[:, ::2], base.T[::2].T, base[::-1, ::-2]):
        np.testing.assert_array_equal(host(step(view)), view)
    assert step.trace_count == 1


def test_empty_arrays_go_in_and_out() -> None:
    step = ts.function(lambda x: x * 2)

    assert host(step(np.zeros((0, 4), "float32"))).shape == (0, 4)


# ------------------------------------------------------------------ structures


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Batch:
    x: Any
    label: Any
    note: str = "n"


def test_tuples_dicts_and_named_tuples_go_in_and_come_out_as_they_are() -> None:
    step = ts.function(lambda t: keras.tree.map_structure(lambda x: x + 1, t))

    for n in (1.0, 2.0):
        a = np.full(2, n, "float32")
        got = step({"b": (a, [a, {"c": a}]), "a": Pair(a, a), "o": OrderedDict(z=a, y=a)})
        assert list(got) == ["b", "a", "o"] or set(got) == {"b", "a", "o"}
        assert isinstance(got["b"], tuple)
        assert isinstance(got["b"][1], list)
        assert isinstance(got["a"], Pair)
        assert isinstance(got["o"], OrderedDict)
        np.testing.assert_array_equal(host(got["b"][1][1]["c"]), a + 1)
        np.testing.assert_array_equal(host(got["a"].second), a + 1)
    assert step.trace_count == 1


def test_dataclasses_go_in_and_come_out() -> None:
    @ts.function
    def step(batch: Batch) -> Batch:
        return Batch(x=batch.x * 2, label=batch.label, note=batch.note + "!")

    for n in (1.0, 2.0):
        got = step(Batch(np.full(2, n), np.array([1, 2], "int32")))
        assert isinstance(got, Batch)
        np.testing.assert_array_equal(host(got.x), [2 * n, 2 * n])
        np.testing.assert_array_equal(host(got.label), [1, 2])
        assert got.note == "n!"
    assert step.trace_count == 1


def test_the_order_of_a_dicts_keys_does_not_matter_to_the_result() -> None:
    step = ts.function(lambda d: d["a"] - d["b"])

    assert float(step({"a": 3.0, "b": 1.0})) == 2
    assert float(step({"b": 1.0, "a": 3.0})) == 2


def test_objects_none_and_python_values_come_out_as_they_are() -> None:
    thing = object()
    step = ts.function(
        lambda x: {
            "x": x + 1,
            "none": None,
            "s": "text",
            "thing": thing,
            "n": 3,
            "flag": True,
            "empty": [],
        }
    )

    for n in (1.0, 2.0):
        got = step(n)
        assert float(got["x"]) == n + 1
        assert got["none"] is None
        assert got["thing"] is thing
        assert (got["s"], int(got["n"]), bool(got["flag"]), list(got["empty"])) == (
            "text",
            3,
            True,
            [],
        )
    assert step.trace_count == 1


def test_a_list_that_a_step_returned_is_the_callers_own() -> None:
    step = ts.function(lambda x: [x + 1, {"a": []}])

    first = step(1.0)
    first.append("mine")
    first[1]["a"].append("mine")

    second = step(1.0)
    assert len(second) == 2
    assert second[1] == {"a": []}


def test_a_step_may_return_nothing_and_one_tensor_twice() -> None:
    assert ts.function(lambda x: None)(1.0) is None
    a, b = ts.function(lambda x: (x, x))(1.0)
    assert (float(a), float(b)) == (1.0, 1.0)


def test_an_object_is_static_by_identity_and_held_weakly() -> None:
    class Thing:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    one, two = Thing(1.0), Thing(2.0)
    step = ts.function(lambda thing, x: x * thing.scale)

    assert [float(step(t, 1.0)) for t in (one, two, one, two)] == [1, 2, 1, 2]
    assert step.trace_count == 2
    gone = weakref.ref(two)
    del two
    gc.collect()
    assert gone() is None
    for i in range(5):  # a new object may get the old one's address, never its program
        assert float(step(Thing(10.0 + i), 1.0)) == 10.0 + i


# ------------------------------------------------------------------ parameters


def test_keywords_defaults_and_positions_are_one_signature() -> None:
    step = ts.function(lambda x, scale=2.0, *, shift=1.0: x * scale + shift)

    assert float(step(3.0)) == 7
    assert float(step(3.0, 4.0)) == 13
    assert float(step(scale=4.0, x=3.0)) == 13
    assert float(step(3.0, shift=0.0)) == 6
    assert step.trace_count == 1


def test_var_positional_and_var_keyword_parameters() -> None:
    @ts.function
    def step(x: Any, *rest: Any, **named: Any) -> Any:
        return x + sum(rest) * 10 + sum(named.values()) * 100

    assert float(step(1.0)) == 1
    assert float(step(1.0, 2.0, 3.0)) == 51
    assert float(step(1.0, 2.0, a=1.0, b=2.0)) == 321
    assert step.trace_count == 3
    assert float(step(1.0, 2.0, b=2.0, a=1.0)) == 321


def test_a_call_that_python_would_refuse_is_refused() -> None:
    step = ts.function(lambda x, *, y=1.0: x)

    for bad in (lambda: step(), lambda: step(1.0, 2.0), lambda: step(1.0, z=2.0)):
        with pytest.raises(TypeError):
            bad()
    assert step.trace_count == 0


def test_partial_of_a_function_and_function_of_a_partial() -> None:
    def raw(x: Any, scale: Any, mode: str = "a") -> Any:
        return x * scale + (0 if mode == "a" else 100)

    outer = functools.partial(ts.function(raw), scale=3.0)
    inner = ts.function(functools.partial(raw, scale=3.0, mode="b"))

    assert [float(outer(x)) for x in (1.0, 2.0)] == [3, 6]
    assert [float(inner(x)) for x in (1.0, 2.0)] == [103, 106]
    assert inner.trace_count == 1
    assert "raw" in inner.ledger[0].function


def test_name_docstring_and_signature_are_kept() -> None:
    @ts.function(max_traces=3)
    def step(x: int, *, y: float = 1.0) -> float:
        """Says what it does."""
        return x * y

    assert step.__name__ == "step"
    assert step.__doc__ == "Says what it does."
    assert str(inspect.signature(step)) == "(x: 'int', *, y: 'float' = 1.0) -> 'float'"
    assert step.__module__ == __name__
    assert isinstance(step, ts.Function)


# ------------------------------------------------------------------ methods, pickling


class Learner:
    """A user's class with a compiled method."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @ts.function
    def step(self, x: Any, shift: float = 0.0) -> Any:
        """A compiled method."""
        return x * self.scale + shift


@ts.function
def module_level(x: Any) -> Any:
    return x + 1


def test_a_method_is_traced_once_per_instance() -> None:
    class Local:
        def __init__(self, scale: float) -> None:
            self.scale = scale
            self.total = keras.Variable(0.0)

        @ts.function
        def step(self, x: Any) -> Any:
            self.total.assign_add(x * self.scale)
            return self.total.value

    a, b = Local(1.0), Local(10.0)
    assert [float(o.step(1.0)) for o in (a, b, a, b)] == [1, 10, 2, 20]

    assert sum(e.function.endswith("step") for e in Local.step.ledger) == 2
    assert len(a.step.ledger) >= 1
    assert a.step.trace_count >= 1
    assert Local.step.trace_count == 2
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
    assert float(b.step(1.0)) == 30


def test_a_method_can_be_warmed_up_and_keeps_its_words() -> None:
    learner = Learner(3.0)
    before = Learner.step.trace_count

    learner.step.warm_up(ts.Spec((2,)))
    assert Learner.step.trace_count == before + 1
    np.testing.assert_array_equal(host(learner.step(np.ones(2, "float32"))), [3, 3])

    assert Learner.step.trace_count == before + 1
    assert learner.step.__name__ == "step"
    assert learner.step.__doc__ == "A compiled method."
    assert list(inspect.signature(learner.step).parameters) == ["x", "shift"]


def test_instances_with_a_compiled_method_still_pickle_and_copy() -> None:
    learner = Learner(2.0)
    assert float(learner.step(1.0)) == 2
    learner.step.warm_up(ts.Spec(()))

    for twin in (pickle.loads(pickle.dumps(learner)), copy.deepcopy(learner), copy.copy(learner)):
        twin.scale = 5.0
        assert float(twin.step(1.0)) == 5
        assert float(learner.step(1.0)) == 2
    assert vars(learner) == {"scale": 2.0}


def test_a_module_level_function_still_pickles() -> None:
    assert float(module_level(1.0)) == 2

    assert float(pickle.loads(pickle.dumps(module_level))(2.0)) == 3
    assert float(copy.deepcopy({"f": module_level})["f"](3.0)) == 4


def test_a_model_used_by_a_step_still_copies() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    step = ts.function(lambda m, x: m(x))
    x = np.ones((1, 2), "float32")
    wanted = host(step(model, x))

    twin = pickle.loads(pickle.dumps(model))

    np.testing.assert_allclose(host(step(twin, x)), wanted)
    np.testing.assert_allclose(host(model(x)), wanted, rtol=1e-6)


# ------------------------------------------------------------------ Spec and signature


def test_a_spec_prints_and_compares() -> None:
    assert str(ts.Spec((None, 20))) == "float32[?,20]"
    assert str(ts.Spec((), "int32")) == "int32[]"
    assert ts.Spec((2,)) == ts.Spec((2,))
    assert ts.Spec((2,)) != ts.Spec((3,))
    assert hash(ts.Spec((2,))) == hash(ts.Spec((2,)))


MISFITS = {
    "size": (
        np.zeros((3, 5), "float32"),
        ["`x`", "axis 1", "float32[?,4]", "float32[3,5]", "to fix:"],
    ),
    "rank": (np.zeros((3,), "float32"), ["`x`", "float32[?,4]", "float32[3]", "2", "to fix:"]),
    "more rank": (
        np.zeros((3, 4, 1), "float32"),
        ["`x`", "float32[?,4]", "float32[3,4,1]", "to fix:"],
    ),
    "dtype": (np.zeros((3, 4), "complex64"), ["`x`", "float32", "complex64[3,4]", "to fix:"]),
    "text": ("text", ["`x`", "float32[?,4]", "'text'", "to fix:"]),
    "none": (None, ["`x`", "float32[?,4]", "None", "to fix:"]),
    "structure": ([np.zeros((3, 4)), np.zeros((3, 4))], ["`x`", "float32[?,4]", "to fix:"]),
}


@pytest.mark.parametrize(("came", "parts"), MISFITS.values(), ids=MISFITS.keys())
def test_an_argument_that_does_not_fit_its_spec_is_named_before_anything_runs(
    came: Any, parts: list[str]
) -> None:
    ran = []
    total = keras.Variable(0.0)

    @ts.function(signature=[ts.Spec((None, 4)), None])
    def step(x: Any, flag: bool) -> Any:
        ran.append(1)
        total.assign_add(ops.sum(x))
        return total.value

    with pytest.raises(ts.ArgumentError) as caught:
        step(came, True)

    message = str(caught.value)
    assert [part for part in ["`step`", *parts] if part not in message] == []
    assert caught.value.argument == "x"
    assert not ran
    assert float(total.value) == 0
    assert step.trace_count == 0
    assert float(step(np.ones((2, 4)), True)) == 8


def test_a_none_axis_takes_any_size_and_float64_fits_float32() -> None:
    step = ts.function(lambda x: ops.sum(x), signature=[ts.Spec((None, 2))])

    assert [
        float(step(np.ones((n, 2), d))) for n, d in ((1, "float32"), (5, "float64"), (1, "float64"))
    ] == [2, 10, 2]
    assert step.trace_count <= 2


def test_the_name_of_a_spec_is_what_messages_call_the_argument() -> None:
    step = ts.function(lambda x: x, signature=[ts.Spec((2,), name="images")])

    with pytest.raises(ts.ArgumentError, match="`images`"):
        step(np.zeros(3, "float32"))


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (
            {"a": np.zeros(2), "b": [np.zeros((3, 4)), np.zeros(())]},
            ["'b'", "axis 1", "float32[?,3]", "float32[3,4]"],
        ),
        (
            {"a": np.zeros(5), "b": [np.zeros((3, 3)), np.zeros(())]},
            ["'a'", "axis 0", "float32[2]", "float32[5]"],
        ),
        ({"a": np.zeros(2)}, ["`batch`"]),
        ({"a": np.zeros(2), "b": [np.zeros((3, 3))]}, ["batch"]),
    ],
    ids=["inner size", "outer size", "missing key", "short list"],
)
def test_a_nested_signature_names_the_part_that_does_not_fit(batch: Any, parts: list[str]) -> None:
    step = ts.function(
        lambda batch: ops.sum(batch["a"]) + ops.sum(batch["b"][0]),
        signature=[{"a": ts.Spec((2,)), "b": [ts.Spec((None, 3)), ts.Spec(())]}],
    )

    with pytest.raises(ts.ArgumentError) as caught:
        step(batch)

    assert [part for part in parts if part not in str(caught.value)] == []
    assert step.trace_count == 0
    assert float(step({"a": np.ones(2), "b": [np.ones((3, 3)), np.zeros(())]})) == 11


def test_a_signature_holds_for_keyword_arguments() -> None:
    step = ts.function(lambda x, y: x + y, signature=[ts.Spec((2,)), ts.Spec((2,))])

    with pytest.raises(ts.ArgumentError, match="`y`"):
        step(y=np.zeros(3, "float32"), x=np.zeros(2, "float32"))
    np.testing.assert_array_equal(host(step(y=np.ones(2), x=np.ones(2))), [2, 2])


# ------------------------------------------------------------------ warm_up


def test_warm_up_compiles_without_running() -> None:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(2), keras.layers.BatchNormalization()]
    )
    total = keras.Variable(0.0)
    traces = []

    @ts.function
    def step(batch: Any, scale: float, *, training: bool) -> Any:
        traces.append(1)
        total.assign_add(1.0)
        return ops.sum(model(batch["x"], training=training)) * scale

    before = [host(v).copy() for v in model.variables]
    step.warm_up({"x": ts.Spec((8, 4))}, 1.0, training=True)

    assert step.trace_count == len(traces) == 1
    assert float(total.value) == 0
    for old, v in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, host(v))
    step({"x": np.ones((8, 4), "float32")}, 2.0, training=True)
    step({"x": np.ones((8, 4), "float64")}, 3.0, training=True)
    assert step.trace_count == len(traces) == 1
    assert float(total.value) == 2


def test_warm_up_builds_what_is_not_built_and_the_first_call_does_not_trace() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    step = ts.function(lambda m, x: m(x))

    step.warm_up(model, ts.Spec((8, 4)))
    got = step(model, np.ones((8, 4), "float32"))

    assert step.trace_count == 1
    np.testing.assert_allclose(host(got), host(model(np.ones((8, 4), "float32"))), rtol=1e-5)


def test_warm_up_twice_traces_once() -> None:
    step = ts.function(lambda x: x)

    step.warm_up(ts.Spec((2,)))
    step.warm_up(ts.Spec((2,)))

    assert step.trace_count == 1


# ------------------------------------------------------------------ control flow


def test_an_if_on_a_tensor_gives_an_error_in_our_words_with_the_users_line() -> None:
    total = keras.Variable(0.0)

    @ts.function
    def step(x: Any) -> Any:
        total.assign_add(1.0)
        if ops.sum(x) > 0:  # the user's line
            return x
        return -x

    with pytest.raises(ts.ControlFlowError) as caught:
        step(np.ones(3, "float32"))

    number = step.__wrapped__.__code__.co_firstlineno + 3
    for part in ["`step`", HERE, f":{number}", "if ops.sum(x) > 0:", "keras.ops.cond", "to fix:"]:
        assert part in str(caught.value)
    assert HERE in caught.value.site
    assert float(total.value) == 0
    assert step.trace_count == 0


READERS = {
    "while": lambda x: [None for _ in iter(lambda: bool(x > 0), False)],
    "float": lambda x: float(x),
    "int": lambda x: int(x),
    "numpy": lambda x: np.asarray(x) + 1,
    "convert_to_numpy": lambda x: ops.convert_to_numpy(x),
    "range": lambda x: range(ops.cast(x, "int32")),
}


@pytest.mark.parametrize("kind", READERS)
def test_reading_a_tensor_in_python_gives_the_same_error(kind: str) -> None:
    step = ts.function(lambda x: READERS[kind](x) and x)

    with pytest.raises(ts.ControlFlowError, match="to fix:"):
        step(1.0)


def test_an_if_inside_a_layer_gives_the_same_error() -> None:
    class Branching(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if ops.sum(x) > 0:
                return x
            return -x

    layer = Branching()
    step = ts.function(lambda x: layer(x))

    with pytest.raises(ts.ControlFlowError) as caught:
        step(np.ones((2, 2), "float32"))

    assert HERE in str(caught.value)
    assert "if ops.sum(x) > 0:" in str(caught.value)


def test_an_if_on_a_static_value_is_plain_python() -> None:
    step = ts.function(lambda x, flag, n: x if flag and x.shape[0] == 2 else x[:1])

    assert host(step(np.ones(2), True, 1)).shape == (2,)
    assert host(step(np.ones(2), False, 1)).shape == (1,)


def test_cond_works_in_a_step() -> None:
    step = ts.function(lambda x: ops.cond(x > 0, lambda: x * 2, lambda: -x))

    assert [float(step(x)) for x in (3.0, -3.0)] == [6, 3]
    assert step.trace_count == 1


def test_while_loop_works_in_a_step() -> None:
    step = ts.function(
        lambda x: ops.while_loop(lambda i, s: i < 5, lambda i, s: (i + 1, s + x), (0, x))[1]
    )

    assert [float(step(x)) for x in (1.0, 2.0)] == [6, 12]
    assert step.trace_count == 1


def test_a_while_loop_whose_length_depends_on_data_works_in_a_step() -> None:
    step = ts.function(lambda x: ops.while_loop(lambda s: s < 10.0, lambda s: (s + x,), (x,))[0])

    assert [float(step(x)) for x in (1.0, 4.0)] == [10, 12]
    assert step.trace_count == 1


def test_scan_works_in_a_step() -> None:
    step = ts.function(lambda x: ops.scan(lambda c, e: (c + e, c), ops.zeros(()), x))

    last, path = step(np.arange(4, dtype="float32"))
    assert float(last) == 6
    np.testing.assert_array_equal(host(path), [0, 0, 1, 3])


# ------------------------------------------------------------------ what builds itself


@pytest.mark.parametrize(
    ("kind", "options"), [("SGD", {"momentum": 0.9}), ("Nadam", {}), ("Adafactor", {})]
)
def test_an_optimizer_without_slots_builds_itself_in_one_trace(
    kind: str, options: dict[str, Any]
) -> None:
    def make() -> tuple[Any, Any]:
        return keras.Variable(np.array([1.0, 2.0], "float32")), getattr(keras.optimizers, kind)(
            0.1, **options
        )

    (v, optimizer), (w, built) = make(), make()
    built.build([w])

    def step_of(v: Any, optimizer: Any) -> Any:
        @ts.function
        def step(x: Any) -> Any:
            loss, grads = ts.value_and_grad(lambda: ops.sum(v * v * x), [v])()
            optimizer.apply(grads, [v])
            return loss

        return step

    first, second = step_of(v, optimizer), step_of(w, built)
    for _ in range(3):
        assert float(first(1.0)) == pytest.approx(float(second(1.0)))

    np.testing.assert_allclose(host(v), host(w), rtol=1e-6)
    assert int(optimizer.iterations.value) == 3
    assert first.trace_count == 1


# ------------------------------------------------------------------ one compiler inside another


def test_a_function_inside_a_function_is_inlined() -> None:
    total = keras.Variable(0.0)

    @ts.function
    def inner(x: Any, flag: bool = True) -> Any:
        total.assign_add(x)
        return total.value * 2

    @ts.function
    def outer(x: Any) -> Any:
        return inner(x) + inner(x, flag=False)

    assert float(outer(1.0)) == 6
    assert float(outer(1.0)) == 14
    assert float(total.value) == 4
    assert (outer.trace_count, inner.trace_count) == (1, 0)
    assert float(inner(1.0)) == 10
    assert (outer.trace_count, inner.trace_count) == (1, 1)


def test_a_function_inside_a_plain_tf_function_updates_variables(backend: str) -> None:
    if backend != "tensorflow":
        pytest.skip("tf.function is TensorFlow's")
    import tensorflow as tf

    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    total = keras.Variable(0.0)

    @ts.function
    def step(x: Any) -> Any:
        total.assign_add(1.0)
        loss, (grad,) = ts.value_and_grad(lambda: ops.sum(model(x)), model.trainable_variables)()
        model.trainable_variables[0].assign_sub(grad)
        return loss

    @tf.function
    def outer(x: Any) -> Any:
        return step(x) + step(x)

    x = np.ones((1, 2), "float32")
    assert float(outer(x)) == 2.0 + 0.0
    assert float(outer(x)) == -2.0 - 4.0
    assert float(total.value) == 4
    np.testing.assert_array_equal(host(model.trainable_variables[0]), [[-3.0], [-3.0]])
    assert float(step(x)) == -6.0
    assert float(total.value) == 5


@pytest.mark.parametrize("with_tracers", [True, False])
@pytest.mark.parametrize("traced_before", [True, False])
def test_a_function_inside_jax_jit_says_what_to_do(
    with_tracers: bool, traced_before: bool, backend: str
) -> None:
    if backend != "jax":
        pytest.skip("jax.jit is JAX's")
    import jax

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    total = keras.Variable(0.0)

    @ts.function
    def step(x: Any) -> Any:
        total.assign_add(1.0)
        return ops.sum(model(x))

    x = np.ones((1, 2), "float32")
    if traced_before:
        step(x)

    with pytest.raises(ts.ForeignTraceError) as caught:
        jax.jit(lambda z: step(z))(x) if with_tracers else jax.jit(lambda: step(x))()

    for part in ["`step`", "jax.jit", "trainstep.function", "to fix:"]:
        assert part in str(caught.value)
    assert float(total.value) == float(traced_before)
    assert float(step(x)) == 2
    assert float(total.value) == 1 + traced_before
    np.testing.assert_array_equal(host(model(x)), [[2.0]])
