"""What a piece of Python takes from around it, read off its bytecode."""

from __future__ import annotations

import argparse
import ast
import asyncio.tasks
import contextlib
import dataclasses
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest

from trainstep._surroundings import bytecode
from trainstep._surroundings.bytecode import changed_at, scan, unknown_instructions
from trainstep._surroundings.code_model import Path

pytestmark = pytest.mark.plain

alpha = 1.0
config = {"lr": 1.0, "deep": {"x": 2.0}}
seen: list[Any] = []
helper: Any = None


def reads(fn: Callable[..., Any]) -> set[str]:
    found = scan(fn.__code__)
    paths = [*found.reads]
    for call in found.calls:
        paths += [
            p for p in (call.path, *call.args, *call.keywords.values()) if isinstance(p, Path)
        ]
    return {text(path) for path in paths}


def writes(fn: Callable[..., Any]) -> set[str]:
    return {text(path) for path in scan(fn.__code__).writes}


def text(path: Path) -> str:
    steps = "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path.steps)
    return f"{path.scope} {path.name}{steps}"


def a_global() -> Any:
    return alpha


def an_entry() -> Any:
    return config["deep"]["x"]


def an_attribute(self: Any) -> Any:
    return self.options.alpha


def an_alias(self: Any) -> Any:
    options = self.options
    return options.alpha


def by_getattr(self: Any) -> Any:
    return getattr(self, "alpha")


def either(self: Any) -> Any:
    return self.a if self.flag else self.b


def unpacked(self: Any) -> Any:
    a, b = self.pair
    return a + b


def looped(self: Any) -> Any:
    return [w + 1 for w in self.weights]


def one_or_the_other(self: Any) -> Any:
    return (self.cfg or config["deep"]).alpha


def hidden_by_a_comprehension(self: Any) -> Any:
    each = self.options
    found = [each.beta for each in self.items]
    return found, each.alpha


def in_a_slice(self: Any) -> Any:
    return self.weights[self.start : 3]


def matched(self: Any) -> Any:
    match self.mode:
        case "fast":
            return self.a
        case _:
            return self.b


def with_keywords(self: Any) -> Any:
    return helper(x=self.cfg, y=[alpha, *self.rest])


def in_text(self: Any) -> Any:
    return f"{self.alpha!r:>10}"


def starred(self: Any) -> Any:
    return helper(*self.args, **self.options)


def chained(self: Any) -> Any:
    return 0 < self.low < self.high


def in_a_try(self: Any) -> Any:
    try:
        with self.lock:
            return self.inside
    except ValueError:
        return self.after
    finally:
        self.closed


def by_walrus(self: Any) -> Any:
    if (found := self.alpha) > 1:
        return found
    return self.beta


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (a_global, {"global alpha"}),
        (an_entry, {"global config['deep']['x']"}),
        (an_attribute, {"local self.options.alpha"}),
        (an_alias, {"local self.options.alpha"}),
        (by_getattr, {"local self.alpha"}),
        (either, {"local self.a", "local self.b", "local self.flag"}),
        (unpacked, {"local self.pair[0]", "local self.pair[1]"}),
        (looped, {"local self.weights"}),
        (in_text, {"local self.alpha"}),
        (one_or_the_other, {"local self.cfg.alpha", "global config['deep'].alpha"}),
        (
            hidden_by_a_comprehension,
            {"local self.options.alpha", "local self.items"}
            # Before Python 3.12 a comprehension is a function of its own.
            | ({"local self.items[None].beta"} if sys.version_info >= (3, 12) else set()),
        ),
        (in_a_slice, {"local self.weights", "local self.start"}),
        (matched, {"local self.mode", "local self.a", "local self.b"}),
        (with_keywords, {"local self.cfg", "global alpha", "local self.rest", "global helper"}),
        (starred, {"local self.args", "local self.options", "global helper"}),
        (chained, {"local self.low", "local self.high"}),
        (in_a_try, {"local self.inside", "local self.after", "local self.lock"}),
        (by_walrus, {"local self.alpha", "local self.beta"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_read_is_found(fn: Callable[..., Any], expected: set[str]) -> None:
    assert expected <= reads(fn)


def test_a_local_variable_is_nothing_around_the_code() -> None:
    def own(x: Any) -> Any:
        total = x
        kept = []
        kept.append(total)
        return kept

    assert {p for p in reads(own) if not p.startswith("local x")} == set()
    assert writes(own) == set()


def test_a_name_that_is_bound_twice_is_unknown() -> None:
    def twice(self: Any, other: Any) -> Any:
        found = self.a
        if other:
            found = other.b
        return found.alpha

    assert not any("alpha" in path for path in reads(twice))


def test_what_is_written_is_found() -> None:
    total = 0

    def changes(self: Any, x: Any) -> None:
        global alpha
        nonlocal total
        alpha = x
        total += 1
        self.count += 1
        self.table["k"] = x
        config["lr"] = x
        setattr(self, "name", x)
        del self.old

    assert writes(changes) == {
        "global alpha",
        "free total",
        "local self.count",
        "local self.table['k']",
        "global config['lr']",
        "local self.name",
        "local self.old",
    }


def test_calls_know_what_they_are_given() -> None:
    def calls(self: Any) -> Any:
        return helper(self.cfg, 3, rate=alpha)

    (call,) = scan(calls.__code__).calls
    assert text(call.path) == "global helper"
    assert isinstance(call.args[0], Path)
    assert text(call.args[0]) == "local self.cfg"
    assert isinstance(call.keywords["rate"], Path)


def test_the_line_that_changes_a_parameter_is_found() -> None:
    def grows(x: Any, kept: list[Any]) -> None:
        y = x + 1
        kept.append(y)

    first = grows.__code__.co_firstlineno
    assert changed_at(grows.__code__, "kept") == first + 2
    assert changed_at(grows.__code__, "other") == first


def test_every_instruction_of_this_python_is_known() -> None:
    assert unknown_instructions() == set()


def test_every_function_of_the_standard_library_is_scanned_to_its_end() -> None:
    """The scan compares the size of its stack with `dis` after every instruction."""
    modules = (argparse, ast, asyncio.tasks, contextlib, dataclasses, enum, inspect, typing)

    def codes(code: types.CodeType) -> Any:
        yield code
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from codes(inner)

    for module in modules:
        source = compile(inspect.getsource(module), str(module.__file__), "exec")
        assert {scan(code).unknown for code in codes(source)} == {""}


def test_an_instruction_that_is_not_known_ends_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(bytecode.EFFECTS, "COMPARE_OP")
    scan.cache_clear()
    assert scan(chained.__code__).unknown == "the instruction COMPARE_OP"
    assert unknown_instructions() == {"COMPARE_OP"}
    scan.cache_clear()


def test_an_instruction_that_means_something_else_ends_the_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(bytecode.EFFECTS, "COMPARE_OP", (1, 1))
    scan.cache_clear()
    assert scan(chained.__code__).unknown == "the instruction COMPARE_OP"
    scan.cache_clear()


def test_an_unknown_python_is_not_guessed_at(unknown_python: None) -> None:
    assert "the instructions of Python 3." in scan(chained.__code__).unknown
