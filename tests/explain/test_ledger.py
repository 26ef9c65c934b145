"""The ledger: one entry per trace, with its reason, its place and its cost; limits and logs."""

from __future__ import annotations

import gc
import inspect
import logging
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import trainstep as ts

HERE = Path(__file__).name


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def line() -> int:
    """The line of the caller."""
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def squashed(text: str) -> str:
    return "".join(text.split())


def unwrapped(table: str) -> str:
    """A table's text column by column, without spaces, so that wrapped cells can be searched."""
    rows = [re.split("[│┃|]", row) for row in table.splitlines()]
    columns = zip_longest(*(row for row in rows if len(row) > 1), fillvalue="")
    return squashed(table + "".join("".join(column) for column in columns))


def test_an_entry_says_index_function_and_signature() -> None:
    @ts.function
    def step(x: Any, y: Any) -> Any:
        return ops.sum(x), ops.sum(y)

    step(zeros(32, 4), zeros(32, dtype="int32"))
    step(zeros(32, 4), zeros(32, dtype="int32"))

    (event,) = step.ledger
    assert isinstance(event, ts.TraceEvent)
    assert isinstance(step.ledger, ts.Ledger)
    assert (event.index, event.function) == (1, "step")
    assert "x: float32[32,4]" in event.signature
    assert "y: int32[32]" in event.signature
    assert event.changes == ()
    assert event.nearest is None
    assert step.trace_count == len(step.ledger) == 1


def test_partial_last_batch_costs_one_trace_and_the_ledger_names_it() -> None:
    step = ts.function(lambda x, y: ops.sum(x) + ops.sum(y))

    step(zeros(32, 4), zeros(32))
    step(zeros(17, 4), zeros(17))
    step(zeros(32, 4), zeros(32))

    assert step.trace_count == 2
    assert step.ledger[1].index == 2
    assert step.ledger[1].nearest == 1
    assert list(step.ledger[1].changes) == [
        "x: float32[32,4] -> float32[17,4]",
        "y: float32[32] -> float32[17]",
    ]


def test_only_the_parts_that_changed_are_named() -> None:
    step = ts.function(lambda x, y, z: ops.sum(x) + ops.sum(y) + ops.sum(z["a"]))

    step(zeros(2), zeros(3), {"a": zeros(4), "b": zeros(1)})
    step(zeros(2), zeros(3), {"a": zeros(5), "b": zeros(1)})

    (change,) = step.ledger[1].changes
    assert "z" in change
    assert "'a'" in change or ".a" in change
    assert "float32[4] -> float32[5]" in change


def test_a_new_dtype_is_named() -> None:
    step = ts.function(lambda x: ops.sum(x))

    step(1)
    step(1.5)  # numbers are never an error, unlike arrays

    assert list(step.ledger[1].changes) == ["x: int -> float"]


def test_a_new_static_value_is_named() -> None:
    step = ts.function(lambda x, mode: x)

    step(zeros(2), "train")
    step(zeros(2), "test")

    (change,) = step.ledger[1].changes
    assert "mode" in change
    assert "'train' -> 'test'" in change


def test_the_nearest_earlier_signature_is_taken() -> None:
    step = ts.function(lambda x, y, z: ops.sum(x) + ops.sum(y) + ops.sum(z), shapes="exact")

    step(zeros(1), zeros(1), zeros(1))
    step(zeros(2), zeros(2), zeros(2))
    step(zeros(1), zeros(1), zeros(3))

    assert step.ledger[1].nearest == 1
    assert step.ledger[2].nearest == 1
    assert list(step.ledger[2].changes) == ["z: float32[1] -> float32[3]"]


def test_a_new_mix_of_values_seen_before_is_explained() -> None:
    step = ts.function(lambda x, flag: ops.sum(x))

    step(zeros(32, 4), True)
    step(zeros(17, 4), False)
    step(zeros(32, 4), False)

    event = step.ledger[2]
    assert event.nearest in (1, 2)
    (change,) = event.changes
    if event.nearest == 1:
        assert "flag" in change
        assert "True -> False" in change
    else:
        assert change == "x: float32[17,4] -> float32[32,4]"


