"""One compiled training step for Keras 3, on JAX, TensorFlow and PyTorch.

Importing this imports nothing else: Keras, and the engine that it runs on, come with the first name
that needs them. A script may so be watched (`trainstep doctor`) that uses no Keras, or that chooses
its engine itself.
"""

from typing import TYPE_CHECKING
from typing import Any as _Any

from trainstep._version import __version__ as __version__

if TYPE_CHECKING:
    from trainstep._doctor import doctor as doctor
    from trainstep._public import *  # noqa: F403
else:

    def __getattr__(name: str) -> _Any:
        if name.startswith("_") and name != "__all__":  # a module that nobody has imported
            raise AttributeError(f"module 'trainstep' has no attribute {name!r}")
        if name == "doctor":
            from trainstep._doctor import doctor

            return doctor
        from trainstep import _public

        if name == "__all__":
            return sorted([*_public.__all__, "doctor"])
        if name not in _public.__all__:
            raise AttributeError(f"module 'trainstep' has no attribute {name!r}")
        globals()[name] = found = getattr(_public, name)  # asked for once
        return found

    def __dir__() -> list[str]:
        return __getattr__("__all__")
