"""Gradients that PyTorch takes of losses in which no compiled function had a part.

All ways to a gradient lead through one function of `torch.autograd`. It is the one to replace: what
the user calls, `backward` and `grad`, is known to the compiler by its identity.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from trainstep import _site
from trainstep._doctor._hooks._eager import Eager
from trainstep._doctor._hooks._functions import code_of
from trainstep._doctor._hooks._sites import outwards, site
from trainstep._doctor._hooks._watcher import Watcher
from trainstep._doctor._records import Happened
from trainstep._patches import Patches

_COMPILED = "CompiledFunctionBackward"
_SYMBOLIC = ("FakeTensor", "FunctionalTensor")
_NODES = 500  # of a graph that are looked at


class _Place:
    """Where gradients are taken. Holds the code, so that nothing else gets its id."""

    def __init__(self, code: CodeType | None = None) -> None:
        self.code = code
        self.calls = 0
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
        self._lines: dict[tuple[str, int], _Place] = {}
        self._run: CodeType | None = None

    def install(self, patches: Patches, autograd: Any) -> None:
        """Hooks `torch.autograd`."""
        make = functools.partial(self._counting, sys.modules["torch"])
        patches.replace(autograd, "_engine_run_backward", make)

    def _counting(self, torch: Any, original: Any) -> Any:
        set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
        method = os.path.join(os.path.dirname(torch.__file__), "_tensor.py")  # Tensor.backward
        places, getframe = self._places, sys._getframe

        # Runs at every gradient: calls no Python function, unless there is something to look at.
        @functools.wraps(original)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                frame: Any = getframe(2)  # that called `torch.autograd.backward` or `grad`
                if frame.f_code.co_filename == method:
                    frame = getframe(3)
            except ValueError:  # not from Python
                return original(outputs, *args, **kwargs)
            place = places.get((id(frame.f_code), frame.f_lasti))
            if place is None or place.calls & (place.calls - 1) == 0:
                before = set_eval_frame(None)  # inside a compiled function, ours would be compiled
                try:
                    self._look(outputs, frame)
                finally:
                    set_eval_frame(before)
            else:
                place.calls += 1
                if place.known is not None:
                    place.known.count += 1
            return original(outputs, *args, **kwargs)

        self._run = code_of(run)
        _leave_uncompiled(torch, self._run)
        return run

    def _look(self, outputs: Any, frame: FrameType) -> None:
        self._watcher.guarded(functools.partial(self._count, outputs, frame))

    def _count(self, outputs: Any, frame: FrameType) -> None:
        if self._watcher.open_traces():
            return
        if _site.is_users(frame):
            code = frame.f_code
            place = self._places.setdefault((id(code), frame.f_lasti), _Place(code))
        else:  # a library, which takes gradients for many
            place = self._lines.setdefault(site(frame)[:2], _Place())
        if place.calls & (place.calls - 1) == 0:
            place.is_eager = (
                not self._unseen() and not self._is_inside(frame) and _is_eager(outputs)
            )
        place.calls += 1
        place.known = self._eager("torch", frame) if place.is_eager else None

    def _is_inside(self, frame: FrameType) -> bool:
        """Whether a gradient is taken inside of one, as in checkpointing."""
        return any(each.f_code is self._run for each in outwards(frame))


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
