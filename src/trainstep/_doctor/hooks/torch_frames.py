"""Frames that PyTorch compiles: the function, mode and signature of each.

one_step                           a function
torch_dynamo_resume_in_f_at_12     the part of `f` after the graph break at line 12
inner of torch._dynamo             a module of PyTorch's own, such as `torch.nn.Sequential`
"""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from trainstep._common.structure import structure
from trainstep._doctor.hooks.call_sites import frames_outward
from trainstep._doctor.hooks.function_identity import code_of, method_of, python_function
from trainstep._doctor.hooks.torch_paths import Scope, display, in_user_terms
from trainstep._explain.signature import Part, Signature

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
_ENTRIES = ("compile_wrapper", "_fn")
_SHOWN = 40  # parts of a recorded signature
_NUMBERS = (int, float, complex)
_DEPENDS = "training"  # the attribute that mode-dependent code reads


class CompiledCode(NamedTuple):
    """The function behind a compiled frame. Do not store it: that would keep the function alive.

    Attributes:
        code: The code of the whole function.
        fn: The function, bound if it is a method; None if unknown.
        line: The line of the graph break before this part; 0 for a whole function.
        wrapped: Whether the frame is PyTorch's wrapper of a module.
    """

    code: types.CodeType
    fn: Any
    line: int
    wrapped: bool


class Codes:
    """The compiled code objects. Each part after a graph break has its own."""

    def __init__(self) -> None:
        self._whole: dict[tuple[str, str], list[types.CodeType]] = {}
        self._parts: dict[types.CodeType, dict[int, list[types.CodeType]]] = {}

    def subject(
        self, code: types.CodeType, local: Mapping[str, Any], entry: types.FrameType | None
    ) -> CompiledCode:
        """The function behind a frame."""
        resumed = _RESUMED.search(code.co_name)
        if resumed is not None:
            line = int(resumed[2])
            return CompiledCode(self._of_part(code, resumed[1], line), None, line, False)
        module = local.get("fn")
        if _is_file(code, "external_utils.py") and hasattr(module, "_modules"):
            method = method_of(module, "forward")
            found = code_of(method) or code
            return CompiledCode(found, types.MethodType(method, module), 0, True)
        known = self._whole.setdefault((code.co_filename, code.co_name), [])
        if code not in known:
            known.append(code)
        return CompiledCode(code, _function(code, local, entry), 0, False)

    def _of_part(self, code: types.CodeType, name: str, line: int) -> types.CodeType:
        """The code of the function that contains a part."""
        for whole in reversed(self._whole.get((code.co_filename, name), [])):
            if any(each == line for *_, each in whole.co_lines()):
                return whole
        return code

    def part(self, subject: CompiledCode, code: types.CodeType) -> str:
        """A name for a part; several parts can follow one line."""
        if not subject.line:
            return ""
        known = self._parts.setdefault(subject.code, {}).setdefault(subject.line, [])
        if code not in known:  # equal code is created again after `torch._dynamo.reset()`
            known.append(code)
        number = known.index(code) + 1
        return f"after line {subject.line}" + (f" ({number})" if number > 1 else "")


def _is_file(code: types.CodeType, name: str) -> bool:
    return code.co_filename.replace("\\", "/").endswith(f"/torch/_dynamo/{name}")


def entry_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame of PyTorch's that calls a compiled function."""
    for each in frames_outward(frame):
        if each.f_code.co_name in _ENTRIES and _is_file(each.f_code, "eval_frame.py"):
            return each
    return None


def _function(code: types.CodeType, local: Mapping[str, Any], entry: types.FrameType | None) -> Any:
    """The function object of a frame, which PyTorch does not pass along."""
    given = None if entry is None else python_function(entry.f_locals.get("fn"))
    if given is not None and code_of(given) is code:
        return given
    owner = local.get(code.co_varnames[0]) if code.co_argcount else None
    method: Any = None if owner is None else method_of(owner, code.co_name)
    if code_of(method) is code:
        return types.MethodType(method, owner)
    return None


def arguments(code: types.CodeType) -> list[str]:
    """The names of the arguments of a function."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    return list(code.co_varnames[:count])


def scope_of(
    subject: CompiledCode, code: types.CodeType, local: Mapping[str, Any], around: dict[str, Any]
) -> Scope:
    """The values visible in a frame."""
    names = {"fn": "model"} if subject.wrapped else {}
    if subject.wrapped:
        names |= {f"args[{i}]": f"input {i}" for i in range(len(local.get("args", ())))}
    of = code if subject.wrapped else subject.code
    return Scope(code, frozenset(arguments(of)), local, around, names)


def mode(torch: Any, subject: CompiledCode, scope: Scope, values: Mapping[str, Any]) -> str:
    """The mode of a frame; empty for training with gradients."""
    found = []
    if torch.is_inference_mode_enabled():
        found.append("inference")
    elif not torch.is_grad_enabled():
        found.append("no grad")
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        found.append("autocast")
    modules = [each for each in _around(subject, scope, values) if _depends(torch, each)]
    if modules and not any(each.training for each in modules):
        found.append("eval")
    return ", ".join(found)


def _around(subject: CompiledCode, scope: Scope, values: Mapping[str, Any]) -> Iterator[Any]:
    """The values that a frame can reach directly."""
    yield from values.values()
    if subject.fn is not None:
        yield getattr(subject.fn, "__self__", None)
    for name in scope.code.co_names:
        yield scope.value(f"G[{name!r}]")


def _depends(torch: Any, value: Any) -> bool:
    """Whether a value is a module that behaves differently in training."""
    if not isinstance(value, torch.nn.Module):
        return False
    codes = (code_of(method_of(each, "forward")) for each in value.modules())
    return any(code is not None and _DEPENDS in code.co_names for code in codes)


def signature(scope: Scope, values: Mapping[str, Any]) -> Signature:
    """The signature of a frame: its arguments as text."""
    names = [name for name in arguments(scope.code) if not name.startswith("___")]
    leaves = (leaf for name in names if name in values for leaf in _leaves(name, values[name]))
    return Signature(_part(in_user_terms(n, scope), v) for n, v in itertools.islice(leaves, _SHOWN))


def _leaves(name: str, value: Any, deep: int = 0) -> Iterator[tuple[str, Any]]:
    children = structure(value) if deep < 4 else None
    if children is None:
        if not hasattr(value, "_modules"):
            yield name, value
        return
    for key, child in children:
        yield from _leaves(f"{name}{key}", child, deep + 1)


def _part(label: str, value: Any) -> Part:
    text, shape, dtype = (
        display(value),
        getattr(value, "shape", None),
        getattr(value, "dtype", None),
    )
    if shape is not None and dtype is not None:
        return Part(label, text, "array", (tuple(shape), str(dtype)))
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):
        return Part(label, text, "number", (type(value).__name__, text))
    kind = "static" if isinstance(value, (bool, str, type(None))) else "object"
    return Part(label, text, kind, text)
