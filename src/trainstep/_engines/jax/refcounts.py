"""Whether anybody else holds an object, by CPython's reference counts.

A buffer with another owner (a snapshot, a second variable, a NumPy view) must not be overwritten.
How many references a look at a buffer itself adds depends on the Python version and on the code
that looks, so each place that looks measures it once, in code of the same form.
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


def _in_pieces() -> int:
    pieces = [(object(),)]
    (whole,) = pieces[-1]
    return refcount(whole)


def _in_queue() -> int:
    pieces = [object()]
    piece = pieces[0]
    return refcount(piece)


# The count of an object that only its owner holds: a variable's array among the operands of a
# program, memory in a tuple of a list, memory in a list.
OPERAND, PIECE, QUEUED = _in_operands(), _in_pieces(), _in_queue()
