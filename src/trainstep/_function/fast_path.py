"""The path of a hit, written out as one function for one program.

A loop makes the same call over and over. The function compares a call with the last one, which
costs a third of making its key and looking that up, and then runs the program; of anything else it
says `MISS`, and the call goes the long way. Where the loop is ours, it is written out, too.
"""

from __future__ import annotations

import textwrap
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from trainstep._common.codegen import Source, define, merge
from trainstep._engines import Inlined, Unread
from trainstep._function.arguments import Arguments
from trainstep._function.program_cache import MISS, Program, Ways
from trainstep._state.scopes import states

_HIT = """
if getattr(states.GLOBAL_STATE_TRACKER, "stateless_scope", None) is not None or not ({idle}):
    return MISS
if len(args) != {count}:
    return MISS
{arguments} = args
if {differ}:
    return MISS
{stale}domain = program.domain
with domain.lock:
    # A domain that was merged into another protects nothing: the long way finds the other.
    if domain.parent is not None:
        return MISS
    try:
        if {flags}:
            return MISS
    except AttributeError:  # a layer is gone, and a call that still needs it cannot come here
        return MISS
{run}
{after}
"""


# The same for one call after the other, until one is none for this program or it is to stop.
_LOOP = """
ran = 0
for first in batches:
    args = first + last
{body}
    ran += 1
    if flags.get(stop):
        break
return ran, None
"""

_STALE = """try:
    if {changed}:
        return MISS
except Exception:  # something that the step read is gone
    return MISS
"""


def hit(program: Program, args: Sequence[Any], leaves: Sequence[Any], arguments: Arguments) -> Ways:
    """The short ways to `program` for calls like this one.

    There are some if the arguments are arrays that enter as they are, None, bools and objects.
    """
    kinds = tuple((type(value), getattr(value, "dtype", None)) for value in args)
    ways = program.hits.get(kinds)
    if ways is None:
        ways = program.hits[kinds] = _written(program, args, leaves, arguments)
    return ways


def _written(
    program: Program, args: Sequence[Any], leaves: Sequence[Any], arguments: Arguments
) -> Ways:
    names: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    differ = []
    for index, value in enumerate(args):
        name = f"a{index}"
        if arguments.is_plain(value):
            if leaves[len(arrays)] is not value:  # cast to what the first call was
                return Ways()
            arrays[name] = value
            differ.append(f"type({name}) is not {name}_type or {name}.dtype is not {name}_dtype")
            if program.family is None:  # a program for sizes that vary is found by the shapes
                differ.append(f"{name}.shape != {name}_shape")
            names[f"{name}_type"] = type(value)
            names[f"{name}_shape"], names[f"{name}_dtype"] = value.shape, value.dtype
        elif value is None or isinstance(value, bool):
            differ.append(f"{name} is not {value}")
        elif arguments.is_object(value) and hasattr(value, "__weakref__"):
            differ.append(f"{name} is not {name}_ref()")
            names[f"{name}_ref"] = weakref.ref(value)
        else:
            return Ways()
    if not differ:
        return Ways()
    stale = program.watch.around
    flags, run, build = program.watch.flags, _run(program, arrays), program.build.source
    idle = arguments.engine.is_idle_source()
    names |= {"MISS": MISS, "states": states, "program": program}
    names = merge(Source("", names), idle, stale, flags, run, build)

    def text(run: str, after: str) -> str:
        return _HIT.format(
            idle=idle.text,
            count=len(args),
            arguments="".join(f"a{index}, " for index in range(len(args))),
            differ=" or ".join(differ),
            stale=_STALE.format(changed=stale.text) if stale.text else "",
            flags=flags.text,
            run=textwrap.indent(run, "    "),
            after=after,
        )

    once = text(run.text, f"return {build.text}")
    each = text(*_unread(program, run, arrays)).replace("return MISS", "return ran, first")
    loop = _LOOP.format(body=textwrap.indent(each, "    "))
    return Ways(
        define("hit(args, cells)", once, names),
        define("loop(batches, last, cells, flags, stop)", loop, names),
    )


def _run(program: Program, arrays: dict[str, Any]) -> Source:
    """Statements that run the program on the named arrays and leave its outputs in `outs`."""
    if isinstance(program.executable, Inlined):
        return program.executable.inline(arrays)
    return Source(f"outs = program.executable({_tuple(arrays)})")


def _unread(program: Program, run: Source, arrays: Iterable[str]) -> tuple[str, str]:
    """The same if nobody reads the outputs, and what is then done with them."""
    if program.build.is_checked:  # a check reads them
        return run.text, program.build.source.text
    if isinstance(program.executable, Unread):
        return f"program.executable.unread({_tuple(arrays)})", ""
    return run.text, ""


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
