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


class _Waiting:
    """Waits for an engine to be imported: until then, the process is left alone."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Finds nothing, and has the process watched if it is about to import an engine."""
        if name in ("jax", "keras", "tensorflow", "torch") and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                _watch()
            except Exception as error:  # the process is to run all the same
                print(f"trainstep doctor: a child is not watched: {error!r}", file=sys.stderr)


def _watch() -> None:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
    try:
        from trainstep._doctor.child_processes import watch
    finally:
        del sys.path[0]
    watch()


_own()
if os.environ.get("TRAINSTEP_DOCTOR"):
    sys.meta_path.insert(0, _Waiting())
