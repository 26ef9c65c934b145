"""AutoGraph, which rewrites the functions that TensorFlow traces.

load_ast      AutoGraph generated code: maps its lines to the user's
isbuiltin,    AutoGraph replaces `print` by an operation that prints at every call; it must do the
overload_of   same with the stand-in by which doctor observes `print`
"""

from __future__ import annotations

import functools
from typing import Any

from trainstep._common import user_code
from trainstep._common.import_hooks import Patches

_AUTOGRAPH = "tensorflow.python.autograph"


def install(patches: Patches) -> None:
    """Installs the hooks when AutoGraph is imported."""
    hooks = {"pyct.loader": _lines, "pyct.inspect_utils": _builtin, "operators.py_builtins": _print}
    for module, hook in hooks.items():
        patches.on_import(f"{_AUTOGRAPH}.{module}", functools.partial(hook, patches))


def _lines(patches: Patches, module: Any) -> None:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def load_ast(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            for line, origin in (result[2] or {}).items():
                found = (origin.loc.filename, origin.loc.lineno)
                user_code.mapped[line.filename, line.lineno] = found
            return result

        return load_ast

    patches.replace(module, "load_ast", make)


def _builtin(patches: Patches, module: Any) -> None:
    def make(original: Any) -> Any:
        def isbuiltin(fn: Any) -> Any:
            return _is_print(fn) or original(fn)

        return isbuiltin

    patches.replace(module, "isbuiltin", make)


def _print(patches: Patches, module: Any) -> None:
    def make(original: Any) -> Any:
        def overload_of(fn: Any) -> Any:
            if not _is_print(fn):
                return original(fn)
            own = original(fn.__wrapped__)

            def printing(*args: Any, **kwargs: Any) -> Any:
                if any(map(module.tensor_util.is_tf_type, args)):
                    return own(*args, **kwargs)
                return fn(*args, **kwargs)

            return printing

        return overload_of

    patches.replace(module, "overload_of", make)


def _is_print(fn: Any) -> bool:
    return getattr(fn, "stands_for", None) == "print"
