"""Finds the names that code reads, writes and calls, from its bytecode, without running it.

    code --scan--> reads    `alpha`, `self.cfg.alpha`, `table["lr"]`, each with its line
                   writes   `global n; n = ...`, `self.x = ...`, `seen.append(...)`
                   calls    the called path, with its arguments

The scan simulates Python's stack. A value that it cannot derive is unknown (None), never wrong.
"""

from __future__ import annotations

import dis
import functools
from collections import Counter
from types import CodeType
from typing import Any

from trainstep._surroundings.code_model import Call, Constant, LocalFunction, Path, Scan

_CONSTANT_KEYS = (str, int, bytes, bool, type(None), float, tuple)
# The number of values that an instruction pops and pushes, for those that only compute.
_STACK_EFFECTS = {
    "BINARY_OP": (2, 1),
    "COMPARE_OP": (2, 1),
    "IS_OP": (2, 1),
    "CONTAINS_OP": (2, 1),
    "UNARY_NEGATIVE": (1, 1),
    "UNARY_NOT": (1, 1),
    "UNARY_INVERT": (1, 1),
    "UNARY_POSITIVE": (1, 1),
    "GET_LEN": (0, 1),
    "LIST_EXTEND": (1, 0),
    "SET_UPDATE": (1, 0),
    "DICT_UPDATE": (1, 0),
    "DICT_MERGE": (1, 0),
    "LIST_APPEND": (1, 0),
    "SET_ADD": (1, 0),
    "MAP_ADD": (2, 0),
    "LIST_TO_TUPLE": (1, 1),
    "RETURN_VALUE": (1, 0),
    "YIELD_VALUE": (1, 1),
    "POP_TOP": (1, 0),
    "BEFORE_WITH": (1, 2),
    "IMPORT_NAME": (2, 1),
    "IMPORT_FROM": (0, 1),
    "PUSH_NULL": (0, 1),
    "LOAD_CLOSURE": (0, 1),
    "LOAD_BUILD_CLASS": (0, 1),
}
_POPS_PER_ARGUMENT = {
    "BUILD_TUPLE": 1,
    "BUILD_LIST": 1,
    "BUILD_SET": 1,
    "BUILD_STRING": 1,
    "BUILD_SLICE": 1,
    "BUILD_MAP": 2,
}
_BLOCK_ENDS = ("RETURN_VALUE", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")


@functools.lru_cache(maxsize=4096)
def scan(code: CodeType) -> Scan:
    """The reads, writes and calls of `code`, except those of its own variables."""
    machine = _StackMachine(code)
    for instruction in dis.get_instructions(code):
        machine.step(instruction)
    machine.scan.inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return machine.scan


def changed_at(code: CodeType, parameter: str) -> int:
    """The first line that changes the value of a parameter; without one, the code's first."""
    found = scan(code)
    writes = [line for path, line in found.writes.items() if path.name == parameter]
    calls = [call.line for call in found.calls if call.path.name == parameter]
    return min(writes or calls, default=code.co_firstlineno)


class _StackMachine:
    """Simulates the stack of one code object."""

    def __init__(self, code: CodeType) -> None:
        self.scan = Scan()
        self._free = set(code.co_freevars)
        self._constants = code.co_consts
        flags = bool(code.co_flags & 4) + bool(code.co_flags & 8)
        count = code.co_argcount + code.co_kwonlyargcount + flags
        stores = Counter(
            i.argval
            for i in dis.get_instructions(code)
            if i.opname in ("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF")
        )
        self._assigned_once = {name for name, times in stores.items() if times == 1}
        self._parameters = {name for name in code.co_varnames[:count] if name not in stores}
        self._stack: list[Any] = []
        self._stacks_at: dict[int, list[Any]] = {}
        self._keywords: tuple[str, ...] = ()
        self._line = code.co_firstlineno
        self._dead = False

    def step(self, i: dis.Instruction) -> None:
        if i.starts_line is not None:
            self._line = i.starts_line
        self._join(i.offset)
        handler = getattr(self, f"_{i.opname}", None)
        if handler is not None:
            handler(i)
        elif i.opname in _STACK_EFFECTS:
            self._consume(*_STACK_EFFECTS[i.opname])
        elif i.opname in _POPS_PER_ARGUMENT:
            self._consume(_POPS_PER_ARGUMENT[i.opname] * (i.arg or 0), 1)
        elif i.opname.startswith("POP_JUMP"):
            self._consume(1, 0)
        else:
            effect = dis.stack_effect(i.opcode, i.arg, jump=False)
            self._consume(max(0, -effect), max(0, effect))
        if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
            self._stacks_at.setdefault(i.argval, list(self._stack))
        self._dead = i.opname in _BLOCK_ENDS

    def _join(self, offset: int) -> None:
        """Joins the stacks of all jumps to an offset: values that differ become unknown."""
        other = self._stacks_at.get(offset)
        if self._dead:
            self._stack = list(other or ())
        elif other is not None and len(other) == len(self._stack):
            for index, (mine, theirs) in enumerate(zip(self._stack, other, strict=True)):
                if mine != theirs:
                    self._read(mine)
                    self._read(theirs)
                    self._stack[index] = None

    def _pop(self) -> Any:
        return self._stack.pop() if self._stack else None

    def _consume(self, pops: int, pushes: int) -> list[Any]:
        """Pops values, which counts as reading them, and pushes unknown ones."""
        popped = [self._pop() for _ in range(pops)][::-1]
        for value in popped:
            self._read(value)
        self._stack += [None] * pushes
        return popped

    def _read(self, value: Any) -> None:
        if isinstance(value, Path):
            self.scan.reads.setdefault(value, self._line)

    def _write(self, owner: Any, kind: str, key: Any) -> None:
        if isinstance(owner, Path):
            self.scan.writes.setdefault(owner.then(kind, key), self._line)

    # Names ----------------------------------------------------------------------------------

    def _LOAD_CONST(self, i: dis.Instruction) -> None:
        self._stack.append(Constant(i.argval))

    def _LOAD_GLOBAL(self, i: dis.Instruction) -> None:
        if (i.arg or 0) & 1:
            self._stack.append(None)
        self._stack.append(Path("global", i.argval))

    def _LOAD_NAME(self, i: dis.Instruction) -> None:
        self._stack.append(Path("global", i.argval))

    def _LOAD_FAST(self, i: dis.Instruction) -> None:
        name = i.argval
        known = self.scan.aliases.get(name)
        self._stack.append(known or (Path("local", name) if name in self._parameters else None))

    def _LOAD_DEREF(self, i: dis.Instruction) -> None:
        if i.argval in self._free:
            self._stack.append(Path("free", i.argval))
        else:
            self._LOAD_FAST(i)

    def _STORE_FAST(self, i: dis.Instruction) -> None:
        value = self._pop()
        if isinstance(value, (Path, LocalFunction)) and i.argval in self._assigned_once:
            self.scan.aliases[i.argval] = value
        else:
            self._read(value)

    def _STORE_DEREF(self, i: dis.Instruction) -> None:
        if i.argval not in self._free:
            self._STORE_FAST(i)
            return
        self._read(self._pop())
        self.scan.writes.setdefault(Path("free", i.argval), self._line)

    def _STORE_GLOBAL(self, i: dis.Instruction) -> None:
        self._read(self._pop())
        self.scan.writes.setdefault(Path("global", i.argval), self._line)

    # Attributes and items -------------------------------------------------------------------

    def _LOAD_ATTR(self, i: dis.Instruction) -> None:
        owner = self._pop()
        self._stack.append(owner.then("attr", i.argval) if isinstance(owner, Path) else None)

    def _LOAD_METHOD(self, i: dis.Instruction) -> None:
        self._LOAD_ATTR(i)
        self._stack.append(None)

    def _STORE_ATTR(self, i: dis.Instruction) -> None:
        owner, value = self._pop(), self._pop()
        self._read(value)
        self._write(owner, "attr", i.argval)

    def _DELETE_ATTR(self, i: dis.Instruction) -> None:
        self._write(self._pop(), "attr", i.argval)

    def _BINARY_SUBSCR(self, i: dis.Instruction) -> None:
        key, owner = self._pop(), self._pop()
        if isinstance(owner, Path) and _is_key(key):
            self._stack.append(owner.then("item", key.value))
            return
        self._read(owner)
        self._read(key)
        self._stack.append(None)

    def _STORE_SUBSCR(self, i: dis.Instruction) -> None:
        key, owner, value = self._pop(), self._pop(), self._pop()
        self._read(key)
        self._read(value)
        self._write(owner, "item", key.value if _is_key(key) else None)

    def _DELETE_SUBSCR(self, i: dis.Instruction) -> None:
        key, owner = self._pop(), self._pop()
        self._write(owner, "item", key.value if _is_key(key) else None)

    # Iteration and stack order ---------------------------------------------------------------

    def _GET_ITER(self, i: dis.Instruction) -> None:
        owner = self._pop()
        self._read(owner)
        self._stack.append(owner.then("each", None) if isinstance(owner, Path) else None)

    def _FOR_ITER(self, i: dis.Instruction) -> None:
        self._stack.append(self._stack[-1] if self._stack else None)

    def _COPY(self, i: dis.Instruction) -> None:
        depth = i.arg or 0
        self._stack.append(self._stack[-depth] if len(self._stack) >= depth else None)

    def _SWAP(self, i: dis.Instruction) -> None:
        depth = i.arg or 0
        if len(self._stack) >= depth:
            self._stack[-1], self._stack[-depth] = self._stack[-depth], self._stack[-1]

    def _UNPACK_SEQUENCE(self, i: dis.Instruction) -> None:
        owner = self._pop()
        places = range(i.arg or 0)
        if isinstance(owner, Path):
            self._stack += [owner.then("item", place) for place in reversed(places)]
        else:
            self._stack += [None for _ in places]

    # Calls ----------------------------------------------------------------------------------

    def _KW_NAMES(self, i: dis.Instruction) -> None:
        self._keywords = self._constants[i.arg or 0]

    def _PRECALL(self, i: dis.Instruction) -> None:
        """Does nothing: the CALL that follows does."""

    def _CALL(self, i: dis.Instruction) -> None:
        names, self._keywords = self._keywords, ()
        given = [self._pop() for _ in range(i.arg or 0)][::-1]
        second, first = self._pop(), self._pop()
        called = first if first is not None else second
        split = len(given) - len(names)
        args, keywords = given[:split], dict(zip(names, given[split:], strict=False))
        self._stack.append(self._attribute_by_name(called, args))
        if isinstance(called, Path):  # the analysis of the callee finds whether it reads them
            self.scan.calls.append(Call(called, args, keywords, self._line))
        elif isinstance(called, LocalFunction) and not keywords:
            self.scan.local_calls.append((called.code, args))
        else:
            for value in given:
                self._read(value)

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
        popped = self._consume(2 + ((i.arg or 0) & 1), 1)
        self._drop_below_top()
        if isinstance(popped[0], Path):
            starred = popped[1] if isinstance(popped[1], Path) else None
            self.scan.calls.append(Call(popped[0], [], {}, self._line, starred))

    def _drop_below_top(self) -> None:
        """Drops the NULL that was below the called function, now below the result."""
        if len(self._stack) >= 2:
            del self._stack[-2]

    def _MAKE_FUNCTION(self, i: dis.Instruction) -> None:
        popped = self._consume(1 + bin(i.arg or 0).count("1"), 0)
        code = popped[-1].value if isinstance(popped[-1], Constant) else None
        self._stack.append(LocalFunction(code) if isinstance(code, CodeType) else None)

    def _FORMAT_VALUE(self, i: dis.Instruction) -> None:
        self._consume(1 + bool((i.arg or 0) & 4), 1)

    def _BUILD_CONST_KEY_MAP(self, i: dis.Instruction) -> None:
        self._consume(1 + (i.arg or 0), 1)


def _is_key(value: Any) -> bool:
    return isinstance(value, Constant) and isinstance(value.value, _CONSTANT_KEYS)
