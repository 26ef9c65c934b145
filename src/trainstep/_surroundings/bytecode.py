"""Finds the names that code reads, writes and calls, from its bytecode, without running it.

    code --scan--> reads    `alpha`, `self.cfg.alpha`, `table["lr"]`, each with its line
                   writes   `global n; n = ...`, `self.x = ...`, `seen.append(...)`
                   calls    the called path, with its arguments
                   unknown  an instruction that this file does not know, if there is one

The scan simulates Python's stack. A value that it cannot derive is unknown (None), never wrong.
After every instruction the size of the stack is compared with `dis`: on a Python whose
instructions have changed, the scan ends, and says so in `unknown`.
"""

from __future__ import annotations

import dis
import functools
from collections import Counter
from itertools import islice, product
from types import CodeType
from typing import Any, NamedTuple

from trainstep._surroundings import instructions
from trainstep._surroundings.code_model import Call, Constant, LocalFunction, OneOf, Path, Scan
from trainstep._surroundings.instructions import EFFECTS, POPS_PER_ARGUMENT, VERSION

_MOST_CALLS = 16  # analyzed of a call whose arguments depend on branches
_CONSTANT_KEYS = (str, int, bytes, bool, type(None), float, tuple)


@functools.lru_cache(maxsize=4096)
def scan(code: CodeType) -> Scan:
    """The reads, writes and calls of `code`, except those of its own variables."""
    if VERSION not in instructions.SUPPORTED:
        return Scan(unknown=f"the instructions of Python {VERSION[0]}.{VERSION[1]}")
    counting = _StackMachine(code, Counter())
    unknown = counting.run()
    machine = _StackMachine(code, counting.bindings)
    machine.scan.unknown = unknown or machine.run()
    machine.scan.inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return machine.scan


def unknown_instructions() -> set[str]:
    """The instructions of the running Python that `scan` does not know."""
    known = {name[1:] for name in vars(_StackMachine) if name[1:].isupper()}
    return instructions.names() - known - EFFECTS.keys() - POPS_PER_ARGUMENT.keys()


def changed_at(code: CodeType, parameter: str) -> int:
    """The first line that changes the value of a parameter; without one, the code's first."""
    found = scan(code)
    writes = [line for path, line in found.writes.items() if path.name == parameter]
    calls = [call.line for call in found.calls if call.path.name == parameter]
    return min(writes or calls, default=code.co_firstlineno)


class _Hidden(NamedTuple):
    """The meaning of a local name before a comprehension, part of this code, uses that name."""

    name: str
    alias: Path | LocalFunction | OneOf | None


