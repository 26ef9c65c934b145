"""Generated functions: tracebacks show their lines, and names never stand for two objects."""

from __future__ import annotations

import gc
import linecache
import sys
import traceback
from typing import Any

import pytest

from trainstep._common import user_code
from trainstep._common.codegen import Source, define, merge

pytestmark = pytest.mark.plain


def file_of(fn: Any) -> str:
    return str(fn.__code__.co_filename)


def test_a_traceback_shows_the_line_that_failed() -> None:
    divide = define("divide(x)", "y = 0\nreturn x / y", {})

    with pytest.raises(ZeroDivisionError) as caught:
        divide(1)

    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{file_of(divide)}", line 3, in divide' in shown
    assert "return x / y" in shown


def test_each_function_has_a_file_name_of_its_own() -> None:
    first, second = (define("look()", f"return {n}", {}) for n in (1, 2))

    assert file_of(first) != file_of(second)
    assert file_of(first).startswith("<trainstep look ")
    assert linecache.getline(file_of(first), 2) == "    return 1\n"
    assert linecache.getline(file_of(second), 2) == "    return 2\n"


def test_lines_survive_a_check_of_the_cache() -> None:
    look = define("look()", "return 1", {})

    linecache.checkcache()

    assert linecache.getline(file_of(look), 2) == "    return 1\n"


def test_lines_are_forgotten_with_the_function() -> None:
    before = len(linecache.cache)
    file = file_of(define("look()", "return 1", {}))  # dropped at once
    for _ in range(100):
        cycle: list[Any] = []
        cycle += [cycle, define("look()", "return 1", {})]
    del cycle
    gc.collect()

    assert file not in linecache.cache
    assert len(linecache.cache) <= before


def test_a_generated_frame_is_no_users_code() -> None:
    frame = define("frame()", "return sys._getframe()", {"sys": sys})()

    assert not user_code.is_users(frame)
    assert not user_code.is_outside(frame)


def test_merge_joins_names() -> None:
    shared = object()

    names = merge(Source("a", {"a": 1, "s": shared}), Source("b", {"b": 2, "s": shared}))

    assert names == {"a": 1, "b": 2, "s": shared}


def test_merge_refuses_a_name_for_two_objects() -> None:
    with pytest.raises(ValueError, match="`limit` stands for two objects, a list and a tuple"):
        merge(Source("a", {"limit": []}), Source("b"), Source("c", {"limit": ()}))


def test_merge_refuses_equal_objects_that_are_not_one() -> None:
    with pytest.raises(ValueError, match="`seen` stands for two objects"):
        merge(Source("a", {"seen": []}), Source("b", {"seen": []}))