def test_a_new_structure_is_explained() -> None:
    step = ts.function(lambda x: ops.sum(x["a"]))

    step({"a": zeros(2)})
    step({"a": zeros(2), "b": zeros(3)})

    assert step.ledger[1].changes
    assert "b" in " ".join(step.ledger[1].changes)


def test_freezing_names_the_layer_and_thawing_reuses_the_first_program() -> None:
    d1, d2 = keras.layers.Dense(2, name="d1"), keras.layers.Dense(1, name="d2")
    model = keras.Sequential([d1, d2])
    model.build((None, 3))

    @ts.function
    def step(x: Any) -> Any:
        loss, grads = ts.value_and_grad(
            lambda: ops.mean(model(x) ** 2), lambda: model.trainable_variables
        )()
        for v, g in zip(model.trainable_variables, grads, strict=True):
            v.assign_sub(0.1 * g)
        return loss

    x = np.ones((4, 3), "float32")
    step(x)
    d2.trainable = False
    frozen, free = ops.convert_to_numpy(d2.kernel).copy(), ops.convert_to_numpy(d1.kernel).copy()
    step(x)
    assert (ops.convert_to_numpy(d2.kernel) == frozen).all()
    assert not (ops.convert_to_numpy(d1.kernel) == free).all()
    d2.trainable = True
    step(x)

    assert not (ops.convert_to_numpy(d2.kernel) == frozen).all()
    assert step.trace_count == 2
    assert list(step.ledger[1].changes) == ["layer 'd2'.trainable: True -> False"]
    assert step.ledger[1].nearest == 1


def test_another_model_is_named() -> None:
    a = keras.Sequential([keras.layers.Dense(1)], name="a")
    b = keras.Sequential([keras.layers.Dense(1)], name="b")
    step = ts.function(lambda model, x: model(x))

    step(a, zeros(2, 3))
    step(b, zeros(2, 3))
    step(a, zeros(2, 3))

    assert step.trace_count == 2
    assert list(step.ledger[1].changes) == ["argument model: Sequential 'a' -> Sequential 'b'"]


def test_the_site_is_the_users_file_and_line() -> None:
    step = ts.function(lambda x: x + 1, shapes="exact")

    first = line() + 1
    step(zeros(2))
    second = line() + 1
    step(zeros(3))

    for event, number in zip(step.ledger, (first, second), strict=True):
        file, _, at = event.site.rpartition(":")
        assert Path(file).name == HERE
        assert int(at) == number


def test_the_site_of_a_method_is_the_users_file_and_line() -> None:
    class Owner:
        @ts.function
        def step(self, x: Any) -> Any:
            return x + 1

    owner = Owner()
    here = line() + 1
    owner.step(zeros(2))

    assert owner.step.ledger[0].site.endswith(f"{HERE}:{here}")


def test_an_entry_says_seconds_variables_and_advice() -> None:
    layer = keras.layers.Dense(2, name="dense_of_ledger")
    seen = keras.Variable(0.0, name="seen")

    @ts.function
    def step(x: Any) -> Any:
        seen.assign_add(1.0)
        return layer(x)

    step(zeros(3, 4))

    (event,) = step.ledger
    assert event.trace_seconds > 0
    assert event.compile_seconds >= 0
    assert layer.kernel.path in event.reads
    assert layer.kernel.path not in event.writes
    assert event.writes == (seen.path,)
    assert event.advice
    assert "\n" not in event.advice


