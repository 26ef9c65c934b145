"""Indices that are tensors, and arrays of the engine on the left of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from keras import ops

import trainstep as ts
from tests.helpers import normal
from trainstep import graph

KEYS: dict[str, Callable[..., Any]] = {
    "x[i]": lambda x, i, j: x[i],
    "x[:, i]": lambda x, i, j: x[:, i],
    "x[..., i]": lambda x, i, j: x[..., i],
    "x[i, 1:, 0]": lambda x, i, j: x[i, 1:, 0],
    "x[i, :, i]": lambda x, i, j: x[i, :, i],
    "x[None, 1, i]": lambda x, i, j: x[None, 1, i],
    "x[j]": lambda x, i, j: x[j],
    "x[1:3, j, ::2]": lambda x, i, j: x[1:3, j, ::2],
    "x[i][j]": lambda x, i, j: x[i][j],
}


@pytest.mark.parametrize("key", KEYS)
def test_an_index_may_be_a_tensor(key: str) -> None:
    x = graph.placeholder("float32", [None, 3, 4])
    i, j = graph.placeholder("int32", []), graph.placeholder("int32", [None])
    data, several = normal(5, 3, 4), np.array([2, 0, -1])

    found, session = KEYS[key](x, i, j), graph.Session()

    for at in (0, 1, -1):
        got = session.run(found, {x: data, i: at, j: several})
        np.testing.assert_array_equal(got, KEYS[key](data, at, several))


def test_a_loop_reads_a_variable_element_by_element() -> None:
    v = graph.Variable([1.0, 2.0, 3.0])
    _, total = graph.while_loop(
        lambda i, total: i < 3, lambda i, total: (i + 1, total + v[i] ** 2), (0, 0.0), 3
    )
    (slope,) = graph.gradients(total, v)

    value, slopes = graph.Session().run([total, slope])

    assert value == 14.0
    np.testing.assert_array_equal(slopes, [2.0, 4.0, 6.0])


@pytest.mark.plain
@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (lambda x, i, j: x[:i], ["bounds are tensors", "keras.ops.slice"]),
        (lambda x, i, j: x[x > 0.0], ["a tensor of bool", "keras.ops.where"]),
        (lambda x, i, j: x[j, 0], ["beside other indices", "x[i][:, 0]"]),
        (lambda x, i, j: x[j, j], ["several tensors", "take_along_axis"]),
        (lambda x, i, j: x[i, i, i], ["3 keys for 2 axes", "remove"]),
    ],
)
def test_keys_that_are_refused(key: Callable[..., Any], parts: list[str]) -> None:
    x = graph.placeholder("float32", [None, 3])
    i, j = graph.placeholder("int32", []), graph.placeholder("int32", [None])

    with pytest.raises(ts.ArgumentError) as info:
        key(x, i, j)

    for part in ("x[...]", "integer tensors", *parts):
        assert part in str(info.value)


def test_an_array_of_the_engine_stands_on_the_left() -> None:
    x, w = graph.placeholder("float32", [None, 3]), graph.Variable(np.full(3, 4.0))
    two, data = ops.full((3,), 2.0), normal(2, 3)
    made = [two + x, two - x, two * x, two / w, two**x, ops.ones((4, 2)) @ x, two * (x + 1.0)]

    got = graph.Session().run(made, {x: data})

    wanted = [2 + data, 2 - data, 2 * data, np.full(3, 0.5), 2**data, np.ones((4, 2)) @ data]
    for mine, theirs in zip(got, [*wanted, 2 * (data + 1)], strict=True):
        # a handful of float32 operations, each of which rounds at 6e-8
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
