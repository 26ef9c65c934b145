"""Run by Python at the start of a process that a watched script started."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _own() -> None:
    """Runs the `sitecustomize` that this one stands before, if there is one."""
    path = [each for each in sys.path if os.path.abspath(each) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch() -> None:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
    try:
        from trainstep._doctor._children import watch
    finally:
        del sys.path[0]
    watch()


_own()
try:
    _watch()
except Exception as error:  # the child is to run all the same
    print(f"trainstep doctor: a child is not watched: {error!r}", file=sys.stderr)