def test_trained_weights_and_optimizer_state_are_read_and_written() -> None:
    layer = keras.layers.Dense(1, name="trained")
    optimizer = keras.optimizers.Adam()

    @ts.function
    def step(x: Any) -> Any:
        loss, grads = ts.value_and_grad(
            lambda: ops.mean(layer(x) ** 2), lambda: layer.trainable_variables
        )()
        optimizer.apply(grads, layer.trainable_variables)
        return loss

    step(zeros(3, 4))

    (event,) = step.ledger
    for v in (layer.kernel, layer.bias, optimizer.iterations, *optimizer.variables):
        assert v.path in event.reads
    assert layer.kernel.path in event.writes
    assert optimizer.iterations.path in event.writes
    assert optimizer.learning_rate.path not in event.writes


def test_printing_a_ledger_says_it_all() -> None:
    @ts.function
    def printed(x: Any, mode: str) -> Any:
        return x

    here = line() + 1
    printed(zeros(32, 4), "a")
    printed(zeros(17, 4), "a")

    text = unwrapped(str(printed.ledger))
    for part in [
        "printed",
        f"{HERE}:{here}",
        f"{HERE}:{here + 1}",
        "float32[32,4] -> float32[17,4]",
    ]:
        assert squashed(part) in text, part
    for event in printed.ledger:
        assert squashed(event.advice) in text
    assert len(str(printed.ledger).splitlines()) > 3


def test_the_ledger_of_the_process_lists_living_functions_and_forgets_dead_ones() -> None:
    one = ts.function(lambda x: x + 1, name="living_one")
    two = ts.function(lambda x: x + 2, name="dying_two", shapes="exact")
    one(zeros(2))
    two(zeros(2))
    two(zeros(3))

    names = [event.function for event in ts.ledger()]
    assert names.count("living_one") == 1
    assert names.count("dying_two") == 2
    assert "living_one" in unwrapped(str(ts.ledger()))

    del two
    gc.collect()

    names = [event.function for event in ts.ledger()]
    assert names.count("living_one") == 1
    assert "dying_two" not in names
    assert one.trace_count == 1


def test_name_is_what_the_ledger_calls_the_function() -> None:
    step = ts.function(lambda x: x, name="my name")

    step(zeros(2))

    assert step.ledger[0].function == "my name"


def test_one_info_line_is_logged_per_trace_and_none_per_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = ts.function(lambda x: ops.sum(x), name="logged", shapes="exact")

    with caplog.at_level(logging.DEBUG, logger="trainstep"):
        for _ in range(50):
            step(zeros(32, 4))
        for _ in range(50):
            step(zeros(17, 4))

    ours = [r for r in caplog.records if r.name.split(".")[0] == "trainstep"]
    assert [r.levelno for r in ours] == [logging.INFO, logging.INFO]
    assert all(r.name == "trainstep" for r in ours)
    first, second = (r.getMessage() for r in ours)
    assert "logged" in first
    assert HERE in first
    assert "x: float32[32,4] -> float32[17,4]" in second
    assert "\n" not in first + second


def test_a_failed_trace_is_not_in_the_ledger() -> None:
    def fails(x: Any) -> Any:
        raise ValueError("no")

    step = ts.function(fails)
    with pytest.raises(ValueError, match="no"):
        step(zeros(2))

    assert step.trace_count == len(step.ledger) == 0


# ------------------------------------------------------------------ max_traces


@pytest.mark.parametrize(
    "part",
    [
        "`limited`",
        "max_traces=1",
        "changed:",
        "x: float32[32,4] -> float32[17,4]",
        "since:",
        "trace 1",
        HERE,
        "to fix:",
    ],
)
def test_retrace_limit_message_says(part: str) -> None:
    step = ts.function(lambda x: ops.sum(x), max_traces=1, name="limited")
    step(zeros(32, 4))

    with pytest.raises(ts.RetraceLimitError) as caught:
        step(zeros(17, 4))

    assert part in str(caught.value)


