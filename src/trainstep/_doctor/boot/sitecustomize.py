"""Python runs this file at the start of every child process of a watched script."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_next_sitecustomize() -> None:
    """Runs the `sitecustomize` that this file shadows, if there is one."""
    path = [each for each in sys.path if os.path.abspath(each) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _EngineImportWatcher:
    """Starts doctor at the first import of an engine; until then the process stays untouched."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Finds no module; starts doctor if `name` is an engine."""
        if name in ("jax", "keras", "tensorflow", "torch") and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                _watch()
            except Exception as error:  # the child must run even if doctor fails
                print(
                    f"trainstep doctor: a child process is not watched: {error!r}", file=sys.stderr
                )


def _watch() -> None:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
    try:
        from trainstep._doctor.child_processes import watch_this_process
    finally:
        del sys.path[0]
    watch_this_process()


_run_next_sitecustomize()
if os.environ.get("TRAINSTEP_DOCTOR"):
    sys.meta_path.insert(0, _EngineImportWatcher())
