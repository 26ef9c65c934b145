"""Messages between processes: what they carry, what they refuse, and that they run nothing."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trainstep as ts
from trainstep._engines.shared.messages import decode, encode

pytestmark = pytest.mark.plain


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


PLAIN = [
    None,
    True,
    -(2**70),
    0.1,
    float("inf"),
    "text with \u00e9 and \0",
    [],
    [1, [None, (2, 3)]],
    (),
    ("manifest", {"tuple": [1], "array": {"dict": 1.5}}),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_nan_arrives() -> None:
    assert np.isnan(decode(encode(float("nan"))))


ARRAYS = [
    np.arange(6, dtype="int32").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(6, dtype=">f4")[::2],
    np.array([True, False]),
    np.array(3, "uint8"),
    np.zeros((0, 4), "float16"),
    np.array([1 + 2j], "complex64"),
    np.array([0.1, -3.0], ml_dtypes.bfloat16),
    np.array([0.5], ml_dtypes.float8_e4m3fn),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.name}{a.shape}")
def test_arrays_arrive_to_the_bit_and_can_be_written(array: Any) -> None:
    before, found, after = decode(encode([1, array, "x"]))
    assert (before, after) == (1, "x")
    assert (found.dtype.name, found.shape) == (array.dtype.name, array.shape)
    assert found.tobytes() == array.tobytes() or array.dtype.byteorder == ">"
    assert np.array_equal(found, array)
    assert found.flags.writeable
    assert found.flags.owndata


def test_a_numpy_scalar_arrives_as_an_array_without_axes() -> None:
    found = decode(encode([np.uint32(7)]))
    assert found[0].dtype == "uint32"
    assert int(found[0]) == 7


REFUSED = [
    (b"bytes", "builtins.bytes"),
    ({1: 2}, "a dict with keys that are not str"),
    ({1, 2}, "builtins.set"),
    (np.array([None]), "a NumPy array of dtype object"),
    (np.array(["a"]), "a NumPy array of dtype <U1"),
    (np.zeros(1, "i4,i4"), "a NumPy array of dtype [('f0'"),
    (Bomb(Path()), "tests.distribution.test_messages.Bomb"),
    (print, "builtins.builtin_function_or_method"),
]


@pytest.mark.parametrize(("value", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_other_values_are_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(ts.StrategyError) as caught:
        encode({"deep": [value]})
    for part in ("cannot be sent", "expected: None, bool", f"got:      {name}", "to fix:"):
        assert part in str(caught.value)


def message(described: Any, elements: bytes = b"") -> bytes:
    header = json.dumps(described).encode()
    return len(header).to_bytes(8, "big") + header + elements


def malformed() -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "short", b"\0\0"
    yield "no JSON", (3).to_bytes(8, "big") + b"{'a"
    yield "too long a header", (2**63).to_bytes(8, "big") + b"[]"
    yield "a deep header", (10**5).to_bytes(8, "big") + b"[" * 10**5
    yield "an unknown kind", message({"object": "os.system"})
    yield "two kinds", message({"tuple": [], "dict": {}})
    yield "a dict that is none", message({"dict": [1]})
    yield "a tuple that is none", message({"tuple": 1})
    yield "an array of objects", message({"array": ["object", [1]]}, b"\0" * 8)
    yield "an array of any dtype", message({"array": [["int8"], [1]]}, b"\0")
    yield "a negative size", message({"array": ["int8", [-1]]}, b"\0")
    yield "a huge array", message({"array": ["int8", [2**62, 2**62]]}, b"\0")
    yield "a huge array of nothing", message({"array": ["int8", [0, 2**70]]})
    yield "too few elements", message({"array": ["int32", [2]]}, b"\0" * 7)
    yield "too many elements", message({"array": ["int32", [1]]}, b"\0" * 5)
    yield "elements of nothing", message(1, b"\0")


@pytest.mark.parametrize("data", [pytest.param(d, id=name) for name, d in malformed()])
def test_a_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(ts.StrategyError) as caught:
        decode(data)
    for part in ("cannot be read", "expected:", f"got:      {len(data)} bytes (", "to fix:"):
        assert part in str(caught.value)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    for data in (bomb, message({"array": ["object", [1]]}, bomb), message(1, bomb)):
        with pytest.raises(ts.StrategyError, match="cannot be read"):
            decode(data)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()  # it would have worked
