"""One compiled training step for Keras 3, on JAX, TensorFlow and PyTorch.

Importing this imports nothing else: Keras, and the engine that it runs on, come with the first name
that needs them. A script may so be watched (`trainstep doctor`) that uses no Keras, or that chooses
its engine itself.
"""

import importlib as _importlib
import typing as _typing

from trainstep._common.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from trainstep import graph as graph
    from trainstep._doctor import doctor as doctor
    from trainstep._public import *  # noqa: F403
else:
    from trainstep._common.public_names import NAMES as _NAMES

    __all__ = list(_NAMES)

    def __getattr__(name: str) -> _typing.Any:
        if name == "graph":
            return _importlib.import_module("trainstep.graph")
        if name not in __all__:
            raise AttributeError(f"module 'trainstep' has no attribute {name!r}")
        if name == "doctor":
            from trainstep._doctor import doctor

            return doctor
        from trainstep import _public

        globals()[name] = found = getattr(_public, name)  # asked for once
        return found

    def __dir__() -> list[str]:
        return __all__
