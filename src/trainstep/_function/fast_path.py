"""The fast path of a cache hit: one generated function per program.

A training loop makes the same call over and over. The generated function compares a call with the
last one, which costs a third of flattening it and looking its key up, and then runs the program.
For any other call it returns `MISS`, and `Function._call` handles it. A loop over batches without
outputs (`Function.loop`) is generated, too.
"""

from __future__ import annotations

import textwrap
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from trainstep._common.codegen import Source, define, merge
from trainstep._engines import Inlined, Unread
from trainstep._function.arguments import Arguments
from trainstep._function.program_cache import MISS, FastPath, Program
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
    # The lock of a merged domain protects nothing. `Function._call` finds the domain in use.
    if domain.parent is not None:
        return MISS
    try:
        if {flags}:
            return MISS
    except AttributeError:  # a layer was freed, so no later call can use this program
        return MISS
{run}
{after}
"""


# The same for many calls, until one misses or the stop flag is set, whose place is read only once.
_LOOP = """
stop_attributes, stop_name = stop.attributes, stop.name
ran = 0
for first in batches:
    args = first + last
{body}
    ran += 1
    if stop_attributes.get(stop_name):
        break
return ran, None
"""

_STALE = """try:
    if {changed}:
        return MISS
except Exception:  # an object that the step read no longer exists
    return MISS
"""


def fast_path(
    program: Program, args: Sequence[Any], leaves: Sequence[Any], arguments: Arguments
) -> FastPath:
    """Returns the fast path to `program` for calls like this one, generated once.

    It always misses unless every argument is an array that needs no cast, None, a bool or an
    object.
    """
    kinds = tuple((type(value), getattr(value, "dtype", None)) for value in args)
    path = program.fast_paths.get(kinds)
    if path is None:
        path = program.fast_paths[kinds] = _generate(program, args, leaves, arguments)
    return path


def _generate(
    program: Program, args: Sequence[Any], leaves: Sequence[Any], arguments: Arguments
) -> FastPath:
    names: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    differ = []
    for index, value in enumerate(args):
        name = f"a{index}"
        if arguments.is_plain(value):
            if leaves[len(arrays)] is not value:  # it was cast
                return FastPath()
            arrays[name] = value
            differ.append(f"type({name}) is not {name}_type or {name}.dtype is not {name}_dtype")
            if program.family is None:  # with dynamic sizes, the cache looks it up by shapes
                differ.append(f"{name}.shape != {name}_shape")
            names[f"{name}_type"] = type(value)
            names[f"{name}_shape"], names[f"{name}_dtype"] = value.shape, value.dtype
        elif value is None or isinstance(value, bool):
            differ.append(f"{name} is not {value}")
        elif arguments.is_object(value) and hasattr(value, "__weakref__"):
            differ.append(f"{name} is not {name}_ref()")
            names[f"{name}_ref"] = weakref.ref(value)
        else:
            return FastPath()
    if not differ:
        return FastPath()
    stale, flags = program.watch.captures_changed, program.watch.flags_changed
    run, build = _run(program, arrays), program.build.source
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
    each = text(*_run_without_outputs(program, run, arrays))
    each = each.replace("return MISS", "return ran, first")
    loop = _LOOP.format(body=textwrap.indent(each, "    "))
    return FastPath(
        define("hit(args, cells)", once, names),
        define("loop(batches, last, cells, stop)", loop, names),
    )


def _run(program: Program, arrays: dict[str, Any]) -> Source:
    """Returns statements that run the program on the named arrays and assign `outs`."""
    if isinstance(program.executable, Inlined):
        return program.executable.inline(arrays)
    return Source(f"outs = program.executable({_tuple(arrays)})")


def _run_without_outputs(program: Program, run: Source, arrays: Iterable[str]) -> tuple[str, str]:
    """Returns statements that run the program without outputs, and those after the lock."""
    if program.build.is_checked:  # a check reads the outputs
        return run.text, program.build.source.text
    if isinstance(program.executable, Unread):
        return f"program.executable.unread({_tuple(arrays)})", ""
    return run.text, ""


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