def test_the_limit_raises_before_user_code_runs_and_carries_the_entry() -> None:
    runs = []
    total = keras.Variable(0.0)

    @ts.function(max_traces=2, shapes="exact")
    def step(x: Any) -> Any:
        runs.append(1)
        total.assign_add(1.0)
        return ops.sum(x)

    step(zeros(1))
    step(zeros(2))
    with pytest.raises(ts.RetraceLimitError) as caught:
        step(zeros(3))
    here = caught.traceback[0].lineno + 1

    event = caught.value.event
    assert isinstance(event, ts.TraceEvent)
    assert event.changes in (("x: float32[1] -> float32[3]",), ("x: float32[2] -> float32[3]",))
    assert event.nearest in (1, 2)
    assert event.site.endswith(f"{HERE}:{here}")
    assert event.advice
    assert len(runs) == 2
    assert float(total.value) == 2
    assert step.trace_count == len(step.ledger) == 2
    step(zeros(1))
    assert float(total.value) == 3


def test_the_limit_holds_for_warm_up() -> None:
    step = ts.function(lambda x: ops.sum(x), max_traces=1)
    step.warm_up(ts.Spec((2,)))

    with pytest.raises(ts.RetraceLimitError, match="max_traces=1"):
        step.warm_up(ts.Spec((3,)))

    step(zeros(2))
    assert step.trace_count == 1


# ------------------------------------------------------------------ the error tree


def test_every_error_is_a_trainstep_error() -> None:
    errors = [getattr(ts, name) for name in ts.__all__ if name.endswith("Error")]

    assert len(errors) == 13
    assert all(issubclass(error, ts.TrainstepError) for error in errors)
    assert issubclass(ts.ArgumentError, TypeError)


PARTS_OF_STATE_ERROR = [
    "variable `written_in_loop` is written inside a branch",
    "to fix:",
    "assign it after the",
]


@pytest.mark.parametrize("part", PARTS_OF_STATE_ERROR)
def test_state_error_message_says(part: str) -> None:
    assert part in str(ts.StateError("written_in_loop"))


def test_a_write_inside_a_loop_body_takes_effect_or_is_refused_by_name() -> None:
    v = keras.Variable(0.0, name="written_in_loop")

    @ts.function
    def step(x: Any) -> Any:
        def body(carry: Any, element: Any) -> tuple[Any, Any]:
            v.assign_add(element)
            return carry, element

        return ops.scan(body, ops.zeros(()), x)

    refused = None
    try:
        step(np.ones(3, "float32"))
    except ts.StateError as error:
        refused = error

    if refused is None:
        assert float(v.value) == 3.0
    else:
        assert str(refused) == str(ts.StateError(v.path)), "wrapped by Keras"
        assert refused.variable == v.path
        assert float(v.value) == 0.0


def test_a_write_inside_a_branch_takes_effect_only_if_the_branch_is_taken() -> None:
    v = keras.Variable(0.0)

    @ts.function
    def step(x: Any) -> Any:
        def branch() -> Any:
            v.assign_add(10.0)
            return x

        return ops.cond(x > 0, branch, lambda: -x)

    seen = []
    for x in (1.0, -1.0, 2.0):
        assert float(step(x)) == abs(x)
        seen.append(float(v.value))

    assert seen == [10.0, 10.0, 20.0]
    assert step.trace_count == 1


@pytest.mark.parametrize("part", ["scalar", "(3,)", "to fix:"])
def test_gradient_error_for_a_value_that_is_no_scalar_says(part: str) -> None:
    v = keras.Variable(1.0)

    with pytest.raises(ts.GradientError) as caught:
        ts.value_and_grad(lambda: v * ops.ones(3), [v])()

    assert part in str(caught.value)


@pytest.mark.parametrize("part", ["`variables` is empty", "to fix:"])
def test_gradient_error_for_no_variables_says(part: str) -> None:
    with pytest.raises(ts.GradientError) as caught:
        ts.value_and_grad(lambda: 1.0, [])()

    assert part in str(caught.value)
