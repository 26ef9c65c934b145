"""What is refused: each message names the argument, the expected and the given value, and the cure.

After every refusal, and after a failure inside of a step, variables and slots are as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, values_of
from trainstep import graph

X, Y = np.ones((4, 2), "float32"), np.arange(4, dtype="int32") % 3


class Program:
    """A small classifier with its training, run once, so that there are slots."""

    def __init__(self) -> None:
        self.x = graph.placeholder("float32", [None, 2], name="rows")
        self.y = graph.placeholder("int32", [None], name="labels")
        self.w = graph.Variable(np.ones((2, 3), "float32"), name="weights")
        self.logits = self.x @ self.w
        each = keras.losses.sparse_categorical_crossentropy(self.y, self.logits, from_logits=True)
        self.loss = graph.identity(ops.mean(each), name="loss")
        self.optimizer = keras.optimizers.Adam(0.1)
        self.train = graph.train.minimize(self.optimizer, self.loss, name="train")
        self.fetches = [self.train, self.loss]
        self.session = graph.Session()
        self.session.run(self.fetches, {self.x: X, self.y: Y})
        self.state = [self.w.variable, *self.optimizer.variables]


@pytest.fixture(scope="module")
def trained() -> tuple[graph.Graph, Program]:
    """One program for all tests, in a graph of its own: it costs a compilation."""
    with graph.Graph().as_default() as own:
        return own, Program()


@pytest.fixture
def program(trained: tuple[graph.Graph, Program]) -> Iterator[Program]:
    """The program; whatever the test did to it, its variables are as they were."""
    own, made = trained
    before = values_of(made.state)
    with own.as_default():
        yield made
    assert_same(made.state, before, rtol=0, atol=0)


def refused(call: Callable[[], Any], *named: str) -> str:
    """The message of the error, which has all its parts and says what is named."""
    with pytest.raises(ts.ArgumentError) as caught:
        call()
    message = str(caught.value)
    for part in ("expected:", "got:", "to fix:"):
        assert re.search(rf"^ *{part} +\S", message, re.M), message
    for word in named:
        assert word in message, f"{word!r} is not in:\n{message}"
    assert caught.value.argument
    assert not re.search(r"0x[0-9a-f]{6}", message), message  # no one knows things by address
    return message


# Feeds


def test_a_placeholder_that_is_needed_and_not_fed(program: Program) -> None:
    run = program.session.run

    refused(lambda: run(program.fetches, {program.x: X}), "labels", "feed")
    refused(lambda: run(program.logits), "rows", "feed")
    refused(lambda: run(program.train, {}), "rows", "labels")
    callable_of = program.session.make_callable
    refused(lambda: callable_of(program.loss, [program.x])(X), "labels", "feed_list")


def test_a_callable_of_what_cannot_be_fed(program: Program) -> None:
    make = program.session.make_callable

    refused(lambda: make(program.loss, [program.x, "labelz"]), "labelz")
    refused(lambda: make(program.loss, [program.x, 3]), "feed")
    refused(lambda: make(program.logits, program.x), "feed_list")  # a list was meant


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.ones((4, 3), "float32"), ["[?,2]", "[4,3]"]),
        (np.ones(2, "float32"), ["[?,2]", "[2]"]),
        (1.0, ["[?,2]"]),
        ([[1.0, 2.0], [3.0]], ["[?,2]"]),
    ],
    ids=["size", "axes", "number", "ragged"],
)
def test_a_feed_of_another_shape(program: Program, value: Any, named: list[str]) -> None:
    feed = {program.x: value, program.y: Y}

    refused(lambda: program.session.run(program.fetches, feed), "rows", *named)
    step = program.session.make_callable(program.fetches, [program.x, program.y])
    refused(lambda: step(value, Y), "rows", *named)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Y + 0.5, ["int32", "float"]),
        (Y.astype("float32"), ["int32", "float32"]),
        (["a", "b", "c", "d"], ["int32"]),
        (None, ["int32", "None"]),
        (np.array([0, 1, 2, 2**40]), ["int32"]),
    ],
    ids=["fractions", "float", "text", "none", "too-large"],
)
def test_a_feed_of_another_dtype(program: Program, value: Any, named: list[str]) -> None:
    feed = {program.x: X, program.y: value}

    refused(lambda: program.session.run(program.fetches, feed), "labels", *named)


def test_batches_that_do_not_fit_together_change_nothing(program: Program) -> None:
    feed = {program.x: X, program.y: np.arange(3, dtype="int32")}  # four rows, three labels

    with pytest.raises(Exception) as caught:  # noqa: PT011 (each engine has its own words)
        program.session.run(program.fetches, feed)
    assert "sample_weight" not in str(caught.value)  # there is none in this program


@pytest.mark.plain
@pytest.mark.parametrize("key", [3, ("rows",), None, object], ids=repr)
def test_a_key_that_is_no_tensor(program: Program, key: Any) -> None:
    feed = {program.x: X, program.y: Y, key: 1.0}

    refused(lambda: program.session.run(program.fetches, feed), "feed_dict")


@pytest.mark.plain
def test_a_key_that_is_an_operation(program: Program) -> None:
    feed = {program.x: X, program.y: Y, program.train: 1.0}

    refused(lambda: program.session.run(program.fetches, feed), "train")


def test_a_key_of_a_name_that_is_not_there(program: Program) -> None:
    feed = {"rowz": X, program.y: Y}

    message = refused(lambda: program.session.run(program.fetches, feed), "rowz")
    assert "rows" in message  # the one that was meant


@pytest.mark.plain
def test_a_tensor_that_is_fed_twice(program: Program) -> None:
    run = program.session.run

    refused(lambda: run(program.logits, {program.x: X, "rows": X}), "`rows`", "'rows'", "two")
    refused(lambda: run(program.logits, {"rows:0": X, "rows": X}), "'rows:0' and 'rows'")


def test_a_feed_that_is_no_dict(program: Program) -> None:
    refused(lambda: program.session.run(program.fetches, [X, Y]), "feed_dict")


# Fetches


@pytest.mark.plain
@pytest.mark.parametrize("fetch", [3.0, None, object, np.ones(2)], ids=repr)
@pytest.mark.parametrize("nested", [False, True])
def test_a_fetch_that_is_no_tensor(program: Program, fetch: Any, nested: bool) -> None:
    fetches = {"a": [program.train, fetch]} if nested else fetch

    refused(lambda: program.session.run(fetches, {program.x: X, program.y: Y}), "fetch")


@pytest.mark.plain
def test_a_fetch_of_a_name_that_is_not_there(program: Program) -> None:
    message = refused(lambda: program.session.run([program.train, "los"]), "los")

    assert "'loss'" in message  # the one that was meant
    refused(lambda: program.session.run("loss:1", {program.x: X, program.y: Y}), "loss:1")


def test_what_belongs_to_another_graph(program: Program) -> None:
    with graph.Graph().as_default():
        theirs = graph.placeholder("float32", [], name="theirs")
        more = theirs + 1.0
        v = graph.Variable(1.0, name="other_variable")
        step = v.assign_add(1.0)
    run, feed = program.session.run, {program.x: X, program.y: Y}

    refused(lambda: run([program.train, theirs], feed), "theirs", "graph")
    refused(lambda: run([program.train, more], feed), "graph")
    refused(lambda: run([program.train, v], feed), "graph")
    refused(lambda: run([program.train, step], feed), "graph")
    refused(lambda: run([program.train, "theirs"], feed), "theirs")
    assert v.numpy() == 1.0


def test_an_input_of_keras_belongs_to_no_graph(program: Program) -> None:
    theirs = keras.Input((2,), name="theirs")

    feed = {program.x: X, program.y: Y}
    refused(lambda: program.session.run([program.train, theirs * 2.0], feed), "theirs")


# Sessions


def test_a_closed_session() -> None:
    program = Program()
    before = values_of(program.state)
    step = program.session.make_callable(program.fetches, [program.x, program.y])
    program.session.close()
    program.session.close()  # twice is once

    feed = {program.x: X, program.y: Y}
    refused(lambda: program.session.run(program.fetches, feed), "closed")
    refused(lambda: program.session.make_callable(program.fetches), "closed")
    refused(lambda: step(X, Y), "closed")
    assert_same(program.state, before, rtol=0, atol=0)


@pytest.mark.plain
def test_no_default_session(program: Program) -> None:
    for call in (program.w.eval, program.loss.eval, program.x.eval, program.train.run):
        refused(call, "session", "with")


# Building


@pytest.mark.plain
def test_a_placeholder_of_unknown_rank() -> None:
    refused(lambda: graph.placeholder("float32", None, name="rows"), "shape", "None")


@pytest.mark.plain
@pytest.mark.parametrize(
    ("dtype", "shape"), [("float33", [2]), ("float32", [-1]), ("float32", ["a"]), (3, [2])]
)
def test_a_placeholder_of_no_dtype_or_shape(dtype: Any, shape: Any) -> None:
    refused(lambda: graph.placeholder(dtype, shape))


def test_a_variable_that_would_depend_on_a_placeholder(program: Program) -> None:
    refused(lambda: graph.Variable(program.x * 2.0), "rows", "initial_value")


def test_values_that_do_not_fit_a_variable(program: Program) -> None:
    for call in (program.w.assign, program.w.load):
        message = refused(lambda call=call: call(np.ones((3, 3), "float32")), "value")
        assert "2,3" in message.replace(" ", "")  # the shape that it has
        assert "3,3" in message.replace(" ", "")  # and that of the value


@pytest.mark.parametrize("value", ["text", None, object, [[1.0], [1.0, 2.0]]])
def test_what_is_no_number(program: Program, value: Any) -> None:
    refused(lambda: graph.Variable(value), "graph.Variable", "initial_value", "numbers")
    refused(lambda: graph.constant(value), "graph.constant", "value", "numbers")
    refused(lambda: program.w.load(value), "Variable.load", "value", "numbers")
    refused(lambda: program.w.assign(value), "graph.assign", "value", "numbers")


def test_gradients_without_their_variables(program: Program) -> None:
    found = graph.gradients(program.loss, [program.w])
    apply = graph.train.apply_gradients

    refused(lambda: apply(program.optimizer, found), "grads_and_vars", "pairs", "zip(")


def test_a_feed_that_is_a_symbolic_tensor(program: Program) -> None:
    run = program.session.run
    for value in (program.x * 2.0, program.w):
        refused(lambda v=value: run(program.logits, {program.x: v}), "feed_dict[rows]", "no value")


def test_a_feed_of_what_keras_made_is_named_by_its_operation(program: Program) -> None:
    hidden = ops.tanh(program.x)
    name = hidden._keras_history.operation.name
    wide = np.ones((2, 7), "float32")

    refused(lambda: program.session.run(hidden + 1.0, {hidden: wide}), f"feed_dict[{name}]")


@pytest.mark.plain
def test_a_session_of_what_is_no_graph() -> None:
    refused(lambda: graph.Session("program"), "graph.Graph", "a str")


@pytest.mark.plain
def test_assigning_to_what_is_no_variable(program: Program) -> None:
    refused(lambda: graph.assign(program.loss, 1.0), "ref")


@pytest.mark.plain
def test_gradients_of_what_is_no_tensor_and_by_what_is_none(program: Program) -> None:
    refused(lambda: graph.gradients(object, [program.w]), "ys")
    refused(lambda: graph.gradients(program.loss, [program.w, "weights?"]), "xs")
    refused(lambda: graph.gradients(program.loss, [program.train]), "xs")


@pytest.mark.plain
def test_an_operation_is_needed_for_an_order_and_a_group(program: Program) -> None:
    refused(lambda: graph.group(program.train, 3), "group")

    def block() -> None:
        with graph.control_dependencies([3]):
            pass

    refused(block, "control_dependencies")
    assert graph.identity(program.w, name="after").name  # the block has ended


def test_nothing_to_train(program: Program) -> None:
    constant = graph.constant(1.0)

    refused(lambda: graph.train.minimize("sgd", program.loss, var_list=[]), "var_list")
    refused(lambda: graph.train.apply_gradients("sgd", []), "grads_and_vars")
    refused(lambda: graph.train.apply_gradients("sgd", [(constant, constant)]), "grads_and_vars")
    refused(lambda: graph.train.minimize(3, program.loss), "optimizer")
    refused(lambda: graph.train.minimize("sdg", program.loss), "optimizer")


# Failures inside


def test_a_function_that_fails_while_it_is_traced_changes_nothing(program: Program) -> None:
    armed = []

    def fails(a: Any) -> Any:
        if armed:
            raise RuntimeError("mine")
        return a

    node = graph.call(fails, program.loss)
    armed.append(True)
    feed = {program.x: X, program.y: Y}

    with pytest.raises(RuntimeError, match="mine"):
        program.session.run([program.train, node], feed)
    assert np.isfinite(program.session.run(program.loss, feed))


def test_a_callback_that_fails_at_run_time_changes_nothing(program: Program) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("mine")

    def watched(a: Any) -> Any:
        ts.callback(fails, a)
        return a

    node = graph.call(watched, program.loss)

    with pytest.raises(RuntimeError, match="mine"):
        program.session.run([program.train, node], {program.x: X, program.y: Y})


def test_a_run_that_was_refused_leaves_a_dropout_as_it_was() -> None:
    x = graph.placeholder("float32", [None])
    drop = layers.Dropout(0.5, seed=1)
    out = drop(x, training=True)
    before = values_of(drop.variables)

    refused(lambda: graph.Session().run(out))

    assert_same(drop.variables, before, rtol=0, atol=0)
