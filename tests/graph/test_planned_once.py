"""A set of fetches is planned once; later runs find the compiled callable by a lookup."""

from __future__ import annotations

import collections
import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from keras import layers

import trainstep as ts
from trainstep import graph
from trainstep.graph import _session


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    left: Any
    right: Any


class Names(list):  # a structure of ours that optree does not know
    pass


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The fetches of every plan that a session makes."""
    made: list[Any] = []

    class Counted(_session.Plan):
        def __init__(self, of: Any, fetches: Any, fed: Any) -> None:
            made.append(fetches)
            super().__init__(of, fetches, fed)

    monkeypatch.setattr(_session, "Plan", Counted)
    return made


@pytest.fixture
def session() -> graph.Session:
    return graph.Session()


def test_equal_structures_of_the_same_tensors_are_planned_once(
    session: graph.Session, plans: list[Any]
) -> None:
    x, v = graph.placeholder("float32", [], name="x"), graph.Variable(3.0, name="v")
    more, keras_variable = x + 1.0, v.variable

    structures: list[Callable[[], Any]] = [
        lambda: more,
        lambda: [more, v],
        lambda: (more, [v, v], keras_variable),
        lambda: {"b": more, "a": {"c": Pair(v, more)}},
        lambda: Record(more, [v]),
        lambda: Names([more, v]),
        lambda: "v",
        lambda: ["".join("v:0"), more],  # an equal string, and another object
        lambda: [],
    ]
    for make in structures:
        first = session.run(make(), {x: 1.0})
        planned = len(plans)
        for feeds in ({x: 1.0}, {x: 1.0}, {"".join("x"): 1.0}, collections.UserDict({x: 1.0})):
            again = session.run(make(), feeds)
            assert again == first
            assert type(again) is type(first)
        assert len(plans) == planned, make()


# `run`, the prepared call with its two list comprehensions, a conversion of each of the two feeds,
# and one value read. Frames of the compiled step differ by engine, and are not counted.
FRAMES = 7
ROOMS = [Path(ts.__file__).parent / room for room in ("graph", "_common")]


def test_a_repeated_run_has_few_frames_of_ours(session: graph.Session) -> None:
    x, y = graph.placeholder("float32", []), graph.placeholder("float32", [])
    w = graph.Variable(1.0)
    step = w.assign_add(x * y)
    feeds = {x: np.ones((), "float32"), y: np.ones((), "float32")}
    frames = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and set(ROOMS) & set(Path(frame.f_code.co_filename).parents):
            frames.append(frame.f_code.co_name)

    def count(fetches: Callable[[], Any]) -> int:
        for _ in range(3):
            session.run(fetches(), feeds)
        given = fetches()
        frames.clear()
        sys.setprofile(note)
        try:
            session.run(given, feeds)
        finally:
            sys.setprofile(None)
        return len(frames)

    assert count(lambda: [step, w]) <= FRAMES, frames
    assert count(lambda: {"a": step, "b": (w, [{"c": [[step]]}])}) <= FRAMES, frames
    assert count(lambda: [step] * 50 + [w]) <= FRAMES, frames


def test_a_mutated_structure_is_another_one(session: graph.Session) -> None:
    a, b = graph.constant(1.0), graph.constant(2.0)
    flat, nested, record, names = [a], {"k": [a]}, Record(a, [a]), Names([a])

    for _ in range(2):
        assert session.run(flat) == [1.0]
        assert session.run(nested) == {"k": [1.0]}
        assert session.run(record) == Record(1.0, [1.0])
        assert session.run(names) == [1.0]
    flat.append(b)
    nested["k"][0] = b
    record.right, names[0] = [b, a], b

    for _ in range(2):
        assert session.run(flat) == [1.0, 2.0]
        assert session.run(nested) == {"k": [2.0]}
        assert session.run(record) == Record(1.0, [2.0, 1.0])
        assert session.run(names) == [2.0]
    flat.clear()
    assert session.run(flat) == []


def test_a_callable_keeps_the_fetches_that_it_was_made_of(session: graph.Session) -> None:
    a, b = graph.constant(1.0), graph.constant(2.0)
    fetches, record = [[a], (b,)], Record([a], b)
    call, call_record = session.make_callable(fetches), session.make_callable(record)

    fetches.append(a)
    record.left.append(b)

    assert call() == [[1.0], (2.0,)]
    assert call_record() == Record([1.0], 2.0)


def test_the_same_fetches_with_other_feeds_are_another_run(session: graph.Session) -> None:
    x = graph.placeholder("float32", [], name="x")
    half = graph.identity(x * 0.5, name="half")
    out = half + 1.0

    for _ in range(2):
        assert session.run(out, {x: 4.0}) == 3.0
        assert session.run(out, {half: 4.0}) == 5.0
        assert session.run(out, {x: 8.0, half: 4.0}) == 5.0
        assert session.run(out, {half: 4.0, x: 8.0}) == 5.0
        with pytest.raises(ts.ArgumentError, match="two values for one tensor"):
            session.run(out, {"x": 4.0, x: 4.0})
        with pytest.raises(ts.ArgumentError, match="a dict of values"):
            session.run(out, [x])


def test_a_new_tensor_may_get_a_name_that_was_fetched_as_that_of_a_layer(
    session: graph.Session,
) -> None:
    x = graph.placeholder("float32", [None, 1])
    dense = layers.Dense(1, name="named", kernel_initializer="ones")
    dense(x)
    feeds = {x: [[3.0]]}

    assert session.run("named", feeds).tolist() == [[3.0]]
    dense(x * 2.0)  # the layer's first output keeps the name
    assert session.run("named", feeds).tolist() == [[3.0]]
    assert graph.Session().run("named", feeds).tolist() == [[3.0]]
    graph.identity(x + 1.0, name="named")
    assert session.run("named", feeds).tolist() == [[4.0]]


def test_a_new_default_graph_changes_nothing_for_a_session(session: graph.Session) -> None:
    graph.constant(1.0, name="c")
    assert session.run(["c"]) == [1.0]

    graph.reset_default_graph()
    other = graph.constant(2.0, name="c")

    assert session.run(["c"]) == [1.0]
    assert graph.Session().run(["c"]) == [2.0]
    with pytest.raises(ts.ArgumentError, match="another graph"):
        session.run([other])


def test_a_run_inside_an_open_block_is_planned_again_after_it(session: graph.Session) -> None:
    w = graph.Variable(1.0)
    with graph.control_dependencies([w.assign_add(1.0)]):
        later = w * 10.0
        assert session.run(later) == 10.0  # the block is not complete

    assert session.run(later) == 20.0
    assert session.run(later) == 30.0


def test_a_tensor_of_a_branch_is_refused_after_it_though_it_was_run_inside(
    session: graph.Session,
) -> None:
    x, inner = graph.constant(2.0), []

    def branch() -> Any:
        inner.append(x * 3.0)
        assert session.run(inner[0]) == 6.0
        return inner[0]

    graph.cond(x > 0.0, branch, lambda: x)

    with pytest.raises(ts.ArgumentError, match=r"graph\.cond"):
        session.run(inner[0])


def test_the_table_of_prepared_runs_is_bounded(
    session: graph.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_session, "_MAX_PREPARED", 4)
    tensors = [graph.constant(float(i)) for i in range(6)]

    for _ in range(2):
        assert [session.run(each) for each in tensors] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert len(session._prepared) == 4
    assert session.ledger.traces == 6  # a plan that was evicted is made again, a program is not


def test_a_session_and_its_graph_are_collected_together() -> None:
    with graph.Graph().as_default() as own:
        x = graph.placeholder("float32", [])
        session = graph.Session()
        for _ in range(2):
            session.run([x + 1.0, x], {x: 1.0})
    dead = [weakref.ref(session), weakref.ref(own)]

    del session, own, x
    gc.collect()

    assert [each() for each in dead] == [None, None]
