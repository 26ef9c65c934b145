"""PyTorch: torch modules inside of Keras models.

`keras.layers.TorchModuleWrapper` has a variable for each parameter, but its module reads the
parameters directly. While a step is traced or differentiated, the module is called with the values
that the variables have in the current scope.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from keras.layers import TorchModuleWrapper
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from trainstep._state.scopes import current_scope

_call = TorchModuleWrapper.call


def follow_variables() -> None:
    """Makes modules read the values of variables; permanent."""
    TorchModuleWrapper.call = _call_with_variables


def _call_with_variables(self: Any, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
    if current_scope() is None:
        return _call(self, *args, training=training, **kwargs)
    self.train(training is not False)
    variables = {id(variable._value): variable for variable in self.variables}
    values = {
        name: variables[id(parameter)].value
        for name, parameter in self.module.named_parameters()
        if id(parameter) in variables
    }
    with _buffers_kept(self.module):
        return torch.func.functional_call(self.module, values, args, kwargs)


@contextlib.contextmanager
def _buffers_kept(module: Any) -> Iterator[None]:
    """Restores the buffers of a module: the graph updates them at each run, the trace must not."""
    if get_proxy_mode() is None:
        yield
        return
    buffers = list(module.buffers())
    with disable_proxy_modes_tracing(), torch.no_grad():
        before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with disable_proxy_modes_tracing(), torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.data.copy_(value)  # `data`: autograd does not count this as a modification
