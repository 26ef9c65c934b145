"""Counts PyTorch gradients of losses that no compiled function computed.

Every gradient passes one function of `torch.autograd`, which reads the level of its log. That read
is hooked. The public functions `backward` and `grad` cannot be wrapped, as the compiler knows them
by identity. A wrapper around the inner function would cost twice as much and be on the stack of
everything that runs inside a gradient.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches
from trainstep._doctor.hooks.call_sites import frames_outward
from trainstep._doctor.hooks.eager_gradients import EagerGradients
from trainstep._doctor.hooks.function_identity import code_of
from trainstep._doctor.hooks.watcher import Watcher
from trainstep._doctor.records import Incident

_COMPILED = "CompiledFunctionBackward"
_SYMBOLIC = ("FakeTensor", "FunctionalTensor")
_NODES = 500  # inspected per graph
_INTERVAL = 256  # gradients at one place until its graph is inspected again, at most


class _Place:
    """A call in the user's code that computes gradients.

    Keeps a reference to the code, as places are keyed by its id.
    """

    __slots__ = ("code", "is_eager", "known", "seen", "until_inspected")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.seen = 0  # gradients up to the next inspection
        self.until_inspected = 0  # gradients left until then
        self.is_eager = False
        self.known: Incident | None = None  # the incident that counts them


class TorchGradients:
    """Counts gradients outside of compiled functions.

    Args:
        watcher: The watcher of this process.
        eager: Counts by the user's line.
        some_unmarked: Whether a backend was used that leaves no mark in the graph of a loss.
    """

    def __init__(
        self, watcher: Watcher, eager: EagerGradients, some_unmarked: Callable[[], bool]
    ) -> None:
        self._watcher, self._eager, self._some_unmarked = watcher, eager, some_unmarked
        self._places: dict[tuple[int, int], _Place] = {}
        self._library_code: dict[int, CodeType] = {}  # by id
        self._backward_code: CodeType | None = None

    def install(self, patches: Patches, autograd: Any) -> None:
        """Installs the hook in `torch.autograd`.

        Raises:
            AttributeError: If this version does not read the level of its log.
        """
        graph = autograd.graph
        self._backward_code = code_of(graph._engine_run_backward)
        if self._backward_code is None or "getEffectiveLevel" not in self._backward_code.co_names:
            raise AttributeError("a gradient does not read the level of torch.autograd.graph.log")
        make = functools.partial(self._counting_level, sys.modules["torch"])
        patches.replace(graph.log, "getEffectiveLevel", make)

    def _counting_level(self, torch: Any, level: Callable[[], int]) -> Callable[[], int]:
        set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
        places, library_code, getframe = self._places, self._library_code, sys._getframe

        # Runs at every gradient, so the common path calls no other function of doctor's.
        @functools.wraps(level)
        def counting_level() -> int:
            try:
                frame: Any = getframe(3)  # the caller of `torch.autograd.backward` or `grad`
                while id(frame.f_code) in library_code:
                    frame = frame.f_back
                place = places.get((id(frame.f_code), frame.f_lasti))
            except (AttributeError, ValueError):  # no user frame on the stack
                place = None
            if place is None or not place.until_inspected:
                before = set_eval_frame(None)  # or dynamo would compile doctor's own code
                try:
                    self._inspect(getframe(1))
                finally:
                    set_eval_frame(before)
            else:
                place.until_inspected -= 1
                if place.known is not None:
                    place.known.count += 1
            return level()

        _leave_uncompiled(torch, code_of(counting_level))
        return counting_level

    def _inspect(self, backward_frame: FrameType) -> None:
        if backward_frame.f_code is self._backward_code:  # other callers read the level too
            self._watcher.guarded(functools.partial(self._count, backward_frame))

    def _count(self, backward_frame: FrameType) -> None:
        if self._watcher.open_traces():
            return
        place = self._place(backward_frame)
        late = place.seen > 0 and not place.is_eager
        if place.until_inspected:
            place.until_inspected -= 1
        else:
            place.is_eager = self._is_eager(backward_frame)
            # Inspects the 1st, 2nd, 4th, 8th, ... gradient.
            place.until_inspected = min(place.seen, _INTERVAL - 1)
            place.seen += place.until_inspected + 1
        place.known = self._eager("torch", backward_frame, late=late) if place.is_eager else None

    def _place(self, backward_frame: FrameType) -> _Place:
        """The user's call, or the outer gradient if this one is nested, as in checkpointing."""
        found = users = user_code.nearest(backward_frame) or backward_frame
        for found in frames_outward(backward_frame.f_back):
            if found is users or found.f_code is self._backward_code:
                break
            self._library_code[id(found.f_code)] = found.f_code
        return self._places.setdefault((id(found.f_code), found.f_lasti), _Place(found.f_code))

    def _is_eager(self, backward_frame: FrameType) -> bool:
        outer = frames_outward(backward_frame.f_back)
        if self._some_unmarked() or any(each.f_code is self._backward_code for each in outer):
            return False  # a nested gradient is part of the outer one
        return _is_eager(backward_frame.f_locals[backward_frame.f_code.co_varnames[0]])


def _is_eager(outputs: Any) -> bool:
    """Whether no compiled function computed any part of the outputs."""
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
    """Excludes a code object of doctor's from compilation."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):
        frames.skip_code(code)
        return
    action = frames._FrameAction
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
