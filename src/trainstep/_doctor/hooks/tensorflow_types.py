"""Converts TensorFlow's function types to signatures that can be compared and printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainstep._doctor.hooks.function_identity import one_line
from trainstep._doctor.records import Cause
from trainstep._explain.signature import Part, Signature, array_text


def signature(kind: Any) -> Signature:
    """The parts of a `FunctionType`."""
    found: list[Part] = []
    for name, parameter in kind.parameters.items():
        found += _parts(name, parameter.type_constraint)
    return Signature(found)


def _parts(label: str, kind: Any) -> Iterator[Part]:
    name = type(kind).__name__
    children = _children(kind)
    if children is not None:
        what, named = children
        keys = [key for key, _ in named]
        if what:
            yield Part(label, f"{what} of {len(keys)}", "structure", f"{what} {keys}")
        for key, child in named:
            yield from _parts(f"{label}{key}", child)
    elif hasattr(kind, "shape") and hasattr(kind, "dtype"):
        rank = kind.shape.rank
        shape = None if rank is None else tuple(kind.shape.as_list())
        dtype = kind.dtype.name
        text = f"{dtype} of any shape" if shape is None else array_text(shape, dtype)
        yield Part(label, text, "array", (shape, dtype))
    elif name == "Literal":
        value = kind.value
        number = type(value) in (int, float, complex)
        yield Part(label, one_line(value), "number" if number else "static", repr(value))
    elif name == "Weakref":
        held = kind._ref()
        text = "a deleted object" if held is None else f"{type(held).__name__} object"
        yield Part(label, text, "object", kind)
    else:
        yield Part(label, one_line(kind), "static", kind)


def _children(kind: Any) -> tuple[str, list[tuple[str, Any]]] | None:
    name = type(kind).__name__
    if name == "Tuple" or isinstance(kind, tuple):
        items = kind.components if name == "Tuple" else kind
        return "tuple", [(f"[{i}]", each) for i, each in enumerate(items)]
    if name == "List" or isinstance(kind, list):
        items = kind.components_tuple.components if name == "List" else kind
        return "list", [(f"[{i}]", each) for i, each in enumerate(items)]
    if name == "Dict" or isinstance(kind, dict):
        items = kind.mapping if name == "Dict" else kind
        return "dict", [(f"[{key!r}]", each) for key, each in items.items()]
    if hasattr(kind, "_element_spec"):  # an iterator of tf.data
        return "", [("", kind._element_spec)]
    if name in ("NamedTuple", "Attrs"):
        named = zip(kind.attribute_names, kind.attributes.components, strict=True)
        return kind.type_name, [(f".{key}", each) for key, each in named]
    return None


def relaxed(kind: Any, asked: Any) -> str:
    """The arguments that TensorFlow generalized to dynamic sizes."""
    changes = signature(kind).changes(signature(asked))
    return "; ".join(change.text.replace(" -> ", " as ") for change in changes)


def context_causes(new: Any, earlier: Sequence[Any]) -> list[Cause]:
    """The smallest set of differences to an earlier context."""
    found = [_differences(new, each) for each in earlier]
    if not found:
        return [Cause("variables", "the first call created variables")]
    return min(found, key=len) or [Cause("unknown", "the same arguments")]


def _differences(new: Any, old: Any) -> list[Cause]:
    causes = []
    if new.scope_type != old.scope_type:
        causes.append(Cause("variables", "the first call created variables"))
    for name in getattr(new.context, "_fields", ()):
        before, now = getattr(old.context, name, None), getattr(new.context, name)
        if before != now:
            causes.append(Cause("context", f"{name}: {one_line(before)} -> {one_line(now)}"))
    return causes
