"""Detects other owners of an object by CPython's reference counts.

A buffer with another owner (a snapshot, a second variable, a NumPy view) must not be overwritten.
The check itself adds references, how many depends on the Python version and on the code around it.
So the count without other owners is measured once for each check, in code of the same form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from typing import Any

refcount: Callable[[Any], int] = sys.getrefcount


def _in_operands() -> int:
    slots = [{"_value": object()}]
    [v0] = map(itemgetter("_value"), slots)
    operands = (v0,)
    return max(map(refcount, islice(operands, 1)))


def _in_blocks() -> int:
    blocks = [(object(),)]
    (whole,) = blocks[-1]
    return refcount(whole)


def _in_buffers() -> int:
    blocks = [object()]
    block = blocks[0]
    return refcount(block)


# The count of an object without other owners: a variable's array among the operands of a program,
# memory in a tuple of a list, memory in a list.
OPERAND, BLOCK, BUFFER = _in_operands(), _in_blocks(), _in_buffers()
