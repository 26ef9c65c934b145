"""Temporarily replaces functions of libraries when the libraries are imported.

No library is imported here: a hook runs at once if its library is imported already, and otherwise
right after the import. A hook that does not fit the installed version is reported and skipped.
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
    """The hooks and replaced attributes of a process, and how to undo them.

    Args:
        failed: Called with the module's name and the error of a hook that does not fit.
    """

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._hooks: dict[str, list[Hook]] = {}
        self._undo: list[Callable[[], None]] = []
        self._finding: set[str] = set()

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
        """Finds a hooked module as Python would, and runs the hooks after its import."""
        if name not in self._hooks or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            self._run_after(name, spec.loader)
        return spec

    def _run_after(self, name: str, loader: Any) -> None:
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
            except Exception as error:  # the user's script has to run all the same
                self._failed(name, error)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces an attribute by `make(attribute)`, until `undo`.

        Raises:
            AttributeError: If there is no such attribute.
        """
        original = getattr(owner, name)
        own = name in vars(owner)
        replaced = make(original)
        setattr(owner, name, replaced)

        def undo() -> None:
            if vars(owner).get(name) is not replaced:
                return  # other code has replaced it since
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self.undo_later(undo)

    def undo_later(self, undo: Callable[[], None]) -> None:
        """Adds a function for `undo` to call."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Removes the hooks and restores every replaced attribute, the latest first."""
        self._hooks.clear()
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:  # gone already
                continue


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))
