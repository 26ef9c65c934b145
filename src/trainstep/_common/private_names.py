"""Looks up private names of libraries, which any new version may move or remove.

    a module, and names in it --find--> the module, or None: trainstep does without it
                              --need--> the object of that name, or an ImportError

Each library has one file with all lookups: `keras_private.py` beside this one, and `private.py` in
the folder of each engine. `TRAINSTEP_PRIVATE_NAMES=off`, or a comma list of names, hides them, as a
version that does not have them would.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from typing import Any

log = logging.getLogger("trainstep")
VARIABLE = "TRAINSTEP_PRIVATE_NAMES"
# What trainstep does without each name that `find` has looked up.
consequences: dict[str, str] = {}


def find(module: str, *names: str, without: str) -> Any:
    """Returns a module that has these names; None, with a line in the log, if there is none.

    Args:
        module: The name of the module.
        names: What trainstep uses of it.
        without: What trainstep does without it.
    """
    for name in names or ("",):
        path = f"{module}.{name}".rstrip(".")
        consequences[path] = without
        if is_hidden(path) or _looked_up(module, name) is None:
            log.info("%s has no `%s`: %s", _library(module), path, without)
            return None
    return importlib.import_module(module)


def need(module: str, name: str) -> Any:
    """Returns something in a module that trainstep cannot do without.

    Raises:
        ImportError: If it is missing.
    """
    found = _looked_up(module, name)
    if found is None:
        raise ImportError(
            f"trainstep needs `{module}.{name}`, which {_library(module)} does not have.\n"
            "  to fix:   install a version of it that trainstep was tested with (see README.md), "
            "or a newer trainstep"
        )
    return found


def is_hidden(path: str = "") -> bool:
    """Whether a name is hidden by the environment; without one, whether all are."""
    setting = os.environ.get(VARIABLE, "").strip()
    return setting == "off" or bool(path and path in map(str.strip, setting.split(",")))


def _looked_up(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split(".") if name else ():
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _library(module: str) -> str:
    name = module.partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(name, [name]):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return name
