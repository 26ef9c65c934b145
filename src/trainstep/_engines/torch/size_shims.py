"""PyTorch: replaces functions that need the value of a symbolic size, during a trace.

Keras converts a size to a tensor in every mean; `torch.as_tensor` would read the value of the
symbol. The replacements compute the same result, and are active in the tracing thread only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import keras
import torch
from torch.nn.modules.utils import _single
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from trainstep._engines.contract import Tensor
from trainstep._engines.torch.private import kernels

_SYMBOLIC = (torch.SymInt, torch.SymFloat)


class Shims(TorchFunctionMode):  # type: ignore[misc]
    """Calls the replacements."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.as_tensor, torch.tensor) and args:
            leaves = tree_leaves(args[0])
            if any(isinstance(x, _SYMBOLIC) for x in leaves):
                dtype = kwargs.get("dtype") or _dtype(leaves)
                return _tensor(args[0], dtype, kwargs.get("device"))
        if func in _REPLACEMENTS:
            return _REPLACEMENTS[func](*args, **kwargs)
        return func(*args, **kwargs)


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return torch.gather(x.reshape(-1), 0, indices.reshape(-1))
    dim = dim % x.dim()
    # Each is broadcast along the axes where it has size 1 and the other has more.
    pairs = [
        (a, b) if axis == dim else (b if a == 1 else a, a if b == 1 else b)
        for axis, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True))
    ]
    sizes, of_indices = zip(*pairs, strict=True)
    return torch.gather(x.expand(sizes), dim, indices.expand(of_indices))


def _max_pool1d(x: Tensor, kernel_size: Any, **settings: Any) -> Tensor:
    """Pools over two axes, the first of size 1."""
    stride = settings.pop("stride", None) or kernel_size
    around = {"padding": 0, "dilation": 1}
    for name, other in around.items():
        if name in settings:
            settings[name] = (other, *_single(settings[name]))
    found = torch.nn.functional.max_pool2d(
        x.unsqueeze(-2), (1, *_single(kernel_size)), (1, *_single(stride)), **settings
    )
    return tree_map(lambda tensor: tensor.squeeze(-2), found)


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.take_along_dim: _take_along_dim,
    torch.nn.functional.max_pool1d: _max_pool1d,
}


def _tensor(value: Any, dtype: Any, device: Any) -> Tensor:
    if isinstance(value, (list, tuple)):
        return torch.stack([_tensor(x, dtype, device) for x in value])
    if isinstance(value, torch.Tensor):
        return value.to(dtype=dtype, device=device)
    return torch.scalar_tensor(value, dtype=dtype, device=device)


def _dtype(leaves: Sequence[Any]) -> torch.dtype:
    """Returns the dtype of a tensor of these numbers; Keras's integers have 32 bits."""
    by_keras = module(sys._getframe(2)) == "keras"
    if any(isinstance(x, (float, torch.SymFloat)) for x in leaves):
        return getattr(torch, keras.config.floatx()) if by_keras else torch.get_default_dtype()
    return torch.int32 if by_keras else torch.int64


def module(frame: FrameType) -> str:
    """Returns the top-level package of a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


@contextlib.contextmanager
def any_kernel(env: Any) -> Iterator[None]:
    """Suppresses the guards on sizes by which torch chooses the kernel of a convolution.

    The operation in the graph chooses a kernel at every run. During the trace, the choice only
    determines the strides of the result, which are the same for all CPU kernels in 1D and 2D.
    """
    if kernels is None:
        yield
        return
    native = kernels._select_conv_backend

    def select(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        mode = getattr(x, "fake_mode", None)
        if mode is None or mode.shape_env is not env or weight.ndim > 4 or x.device.type != "cpu":
            return native(x, weight, *args, **kwargs)
        with env.suppress_guards():
            return native(x, weight, *args, **kwargs)

    kernels._select_conv_backend = select
    try:
        yield
    finally:
        kernels._select_conv_backend = native
