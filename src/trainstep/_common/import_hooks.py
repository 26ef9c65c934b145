"""Hooks in libraries: put in place when a library is imported, and taken out again.

Nothing is imported here. What is imported already is hooked at once, and the rest when it is
imported. A hook that does not fit the installed version is told of, and left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[Any], None]


class Patches:
    """Everything that is changed in a process.

    Args:
        failed: Told of a hook that does not fit: the module's name and why.
    """

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._hooks: dict[str, list[Hook]] = {}
        self._undo: list[Callable[[], None]] = []
        self._busy: set[str] = set()

    def on_import(self, module: str, hook: Hook) -> None:
        """Runs a hook with a module, now or when it is imported."""
        self._hooks.setdefault(module, []).append(hook)
        loaded = sys.modules.get(module)
        if loaded is not None and not _is_loading(loaded):
            self._run(module, loaded, [hook])
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            self.undo_later(lambda: sys.meta_path.remove(self))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module that is waited for as Python would, and has its hooks run after it."""
        if name not in self._hooks or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            self._follow(name, spec.loader)
        return spec

    def _follow(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            self._run(name, module, self._hooks.get(name, []))

        try:
            loader.exec_module = exec_module
        except AttributeError as error:
            self._failed(name, error)

    def _run(self, name: str, module: Any, hooks: list[Hook]) -> None:
        for hook in hooks:
            try:
                hook(module)
            except Exception as error:  # the script is to run all the same
                self._failed(name, error)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Puts what `make` makes of an attribute in its place.

        Raises:
            AttributeError: If there is no such attribute.
        """
        original = getattr(owner, name)
        own = name in vars(owner)
        replaced = make(original)
        setattr(owner, name, replaced)

        def undo() -> None:
            if vars(owner).get(name) is not replaced:
                return  # somebody has put something else there since
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self.undo_later(undo)

    def undo_later(self, undo: Callable[[], None]) -> None:
        """Has something done when the hooks are taken out."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Takes all out again."""
        self._hooks.clear()
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:  # what is gone already
                continue


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))
