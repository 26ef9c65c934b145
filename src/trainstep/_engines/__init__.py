"""The engines: the only code that imports JAX, TensorFlow or torch.

A recorded step enters by the contract (`contract.py`); an executable leaves. An engine may import
`_state`, `_explain` and `_common`, and no other engine; `null.py` is one that compiles nothing.
"""

from __future__ import annotations

import functools
import importlib

import keras

from trainstep._engines.contract import Axes as Axes
from trainstep._engines.contract import Engine as Engine
from trainstep._engines.contract import Executable as Executable
from trainstep._engines.contract import Inlined as Inlined
from trainstep._engines.contract import Options as Options
from trainstep._engines.contract import Refused as Refused
from trainstep._engines.contract import Sizes as Sizes
from trainstep._engines.contract import Traced as Traced
from trainstep._engines.contract import Unread as Unread


@functools.cache
def current() -> Engine:
    """The engine of the backend that Keras runs on. Keras fixes its backend at import."""
    name = keras.backend.backend()
    if name not in ("jax", "tensorflow", "torch"):
        raise ImportError(
            f"trainstep runs on the Keras backends jax, tensorflow and torch, and this is {name!r}"
            "; set KERAS_BACKEND before Keras is imported"
        )
    module = importlib.import_module(f"trainstep._engines.{name}.engine")
    engine: Engine = module.make()
    return engine
