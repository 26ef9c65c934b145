"""The bytecode instructions of each supported Python: the values that each pops and pushes.

`EFFECTS` lists instructions that only compute. `bytecode` handles the others, which move names and
values that it follows. Both are checked: an instruction that is in neither is unknown, and one
whose effect differs from that in `dis` has changed its meaning.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType
from typing import NamedTuple

SUPPORTED = ((3, 11), (3, 12), (3, 13), (3, 14))
VERSION = sys.version_info[:2]

# Of instructions that pop and push a fixed number of values.
EFFECTS: dict[str, tuple[int, int]] = {
    # No effect on the stack.
    "CACHE": (0, 0),
    "COPY_FREE_VARS": (0, 0),
    "DELETE_GLOBAL": (0, 0),
    "DELETE_NAME": (0, 0),
    "EXTENDED_ARG": (0, 0),
    "JUMP_BACKWARD": (0, 0),
    "JUMP_BACKWARD_NO_INTERRUPT": (0, 0),
    "JUMP_FORWARD": (0, 0),
    "MAKE_CELL": (0, 0),
    "NOP": (0, 0),
    "NOT_TAKEN": (0, 0),
    "RESUME": (0, 0),
    "RETURN_CONST": (0, 0),
    "SETUP_ANNOTATIONS": (0, 0),
    # Operators.
    "BINARY_SLICE": (3, 1),
    "COMPARE_OP": (2, 1),
    "CONTAINS_OP": (2, 1),
    "CONVERT_VALUE": (1, 1),
    "FORMAT_SIMPLE": (1, 1),
    "FORMAT_WITH_SPEC": (2, 1),
    "GET_LEN": (0, 1),
    "IS_OP": (2, 1),
    "TO_BOOL": (1, 1),
    "UNARY_INVERT": (1, 1),
    "UNARY_NEGATIVE": (1, 1),
    "UNARY_NOT": (1, 1),
    "UNARY_POSITIVE": (1, 1),
    # Containers.
    "BUILD_TEMPLATE": (2, 1),
    "DICT_MERGE": (1, 0),
    "DICT_UPDATE": (1, 0),
    "LIST_APPEND": (1, 0),
    "LIST_EXTEND": (1, 0),
    "LIST_TO_TUPLE": (1, 1),
    "MAP_ADD": (2, 0),
    "SET_ADD": (1, 0),
    "SET_UPDATE": (1, 0),
    # Values that the code makes or imports.
    "IMPORT_FROM": (0, 1),
    "IMPORT_NAME": (2, 1),
    "IMPORT_STAR": (1, 0),
    "LOAD_ASSERTION_ERROR": (0, 1),
    "LOAD_BUILD_CLASS": (0, 1),
    "LOAD_CLOSURE": (0, 1),
    "LOAD_COMMON_CONSTANT": (0, 1),
    "LOAD_LOCALS": (0, 1),
    "PUSH_NULL": (0, 1),
    # Names of classes and modules, which are no steps.
    "PRINT_EXPR": (1, 0),
    "STORE_NAME": (1, 0),
    # Ends of expressions, loops and functions.
    "END_FOR": (2, 0) if VERSION == (3, 12) else (1, 0),
    "INTERPRETER_EXIT": (1, 0),
    "POP_ITER": (1, 0),
    "POP_TOP": (1, 0),
    "RETURN_VALUE": (1, 1) if VERSION >= (3, 14) else (1, 0),
    # Blocks and exceptions.
    "BEFORE_ASYNC_WITH": (1, 2),
    "BEFORE_WITH": (1, 2),
    "CHECK_EG_MATCH": (2, 2),
    "CHECK_EXC_MATCH": (1, 1),
    "EXIT_INIT_CHECK": (1, 0),
    "LOAD_SPECIAL": (1, 2),
    "POP_EXCEPT": (1, 0),
    "PREP_RERAISE_STAR": (2, 1),
    "PUSH_EXC_INFO": (0, 1),
    "RERAISE": (1, 0),
    "WITH_EXCEPT_START": (0, 1),
    # Patterns.
    "MATCH_CLASS": (3, 1),
    "MATCH_KEYS": (0, 1),
    "MATCH_MAPPING": (0, 1),
    "MATCH_SEQUENCE": (0, 1),
    # Generators and coroutines.
    "ASYNC_GEN_WRAP": (1, 1),
    "CALL_INTRINSIC_1": (1, 1),
    "CALL_INTRINSIC_2": (2, 1),
    "CLEANUP_THROW": (3, 2),
    "END_ASYNC_FOR": (2, 0),
    "END_SEND": (2, 1),
    "GET_AITER": (1, 1),
    "GET_ANEXT": (0, 1),
    "GET_AWAITABLE": (1, 1),
    "GET_YIELD_FROM_ITER": (1, 1),
    "RETURN_GENERATOR": (0, 1) if VERSION >= (3, 13) else (0, 0),
    "SEND": (1, 1),
    "YIELD_VALUE": (1, 1),
    **{
        f"POP_JUMP_{way}IF_{test}": (1, 0)
        for way in ("", "FORWARD_", "BACKWARD_")
        for test in ("TRUE", "FALSE", "NONE", "NOT_NONE")
    },
    "JUMP_IF_FALSE_OR_POP": (1, 0),
    "JUMP_IF_TRUE_OR_POP": (1, 0),
}
# Of instructions that pop this many values for each unit of their argument, and push one.
POPS_PER_ARGUMENT = {
    "BUILD_LIST": 1,
    "BUILD_MAP": 2,
    "BUILD_SET": 1,
    "BUILD_SLICE": 1,
    "BUILD_STRING": 1,
    "BUILD_TUPLE": 1,
}
BLOCK_ENDS = frozenset(
    [
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
        "JUMP_FORWARD",
        "RAISE_VARARGS",
        "RERAISE",
        "RETURN_CONST",
        "RETURN_VALUE",
    ]
)
# Instructions whose effect in `dis` is not their own: on 3.11 PRECALL counts what CALL pops.
_SPLIT_EFFECTS = frozenset(["CALL", "PRECALL"]) if VERSION == (3, 11) else frozenset[str]()
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])


def names() -> set[str]:
    """The instructions of the running Python that occur in code before it has run."""
    return {
        name
        for name, number in dis.opmap.items()
        # Larger numbers are the compiler's own; these three kinds replace others at run time.
        if number < 256 and not name.startswith(("INSTRUMENTED_", "RESERVED", "ENTER_EXECUTOR"))
    }


class Handler(NamedTuple):
    """A place where an exception continues: it keeps the lower part of the stack."""

    target: int
    depth: int
    pushed: int  # the exception and, for some, the place where it was raised


def handlers(code: CodeType) -> dict[int, list[Handler]]:
    """The handlers of the code that begins at an offset, by that offset."""
    found: dict[int, list[Handler]] = {}
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        handler = Handler(entry.target, entry.depth, 1 + bool(entry.lasti))
        found.setdefault(entry.start, []).append(handler)
    return found


def is_jump(i: dis.Instruction) -> bool:
    """Whether an instruction may continue elsewhere."""
    return i.opcode in _JUMPS


def effect(i: dis.Instruction, *, jump: bool = False) -> int:
    """The number of values that an instruction adds to the stack."""
    return dis.stack_effect(i.opcode, i.arg, jump=jump)


def has_effect(i: dis.Instruction, added: int) -> bool:
    """Whether `dis` agrees about the number of values that an instruction adds."""
    return i.opname in _SPLIT_EFFECTS or effect(i) == added


def line(i: dis.Instruction) -> int | None:
    """The line of an instruction, if it is known."""
    # `starts_line` became a flag in Python 3.13.
    found: int | None = i.line_number if VERSION >= (3, 13) else i.starts_line  # type: ignore[attr-defined]
    return found
