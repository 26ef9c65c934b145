"""What was not finite in a bad batch: written down by the program, read when the call returns.

The program keeps it in a variable of a fixed size, so that it gets out of differentiations and
branches as other state does, and the outermost step hands it out as an output and clears it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from trainstep._common.errors import NonFiniteError
from trainstep._state.outputs import CheckedOutput

_local = threading.local()
_SHOWN = 4  # parts that a message may name


class Part(NamedTuple):
    """Something that has to be finite."""

    kind: str  # "loss", "gradient" or "new value"
    name: str
    finite: Any  # a boolean tensor
    value: Any = 0.0  # of a loss


class Findings:
    """What the bad batches of one function had that was not finite.

    Args:
        name: What messages call the function.
        count: The variable that counts them.
    """

    def __init__(self, name: str, count: Any) -> None:
        self._name, self._count = name, count
        # How many batches of this call were bad; of the last one, how many parts besides losses
        # and the first bad loss; then the numbers of its first bad parts.
        nothing = np.zeros(3 + _SHOWN, "float32")
        self._found = keras.Variable(nothing, dtype="float32", trainable=False, name="found")
        self._numbers: dict[tuple[str, str], int] = {}  # of parts, by kind and name

    def note(self, parts: Sequence[Part], finite: Any, ok: Any) -> None:
        """Writes down which parts are not finite, unless all are, inside a step."""
        known = self._numbers
        numbers = [known.setdefault((part.kind, part.name), len(known)) for part in parts]
        loss = many = ops.zeros((), "float32")
        for part in reversed(parts):
            if part.kind == "loss":
                loss = ops.where(part.finite, loss, ops.cast(part.value, "float32"))
            else:
                many = many + ops.cast(ops.logical_not(part.finite), "float32")
        behind = np.full(_SHOWN, np.inf, "float32")
        bad = ops.where(finite, np.float32(np.inf), np.array(numbers, "float32"))
        first = ops.sort(ops.concatenate([bad, behind]))[:_SHOWN]
        before = self._found.value
        found = ops.concatenate([ops.stack([before[0] + 1.0, many, loss]), first])
        self._found.assign(ops.where(ok, before, found))
        heard = getattr(_local, "heard", None)
        if heard is not None:
            heard[id(self)] = self

    def judged(self, result: Any) -> Any:
        """A step's result, which the host hands out only if nothing was found."""
        found = self._found.value
        self._found.assign(ops.zeros_like(found))
        return CheckedOutput(result, self._judge, (found, self._count.value))

    def _judge(self, result: Any, found: Any, count: Any) -> Any:
        steps = np.atleast_2d(ops.convert_to_numpy(found))  # of one step, or of several in a call
        bad = np.flatnonzero(steps[:, 0])
        if not len(bad):
            return result
        _, many, loss, *numbers = steps[bad[0]]
        known = list(self._numbers)
        first = [known[int(number)] for number in numbers if np.isfinite(number)]
        which = f"batch {bad[0] + 1} of the {len(steps)} in this call" if len(steps) > 1 else ""
        raise NonFiniteError(
            self._name, _text(first, int(many), loss), which, int(ops.convert_to_numpy(count).max())
        )


def _text(first: Sequence[tuple[str, str]], many: int, loss: float) -> str:
    """What was not finite, in words."""
    texts = [f"{name} is {loss:g}" for kind, name in first if kind == "loss"][:1]
    names = [name for kind, name in first if kind != "loss"]
    if names:
        more = f" and {many - len(names)} more" if many > len(names) else ""
        by = "gradients by" if any(kind == "gradient" for kind, _ in first) else "new values of"
        texts.append(f"the {by} {', '.join(names)}{more} are not finite")
    return "; ".join(texts)


@contextlib.contextmanager
def hearing() -> Iterator[dict[int, Findings]]:
    """Gives the findings that a step, and what is called in it, may make."""
    before = getattr(_local, "heard", None)
    heard: dict[int, Findings] = {}
    _local.heard = heard
    try:
        yield heard
    finally:
        _local.heard = before


def judged(result: Any, heard: dict[int, Findings]) -> Any:
    """A step's result, with all that the host has to look at before."""
    for findings in heard.values():
        result = findings.judged(result)
    return result
