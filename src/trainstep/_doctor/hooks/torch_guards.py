"""Converts a failed guard of PyTorch's to a cause, in terms of the user's code.

    "0/1: G['cfg'].step == 3  # def f(x): ..."  -->  capture, "global cfg.step: 3 -> 4"

A guard is a condition under which a program is valid. PyTorch reports the first failed guard of
each earlier program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainstep._doctor.hooks.torch_paths import UNKNOWN, Scope, display, in_user_terms
from trainstep._doctor.records import Cause

_TENSOR = re.compile(r"tensor '(?P<what>.+?)' (?P<aspect>size|rank|stride|dtype) mismatch")
_CHANGED = re.compile(r"(?:at index (?P<axis>\d+))?\. expected (?P<old>\S+), actual (?P<new>\S+)")
_REQUIRES = re.compile(r"tensor '(.+?)' requires_grad mismatch\. expected requires_grad=(\d)")
_KEYS = re.compile(r"tensor '(.+?)' dispatch key set mismatch")
_NO_TENSOR = re.compile(r"expected type of '(.+?)' to be a tensor type")
_TYPE = re.compile(r"___check_type_id\((.+), \d+\), type=<class '(.+?)'>")
_OBJECT = re.compile(r"___check_obj_id\((.+), \d+\), type=<class '(.+?)'>")
_CONTAINS = re.compile(r"___dict_contains\('(.+?)', (.+?)(?:\.__dict__)?\)$")
_LENGTH = re.compile(r"len\((.+)\) (?:==|!=|>=) (\d+)$")
_KEYS_OF = re.compile(r"list\(dict\.keys\((.+?)\)\) ==|___check_type_id\(next\(iter\((.+?)\)")
_TRAINING = re.compile(r"(.+)\.training == (True|False)$")
_NO_GRADIENT = re.compile(r".+\.grad is (?:not )?None$")
_NONE = re.compile(r"(.+?) is (not )?None$")
_COMPARED = re.compile(r"(?:not )?(.+?) (==|!=|<=|>=|<|>|is|is not|in) (.+)$")
_DUPLICATE = re.compile(r"Duplicate tensors? found")
_INVALID = re.compile(r"invalidated because (.+?) got deallocated")
_FUNCTIONS = ("function", "code", "method", "builtin_function_or_method")
_STATES = {"grad_mode": "gradients", "autocast": "autocast"}
_WIDE = 100


class Reason(NamedTuple):
    """A guard that made an earlier program unusable for a call.

    Attributes:
        program: PyTorch's id of the program: `"0/1"`.
        guard: The guard that failed, as PyTorch writes it.
    """

    program: str
    guard: str


def reasons(texts: Sequence[str]) -> list[Reason]:
    """Parses PyTorch's texts; the program that ran last comes first."""
    found = []
    for each in texts:
        text = re.sub(r"L\[\s*['\"](.*?)['\"]\s*\]", r"\1", each.partition("\nUser stack")[0])
        number = re.match(r"(\[?!?[\d/]+\]?): ", text)
        guard = text[number.end() :] if number else text
        guard = " ".join(re.split(r"\s+# ", guard)[0].split())
        found.append(Reason(number[1].strip("[]") if number else "", guard))
    return found


def cause(reason: Reason, scope: Scope) -> Cause:
    """The cause that a failed guard stands for."""
    for read in _READERS:
        found = read(reason.guard, scope)
        if found is not None:
            return found
    return Cause("unknown", reason.guard[:_WIDE])


def becomes_dynamic(reason: Reason, scope: Scope) -> str:
    """The size or number that PyTorch treats as dynamic from now on; empty if none."""
    guard = reason.guard
    match, changed = _TENSOR.match(guard), _CHANGED.search(guard)
    if match and changed and match["aspect"] == "size" and not _is_parameter(guard):
        if changed["new"] in ("0", "1"):
            return ""
        return f"size {changed['axis']} of {in_user_terms(match['what'], scope)}"
    compared = _COMPARED.match(guard)
    if compared and compared[2] == "==" and not scope.is_module(compared[1]):
        value = scope.value(compared[1])
        if type(value) in (int, float) and str(type(value)(0)).count(".") == compared[3].count("."):
            return in_user_terms(compared[1], scope)
    return ""


# Readers: each parses some kinds of guards ------------------------------------------------------


def _setting(guard: str, scope: Scope) -> Cause | None:
    if guard.startswith("GLOBAL_STATE changed"):
        names = guard.partition(": ")[2].split()
        for known, word in _STATES.items():
            if names and names[0].startswith(known):
                return Cause("mode", f"{word} turned on or off")
        return Cause("context", f"changed PyTorch setting: {', '.join(names)}")
    if guard.startswith("BACKEND_MATCH"):
        return Cause("context", "`torch.compile` has another backend")
    return None


