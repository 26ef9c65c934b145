"""The differentiations that a step makes: `value_and_grad` tells of them, `listening` hears.

Told is only what the step differentiates itself. What is differentiated inside another
differentiation is part of that one, and in a branch or a loop body of the engine the tensors
belong to a program of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep._state.scopes import Scope, current_scope

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Differentiation:
    """One call of `value_and_grad`.

    Attributes:
        value: The scalar.
        gradients: Its gradients, in the structure in which they are returned.
        variables: What they are by, if variables were named.
    """

    value: Any
    gradients: Any
    variables: Sequence[Any] | None


class Taken:
    """What was differentiated in one scope.

    Attributes:
        here: The differentiations, in order.
        elsewhere: Whether there were others in branches or loops, whose tensors cannot leave.
    """

    def __init__(self) -> None:
        self._scope = current_scope()
        self.here: list[Differentiation] = []
        self.elsewhere = False

    def note(self, made: Differentiation) -> None:
        """Hears of a differentiation."""
        scope = current_scope()
        at_home = not isinstance(scope, Scope) or scope.current_graph() is scope.home
        if scope is self._scope and at_home:
            self.here.append(made)
        else:
            self.elsewhere = True


@contextlib.contextmanager
def listening() -> Iterator[Taken]:
    """Hears of what is differentiated inside, which nobody around hears of then."""
    taken = Taken()
    with _told(taken):
        yield taken


@contextlib.contextmanager
def differentiating() -> Iterator[Taken | None]:
    """Gives the listener to tell; of what is differentiated inside nobody hears."""
    listener = getattr(_local, "listener", None)
    with _told(None):
        yield listener


@contextlib.contextmanager
def _told(listener: Taken | None) -> Iterator[None]:
    before = getattr(_local, "listener", None)
    _local.listener = listener
    try:
        yield
    finally:
        _local.listener = before
