"""Gradients that PyTorch takes of losses in which no compiled function had a part.

All ways to a gradient lead through one function of `torch.autograd`, which asks its log each time
whether to tell of it. The question is what is hooked. What the user calls, `backward` and `grad`,
is known to the compiler by its identity; a function around the one that asks would cost twice as
much, and be on the stack of all that runs in a gradient.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches
from trainstep._doctor.hooks.call_sites import outwards
from trainstep._doctor.hooks.eager_gradients import Eager
from trainstep._doctor.hooks.function_identity import code_of
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Happened

_COMPILED = "CompiledFunctionBackward"
_SYMBOLIC = ("FakeTensor", "FunctionalTensor")
_NODES = 500  # of a graph that are looked at
_OFTEN = 256  # gradients at one place after which its graph is looked at again


class _Place:
    """A call in the user's code that takes gradients. Holds the code: nothing else gets its id."""

    __slots__ = ("code", "is_eager", "known", "left", "seen")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.seen = 0  # gradients before the next one whose graph is looked at
        self.left = 0  # of them, those that are to come
        self.is_eager = False
        self.known: Happened | None = None  # in which they are counted


class Gradients:
    """Counts them.

    Args:
        watcher: The watcher.
        eager: What counts by the user's line.
        unseen: Whether a backend was used whose functions leave no mark in the graph of a loss.
    """

    def __init__(self, watcher: Watcher, eager: Eager, unseen: Callable[[], bool]) -> None:
        self._watcher, self._eager, self._unseen = watcher, eager, unseen
        self._places: dict[tuple[int, int], _Place] = {}
        self._between: dict[int, CodeType] = {}  # code of libraries, through which the user calls
        self._asks: CodeType | None = None

    def install(self, patches: Patches, autograd: Any) -> None:
        """Hooks `torch.autograd`.

        Raises:
            AttributeError: If it does not ask its log.
        """
        graph = autograd.graph
        self._asks = code_of(graph._engine_run_backward)
        if self._asks is None or "getEffectiveLevel" not in self._asks.co_names:
            raise AttributeError("a gradient does not ask torch.autograd.graph.log for its level")
        make = functools.partial(self._asked, sys.modules["torch"])
        patches.replace(graph.log, "getEffectiveLevel", make)

    def _asked(self, torch: Any, level: Callable[[], int]) -> Callable[[], int]:
        set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
        places, between, getframe = self._places, self._between, sys._getframe

        # Runs at every gradient: calls nothing that it need not, unless there is something to see.
        @functools.wraps(level)
        def asked() -> int:
            try:
                frame: Any = getframe(3)  # that called `torch.autograd.backward` or `grad`
                while id(frame.f_code) in between:
                    frame = frame.f_back
                place = places.get((id(frame.f_code), frame.f_lasti))
            except (AttributeError, ValueError):  # no frame of the user's
                place = None
            if place is None or not place.left:
                before = set_eval_frame(None)  # inside a compiled function, ours would be compiled
                try:
                    self._look(getframe(1))
                finally:
                    set_eval_frame(before)
            else:
                place.left -= 1
                if place.known is not None:
                    place.known.count += 1
            return level()

        _leave_uncompiled(torch, code_of(asked))
        return asked

    def _look(self, asking: FrameType) -> None:
        if asking.f_code is self._asks:  # and not somebody else
            self._watcher.guarded(functools.partial(self._count, asking))

    def _count(self, asking: FrameType) -> None:
        if self._watcher.open_traces():
            return
        place = self._place(asking)
        late = place.seen > 0 and not place.is_eager
        if place.left:
            place.left -= 1
        else:
            place.is_eager = self._is_eager(asking)
            place.left = min(place.seen, _OFTEN - 1)  # looked at: the 1st, 2nd, 4th, 8th, ...
            place.seen += place.left + 1
        place.known = self._eager("torch", asking, late=late) if place.is_eager else None

    def _place(self, asking: FrameType) -> _Place:
        """The user's call; for a gradient inside of another, as in checkpointing, that one."""
        found = users = user_code.nearest(asking) or asking
        for found in outwards(asking.f_back):
            if found is users or found.f_code is self._asks:
                break
            self._between[id(found.f_code)] = found.f_code
        return self._places.setdefault((id(found.f_code), found.f_lasti), _Place(found.f_code))

    def _is_eager(self, asking: FrameType) -> bool:
        if self._unseen() or any(each.f_code is self._asks for each in outwards(asking.f_back)):
            return False  # the outer one is counted
        return _is_eager(asking.f_locals[asking.f_code.co_varnames[0]])


def _is_eager(outputs: Any) -> bool:
    """Whether no compiled function had a part in what the gradient is taken of."""
    if any(type(each).__name__ in _SYMBOLIC for each in outputs):
        return False
    nodes = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in outputs]
    waiting = [node for node in nodes if node is not None]
    seen = set(waiting)
    while waiting and len(seen) < _NODES:
        node = waiting.pop(0)
        if node.name() == _COMPILED:
            return False
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return bool(seen)


def _leave_uncompiled(torch: Any, code: CodeType | None) -> None:
    """Has PyTorch run a code of ours as it is, also where it compiles what it meets."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):
        frames.skip_code(code)
        return
    action = frames._FrameAction
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
