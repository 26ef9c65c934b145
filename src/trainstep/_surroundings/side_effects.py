"""Python that runs while a step is traced, and never again: found, with its line.

    names that draw, print or read the clock     lead here while the step is traced; a call from the
                                                 user's code is noted
    lists, dicts, attributes, globals around it  compared before and after (`_changes`)

Code of libraries may do what it likes, and so may `build` and `__init__`, which are meant to run
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from trainstep._common import user_code
from trainstep._common.errors import SideEffectError
from trainstep._explain.causes import Effect
from trainstep._surroundings.mutations import Changes
from trainstep._surroundings.patched_builtins import Placed, give_back, heard, replace
from trainstep._surroundings.reach import Reach

_ONCE = ("build", "__init__", "setup")


class Observer:
    """Watches one trace.

    Args:
        function: The name of the step, for messages.
        reach: What the step reaches.
        is_tensor: Tells a tensor.
        raises: Whether the first thing found raises a `SideEffectError`.
    """

    def __init__(
        self, function: str, reach: Reach, is_tensor: Callable[[Any], bool], *, raises: bool
    ) -> None:
        self._function, self._reach = function, reach
        self._raises = raises
        self._thread = threading.get_ident()
        self._replaced: list[Placed] = []
        self._changes = Changes(reach, is_tensor)
        self._noted: dict[tuple[str, str, int], Effect] = {}

    def __enter__(self) -> Observer:
        heard.append(self)
        try:
            replace(self._reach.modules.values(), self._replaced)
        except BaseException:  # Ctrl-C, say: nothing stays in place
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        heard.remove(self)
        give_back(self._replaced)

    def noticed(self, effects: Iterable[Effect]) -> None:
        """Takes in what was found elsewhere."""
        for effect in effects:
            self._note(effect)

    def found(self) -> list[Effect]:
        """What the step did, after it was traced."""
        self.noticed(self._changes.found())
        self._changes.forget()
        return list(self._noted.values())

    def calling(self, kind: str, called: str, frame: FrameType) -> bool:
        """Whether a call comes from the user's code in the step, and if so, notes it."""
        users = user_code.calling(frame)
        if threading.get_ident() != self._thread or users is None or _is_once(users):
            return False
        if self._raises:
            self.called(kind, called, frame, None)
        return True

    def called(self, kind: str, called: str, frame: FrameType, result: Any) -> None:
        """Notes a call, and what it gave."""
        given = "" if result is None else f" {_short(result)}"
        file, line = user_code.where(user_code.calling(frame) or frame)
        self._note(Effect(kind, f"calls `{called}`", file, line, given))

    def _note(self, effect: Effect) -> None:
        self._noted.setdefault((effect.what, effect.file, effect.line), effect)
        if self._raises:
            self._changes.undo()
            raise SideEffectError(effect.message(self._function))


def _is_once(frame: FrameType | None) -> bool:
    """Whether the user's code was called by a function of theirs that is meant to run once."""
    while frame is not None and user_code.is_users(frame):
        if frame.f_code.co_name in _ONCE:
            return True
        frame = frame.f_back
    return False


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
