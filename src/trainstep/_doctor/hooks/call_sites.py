"""Lines of the user's code, and the Keras method that they called."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from trainstep._common import user_code
from trainstep._doctor.records import NOWHERE, Site

ROLES = {
    "fit": "train",
    "train_on_batch": "train",
    "evaluate": "test",
    "test_on_batch": "test",
    "predict": "predict",
    "predict_on_batch": "predict",
}


def site(frame: FrameType | None) -> Site:
    """The user's line from which a frame was called."""
    found = user_code.nearest(frame)
    if found is None:
        return NOWHERE
    return at(*user_code.where(found), function=_name(found.f_code))


def at(file: str, line: int, function: str = "") -> Site:
    """A line of a file."""
    return Site(file, line, linecache.getline(file, line).strip(), function)


def defined(code: CodeType) -> Site:
    """The line of a function's definition."""
    return at(code.co_filename, code.co_firstlineno, code.co_qualname)


def _name(code: CodeType) -> str:
    return code.co_name.removeprefix("tf__")


def frames_outward(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class KerasCall(NamedTuple):
    """A call of a Keras method in progress.

    Attributes:
        model: The model. Do not store it: that would keep it alive.
        role: `"train"`, `"test"` or `"predict"`.
        via: The method that the user called.
    """

    model: Any
    role: str
    via: str


def current_keras_call(frame: FrameType | None) -> KerasCall | None:
    """The innermost Keras method on the stack of a frame."""
    found: KerasCall | None = None
    for each in frames_outward(frame):
        name = each.f_code.co_name
        if name not in ROLES or not _is_trainer(each):
            continue
        if found is None:
            found = KerasCall(each.f_locals.get("self"), ROLES[name], name)
        elif found.via == "evaluate" and name == "fit":
            return found._replace(via="validation inside fit")
    return found


def is_keras(frame: FrameType) -> bool:
    """Whether the frame is in Keras."""
    return str(frame.f_globals.get("__name__", "")).startswith("keras.")


def _is_trainer(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith("keras.") and "train" in module


def called_by_trainstep(frame: FrameType | None) -> bool:
    """Whether trainstep is on the stack between a frame and the user's code."""
    for each in frames_outward(frame):
        module = str(each.f_globals.get("__name__", ""))
        if module.startswith("trainstep.") and not module.startswith("trainstep._doctor"):
            return True
        if user_code.is_users(each):
            return False
    return False