class _StackMachine:
    """Simulates the stack of one code object."""

    def __init__(self, code: CodeType, bindings: Counter[str]) -> None:
        self.scan = Scan()
        self._code = code
        self._free = set(code.co_freevars)
        self._constants = code.co_consts
        flags = bool(code.co_flags & 4) + bool(code.co_flags & 8)
        count = code.co_argcount + code.co_kwonlyargcount + flags
        self._assigned_once = {name for name, times in bindings.items() if times == 1}
        self._parameters = {name for name in code.co_varnames[:count] if not bindings[name]}
        self.bindings: Counter[str] = Counter()  # of each name, except by comprehensions
        # Since Python 3.13 LOAD_FAST also loads the cells of a new function's closure.
        self._cells = {*code.co_cellvars, *code.co_freevars} if VERSION >= (3, 13) else set()
        self._in_comprehension: set[str] = set()  # variables of comprehensions in this code
        self._stack: list[Any] = []
        self._added = 0  # values, since the instruction began
        self._stacks_at: dict[int, list[Any]] = {}
        self._handlers = instructions.handlers(code)
        self._keywords: tuple[str, ...] = ()
        self._line = code.co_firstlineno
        self._dead = False

    def run(self) -> str:
        """Simulates the code; returns what is unknown of it, or ""."""
        for instruction in dis.get_instructions(self._code):
            if not self.step(instruction):
                return f"the instruction {instruction.opname}"
        return ""

    def step(self, i: dis.Instruction) -> bool:
        """Simulates an instruction; returns whether it is known."""
        self._line = instructions.line(i) or self._line
        self._join(i.offset)
        for target, depth, pushed in self._handlers.get(i.offset, ()):
            self._jump(target, [*self._stack[:depth], *[None] * pushed])
        self._added = 0
        handler = getattr(self, f"_{i.opname}", None)
        top = self._stack[-1] if self._stack else None
        if handler is not None:
            handler(i)
        elif i.opname in EFFECTS:
            self._consume(*EFFECTS[i.opname])
        elif i.opname in POPS_PER_ARGUMENT:
            self._consume(POPS_PER_ARGUMENT[i.opname] * (i.arg or 0), 1)
        else:
            return False
        if not instructions.has_effect(i, self._added):
            return False
        if instructions.is_jump(i):
            self._jump(i.argval, self._after_jump(i, top))
        self._dead = i.opname in instructions.BLOCK_ENDS
        return True

    def _after_jump(self, i: dis.Instruction, top: Any) -> list[Any]:
        """The stack where a jump continues; `top` was on the stack before it."""
        more = instructions.effect(i, jump=True) - self._added
        if more < 0:
            return self._stack[:more]
        return self._stack + [top] * more  # `a or b` keeps `a` if it jumps

    def _jump(self, target: int, stack: list[Any]) -> None:
        """Records the stack of a jump, joined with those of other jumps to the same place."""
        other = self._stacks_at.get(target)
        self._stacks_at[target] = stack if other is None else _joined(other, stack)

    def _join(self, offset: int) -> None:
        """Joins the stacks of all jumps to an offset."""
        other = self._stacks_at.get(offset)
        if self._dead:
            self._stack = list(other or ())
        elif other is not None:
            self._stack = _joined(self._stack, other)

    def _push(self, *values: Any) -> None:
        self._stack += values
        self._added += len(values)

    def _pop(self) -> Any:
        self._added -= 1
        return self._stack.pop() if self._stack else None

    def _consume(self, pops: int, pushes: int) -> list[Any]:
        """Pops values, which counts as reading them, and pushes unknown ones."""
        popped = [self._pop() for _ in range(pops)][::-1]
        for value in popped:
            self._read(value)
        self._push(*[None] * pushes)
        return popped

    def _read(self, value: Any) -> None:
        for each in _paths(value):
            self.scan.reads.setdefault(each, self._line)

    def _write(self, owner: Any, kind: str, key: Any) -> None:
        for each in _paths(owner):
            self.scan.writes.setdefault(each.then(kind, key), self._line)

    # Names ----------------------------------------------------------------------------------

    def _LOAD_CONST(self, i: dis.Instruction) -> None:
        self._push(Constant(i.argval))

    def _LOAD_SMALL_INT(self, i: dis.Instruction) -> None:
        self._push(Constant(i.arg))

    def _LOAD_GLOBAL(self, i: dis.Instruction) -> None:
        # The order of both changed in Python 3.13; a called value is either of them.
        self._push(*[None] * ((i.arg or 0) & 1), Path("global", i.argval))

    def _LOAD_NAME(self, i: dis.Instruction) -> None:
        self._push(Path("global", i.argval))

    def _LOAD_FROM_DICT_OR_GLOBALS(self, i: dis.Instruction) -> None:
        self._pop()
        self._LOAD_NAME(i)

    def _load(self, name: str) -> None:
        known = self.scan.aliases.get(name)
        is_parameter = name in self._parameters and name not in self._in_comprehension
        self._push(known or (Path("local", name) if is_parameter else None))

    def _LOAD_FAST(self, i: dis.Instruction) -> None:
        for name in i.argval if isinstance(i.argval, tuple) else (i.argval,):
            if name in self._cells and name not in self._in_comprehension:
                self._push(None)
            else:
                self._load(name)

    _LOAD_FAST_CHECK = _LOAD_FAST_LOAD_FAST = _LOAD_FAST
    _LOAD_FAST_BORROW = _LOAD_FAST_BORROW_LOAD_FAST_BORROW = _LOAD_FAST

    def _LOAD_FAST_AND_CLEAR(self, i: dis.Instruction) -> None:
        """Begins a comprehension, whose variable hides another of that name."""
        self._in_comprehension.add(i.argval)
        self._push(_Hidden(i.argval, self.scan.aliases.pop(i.argval, None)))

    def _LOAD_DEREF(self, i: dis.Instruction) -> None:
        if i.argval in self._free:
            self._push(Path("free", i.argval))
        else:
            self._load(i.argval)

    _LOAD_CLASSDEREF = _LOAD_DEREF

    def _LOAD_FROM_DICT_OR_DEREF(self, i: dis.Instruction) -> None:
        self._pop()
        self._LOAD_DEREF(i)

    def _bind(self, name: str) -> None:
        value = self._pop()
        if isinstance(value, _Hidden):  # the comprehension has ended
            self._in_comprehension.discard(name)
            self.scan.aliases.pop(name, None)
            if value.alias is not None:
                self.scan.aliases[name] = value.alias
            return
        inside = name in self._in_comprehension
        self.bindings[name] += not inside
        if isinstance(value, (Path, LocalFunction, OneOf)) and (
            inside or name in self._assigned_once
        ):
            self.scan.aliases[name] = value
            return
        self._read(value)
        if inside:
            self.scan.aliases.pop(name, None)

    def _STORE_FAST(self, i: dis.Instruction) -> None:
        self._bind(i.argval)

    def _STORE_FAST_STORE_FAST(self, i: dis.Instruction) -> None:
        for name in i.argval:
            self._bind(name)

    def _STORE_FAST_LOAD_FAST(self, i: dis.Instruction) -> None:
        self._bind(i.argval[0])
        self._load(i.argval[1])

    def _DELETE_FAST(self, i: dis.Instruction) -> None:
        self.bindings[i.argval] += 1

    _DELETE_DEREF = _DELETE_FAST

    def _STORE_DEREF(self, i: dis.Instruction) -> None:
        if i.argval not in self._free:
            self._bind(i.argval)
            return
        self._read(self._pop())
        self.scan.writes.setdefault(Path("free", i.argval), self._line)

    def _STORE_GLOBAL(self, i: dis.Instruction) -> None:
        self._read(self._pop())
        self.scan.writes.setdefault(Path("global", i.argval), self._line)

    # Attributes and items -------------------------------------------------------------------

    def _LOAD_ATTR(self, i: dis.Instruction) -> None:
        owner = self._pop()
        self._push(_one_of([path.then("attr", i.argval) for path in _paths(owner)]))
        if VERSION >= (3, 12) and (i.arg or 0) & 1:  # a method, and its object
            self._push(None)

    def _LOAD_METHOD(self, i: dis.Instruction) -> None:
        self._LOAD_ATTR(i)
        self._push(None)

    def _LOAD_SUPER_ATTR(self, i: dis.Instruction) -> None:
        for _ in range(3):  # `super`, the class and the object
            self._pop()
        self._push(Path("super", "").then("attr", i.argval), *[None] * ((i.arg or 0) & 1))

    def _STORE_ATTR(self, i: dis.Instruction) -> None:
        owner, value = self._pop(), self._pop()
        self._read(value)
        self._write(owner, "attr", i.argval)

    def _DELETE_ATTR(self, i: dis.Instruction) -> None:
        self._write(self._pop(), "attr", i.argval)

    def _BINARY_OP(self, i: dis.Instruction) -> None:
        if i.argrepr == "[]":  # since Python 3.14
            self._BINARY_SUBSCR(i)
        else:
            self._consume(2, 1)

    def _BINARY_SUBSCR(self, i: dis.Instruction) -> None:
        key, owner = self._pop(), self._pop()
        if _is_key(key):
            self._push(_one_of([path.then("item", key.value) for path in _paths(owner)]))
            return
        self._read(owner)
        self._read(key)
        self._push(None)

    def _STORE_SUBSCR(self, i: dis.Instruction) -> None:
        key, owner, value = self._pop(), self._pop(), self._pop()
        self._read(key)
        self._read(value)
        self._write(owner, "item", key.value if _is_key(key) else None)

    def _STORE_SLICE(self, i: dis.Instruction) -> None:
        self._consume(2, 0)
        owner, value = self._pop(), self._pop()
        self._read(value)
        self._write(owner, "item", None)

    def _DELETE_SUBSCR(self, i: dis.Instruction) -> None:
        key, owner = self._pop(), self._pop()
        self._write(owner, "item", key.value if _is_key(key) else None)

    # Iteration and stack order ---------------------------------------------------------------

    def _GET_ITER(self, i: dis.Instruction) -> None:
        owner = self._pop()
        self._read(owner)
        self._push(_one_of([path.then("each", None) for path in _paths(owner)]))

    def _FOR_ITER(self, i: dis.Instruction) -> None:
        self._push(self._stack[-1] if self._stack else None)

    def _COPY(self, i: dis.Instruction) -> None:
        depth = i.arg or 0
        self._push(self._stack[-depth] if len(self._stack) >= depth else None)

    def _SWAP(self, i: dis.Instruction) -> None:
        depth = i.arg or 0
        if len(self._stack) >= depth:
            self._stack[-1], self._stack[-depth] = self._stack[-depth], self._stack[-1]

    def _UNPACK_SEQUENCE(self, i: dis.Instruction) -> None:
        paths = _paths(self._pop())
        for place in reversed(range(i.arg or 0)):
            self._push(_one_of([path.then("item", place) for path in paths]))

    def _UNPACK_EX(self, i: dis.Instruction) -> None:
        before, after = (i.arg or 0) & 0xFF, (i.arg or 0) >> 8
        self._consume(1, before + 1 + after)

    # Calls ----------------------------------------------------------------------------------

    def _KW_NAMES(self, i: dis.Instruction) -> None:
        self._keywords = self._constants[i.arg or 0]

    def _PRECALL(self, i: dis.Instruction) -> None:
        """Does nothing: the CALL that follows does."""

    def _CALL_KW(self, i: dis.Instruction) -> None:
        names = self._pop()
        self._keywords = names.value if isinstance(names, Constant) else ()
        self._CALL(i)

    def _CALL(self, i: dis.Instruction) -> None:
        names, self._keywords = self._keywords, ()
        given = [self._pop() for _ in range(i.arg or 0)][::-1]
        called, more = self._pop_called()
        given = [*more, *given]
        split = len(given) - len(names)
        self._push(self._attribute_by_name(called, given[:split]))
        functions = [each for each in _alternatives(called) if isinstance(each, LocalFunction)]
        paths = _paths(called)
        if not functions and not paths:
            for value in given:
                self._read(value)
        for each in self._combinations(given):
            args, keywords = each[:split], dict(zip(names, each[split:], strict=False))
            # The analysis of the callee finds whether it reads them.
            self.scan.calls += [Call(path, args, keywords, self._line) for path in paths]
            self.scan.local_calls += [(made.code, args, keywords) for made in functions]

    def _pop_called(self) -> tuple[Any, list[Any]]:
        """Pops the called value, and its first argument if that is beside it.

        Beside it is an empty place, or the iterator of a comprehension, or what is decorated.
        """
        second, first = self._pop(), self._pop()
        if first is None:
            return second, []
        return first, [] if second is None else [second]

    def _combinations(self, given: list[Any]) -> list[list[Any]]:
        """The arguments of a call: a list for each way in which branches may choose them."""
        found = list(map(list, islice(product(*map(_alternatives, given)), _MOST_CALLS + 1)))
        if len(found) <= _MOST_CALLS:
            return found
        for value in given:
            self._read(value)
        return [[None if isinstance(value, OneOf) else value for value in given]]

    def _attribute_by_name(self, called: Any, args: list[Any]) -> Path | None:
        """The path of `getattr` or `setattr` with a constant name, which equals a dot."""
        if called == Path("global", "super"):
            return Path("super", "")
        if called not in (Path("global", "getattr"), Path("global", "setattr")):
            return None
        if len(args) < 2 or not isinstance(args[0], Path) or not isinstance(args[1], Constant):
            return None
        if called.name == "setattr":
            self._write(args[0], "attr", args[1].value)
            return None
        return args[0].then("attr", args[1].value)

    def _CALL_FUNCTION_EX(self, i: dis.Instruction) -> None:
        # Since Python 3.14 there is a place for `**kwargs` even if there are none.
        given = self._consume(1 + (1 if VERSION >= (3, 14) else (i.arg or 0) & 1), 0)
        called, _ = self._pop_called()
        self._read(called)
        self._push(None)
        starred = given[0] if isinstance(given[0], Path) else None
        self.scan.calls += [Call(path, [], {}, self._line, starred) for path in _paths(called)]

    def _MAKE_FUNCTION(self, i: dis.Instruction) -> None:
        parts = 0 if VERSION >= (3, 13) else bin(i.arg or 0).count("1")
        popped = self._consume(1 + parts, 0)
        code = popped[-1].value if isinstance(popped[-1], Constant) else None
        if not isinstance(code, CodeType):
            self._push(None)
            return
        self.scan.inside[code] = {n: self.scan.aliases.get(n) for n in self._in_comprehension}
        self._push(LocalFunction(code))

    def _SET_FUNCTION_ATTRIBUTE(self, i: dis.Instruction) -> None:
        made = self._pop()
        self._read(self._pop())
        self._push(made)

    # Texts, dicts, errors: their effect depends on the argument -------------------------------

    def _FORMAT_VALUE(self, i: dis.Instruction) -> None:
        self._consume(1 + bool((i.arg or 0) & 4), 1)

    def _BUILD_INTERPOLATION(self, i: dis.Instruction) -> None:
        self._consume(2 + ((i.arg or 0) & 1), 1)

    def _BUILD_CONST_KEY_MAP(self, i: dis.Instruction) -> None:
        self._consume(1 + (i.arg or 0), 1)

    def _RAISE_VARARGS(self, i: dis.Instruction) -> None:
        self._consume(i.arg or 0, 0)


def _joined(one: list[Any], other: list[Any]) -> list[Any]:
    """The stack where two branches meet."""
    if len(one) != len(other):
        return one
    return [
        mine if mine == theirs else _one_of([mine, theirs])
        for mine, theirs in zip(one, other, strict=True)
    ]


def _one_of(values: list[Any]) -> Any:
    """One value that stands for all of these; None if nothing is known."""
    known = dict.fromkeys(each for value in values for each in _alternatives(value))
    known.pop(None, None)
    return OneOf(tuple(known)) if len(known) > 1 else next(iter(known), None)


def _paths(value: Any) -> list[Path]:
    """The paths that a value on the stack stands for."""
    return [each for each in _alternatives(value) if isinstance(each, Path)]


def _alternatives(value: Any) -> tuple[Any, ...]:
    return value.values if isinstance(value, OneOf) else (value,)


def _is_key(value: Any) -> bool:
    return isinstance(value, Constant) and isinstance(value.value, _CONSTANT_KEYS)