def _tensor(guard: str, scope: Scope) -> Cause | None:
    if "device index mismatch" in guard:
        return Cause("context", "tensors on another device")
    if match := _REQUIRES.match(guard):
        old = match[2] == "1"
        return Cause("flag", f"{in_user_terms(match[1], scope)}: requires_grad {old} -> {not old}")
    if match := _KEYS.match(guard):
        inference = scope.value(match[1])
        kind = "mode" if getattr(inference, "is_inference", bool)() else "context"
        return Cause(kind, f"{in_user_terms(match[1], scope)}: different kind of tensor")
    if match := _NO_TENSOR.match(guard):
        now = display(scope.value(match[1]))
        return Cause("structure", f"{in_user_terms(match[1], scope)}: a tensor -> {now}")
    match, changed = _TENSOR.match(guard), _CHANGED.search(guard)
    if match is None or changed is None:
        return None
    name, aspect = in_user_terms(match["what"], scope), match["aspect"]
    old, new = (changed[each].rstrip(".").lower() for each in ("old", "new"))
    axis = "" if changed["axis"] is None else f" {changed['axis']}"
    if _is_parameter(guard):
        return Cause("object", f"different module: {name} has {aspect}{axis} {old} -> {new}")
    kind = "dtype" if aspect == "dtype" else "shape"
    return Cause(kind, f"{name}: {aspect}{axis} was {old}, now {new}")


def _is_parameter(guard: str) -> bool:
    return "_parameters[" in guard or "failed on a parameter" in guard


def _identity(guard: str, scope: Scope) -> Cause | None:
    if match := _OBJECT.match(guard):
        kind, name = match[2].rpartition(".")[2], in_user_terms(match[1], scope)
        if kind in _FUNCTIONS:
            return Cause("function", f"{name.removesuffix('.__code__')}: another function")
        now = scope.value(match[1])
        if now is UNKNOWN:
            return Cause("object", f"{name}: another {kind}")
        if isinstance(now, (bool, str, type(None))) or hasattr(type(now), "__members__"):
            return Cause("static", f"{name}: another value, {display(now)}")
        return Cause("object", f"{name}: another {kind} -> {display(now)}")
    if match := _TYPE.match(guard):
        now, old = scope.value(match[1]), match[2].rpartition(".")[2]
        new = "another type" if now is UNKNOWN else type(now).__name__
        return Cause("structure", f"{in_user_terms(match[1], scope)}: {old} -> {new}")
    if _DUPLICATE.match(guard):
        return Cause("object", "two arguments are now the same tensor")
    if match := _INVALID.search(guard):
        return Cause("object", f"an object of the earlier program was deleted: {match[1][:_WIDE]}")
    return None


def _mode(guard: str, scope: Scope) -> Cause | None:
    if match := _TRAINING.match(guard):
        now = "eval" if match[2] == "True" else "training"
        return Cause("mode", f"{in_user_terms(match[1], scope)} is in {now} mode")
    if _NO_GRADIENT.match(guard):
        return Cause("mode", "the first step has no gradients yet")
    if (match := _LENGTH.match(guard)) and match[2] == "0" and ".state" in match[1]:
        return Cause("mode", "the first step has no optimizer state yet")
    return None


def _structure(guard: str, scope: Scope) -> Cause | None:
    if match := _CONTAINS.search(guard):
        name = f"{in_user_terms(match[2], scope)}.{match[1]}"
        how = "was set" if guard.startswith("not ") else "was deleted"
        return Cause("capture", f"{name} {how}")
    if match := _LENGTH.match(guard):
        value = scope.value(match[1])
        now = len(value) if hasattr(value, "__len__") else "another"
        return Cause("structure", f"{in_user_terms(match[1], scope)}: length {match[2]} -> {now}")
    if match := _KEYS_OF.search(guard):
        return Cause("structure", f"{in_user_terms(match[1] or match[2], scope)}: different keys")
    return None


def _value(guard: str, scope: Scope) -> Cause | None:
    if ".size()[" in guard or ".stride()[" in guard or ".shape[" in guard:
        return Cause("shape", f"a size violates {in_user_terms(guard, scope)[:_WIDE]}")
    if match := _NONE.match(guard):
        kind = scope.kind(match[1])
        kind = "structure" if kind in ("static", "number") else kind
        now = "None" if match[2] else display(scope.value(match[1]))
        old = "a value" if match[2] else "None"
        return Cause(kind, f"{in_user_terms(match[1], scope)}: {old} -> {now}")
    match = _COMPARED.match(guard)
    if match is None:
        return None
    kind, name = scope.kind(match[1]), in_user_terms(match[1], scope)
    now = scope.value(match[1])
    if now is UNKNOWN:
        return Cause(kind, f"{name}: no longer {match[2]} {match[3]}"[:_WIDE])
    if match[2] == "==":
        return Cause(kind, f"{name}: {match[3]} -> {display(now)}"[:_WIDE])
    return Cause(kind, f"{name}: {display(now)}, expected {match[2]} {match[3]}"[:_WIDE])


_READERS: tuple[Callable[[str, Scope], Cause | None], ...] = (
    _setting,
    _tensor,
    _mode,
    _identity,
    _structure,
    _value,
)


def all_changed_tensors(found: Cause, changes: Sequence[Any]) -> list[Cause]:
    """The causes for all tensors that changed in the same way; PyTorch reports only the first."""
    if found.kind not in ("shape", "dtype"):
        return [found]
    name = found.text.partition(": ")[0]
    same = [Cause(each.kind, each.text) for each in changes if each.kind == found.kind]
    return same if any(each.text.startswith(f"{name}: ") for each in same) else [found]
