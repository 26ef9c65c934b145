"""Finds the Python side effects of a trace, which later steps will not repeat, with their lines.

    functions that draw, print or read the clock  replaced during tracing (`patched_builtins`) to
                                                  report calls from the user's code
    lists, dicts, attributes, globals             compared before and after (`mutations`)

Side effects of libraries are ignored, and so are those of `build` and `__init__`, which are meant
to run once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from trainstep._common import user_code
from trainstep._common.errors import SideEffectError
from trainstep._explain.causes import Effect
from trainstep._surroundings.mutations import Mutations
from trainstep._surroundings.patched_builtins import Installed, active_listeners, install, uninstall
from trainstep._surroundings.reach import Reach

_RUN_ONCE = ("build", "__init__", "setup")


class Observer:
    """Finds the side effects of one trace.

    Args:
        function: The name of the step, for messages.
        reach: The values in reach of the step.
        is_tensor: Whether a value is a tensor.
        raises: Whether the first side effect raises a `SideEffectError`.
    """

    def __init__(
        self, function: str, reach: Reach, is_tensor: Callable[[Any], bool], *, raises: bool
    ) -> None:
        self._function, self._reach = function, reach
        self._raises = raises
        self._thread = threading.get_ident()
        self._installed: list[Installed] = []
        self._mutations = Mutations(reach, is_tensor)
        self._noted: dict[tuple[str, str, int], Effect] = {}

    def __enter__(self) -> Observer:
        active_listeners.append(self)
        try:
            install(self._reach.modules.values(), self._installed)
        except BaseException:  # Ctrl-C, for example: nothing must stay replaced
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        active_listeners.remove(self)
        uninstall(self._installed)

    def add(self, effects: Iterable[Effect]) -> None:
        """Adds side effects that were found elsewhere."""
        for effect in effects:
            self._note(effect)

    def found(self) -> list[Effect]:
        """All side effects; to be called after the trace."""
        self.add(self._mutations.found())
        self._mutations.forget()
        return list(self._noted.values())

    def calling(self, kind: str, called: str, frame: FrameType) -> bool:
        """Whether the user's code in the step makes the call; see `Listener`."""
        users = user_code.calling(frame)
        if threading.get_ident() != self._thread or users is None or _runs_once(users):
            return False
        if self._raises:
            self.called(kind, called, frame, None)
        return True

    def called(self, kind: str, called: str, frame: FrameType, result: Any) -> None:
        """Records a call and its result."""
        value = "" if result is None else f" {_short(result)}"
        file, line = user_code.where(user_code.calling(frame) or frame)
        self._note(Effect(kind, f"calls `{called}`", file, line, value))

    def _note(self, effect: Effect) -> None:
        self._noted.setdefault((effect.what, effect.file, effect.line), effect)
        if self._raises:
            self._mutations.undo()
            raise SideEffectError(effect.message(self._function))


def _runs_once(frame: FrameType | None) -> bool:
    """Whether the user's code runs inside a user's function that is meant to run once."""
    while frame is not None and user_code.is_users(frame):
        if frame.f_code.co_name in _RUN_ONCE:
            return True
        frame = frame.f_back
    return False


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
