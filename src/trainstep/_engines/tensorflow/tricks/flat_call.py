"""Trick: calls a concrete function without matching Python arguments to its inputs.

The arrays of our calls are already in the order of the inputs, so a call skips several Python
layers. NumPy arrays become tensors by the constructor of `EagerTensor`, in half the time of
`tf.constant`. It applies to every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainstep._engines.contract import Executable, Tensor
from trainstep._engines.tensorflow.private import context, eager_ops


def tensor_of(array: Any) -> Tensor:
    """Returns a tensor with a copy of a NumPy array."""
    # A copy: the tensor aliases aligned memory, and a variable may keep the tensor.
    return eager_ops.EagerTensor(array.copy(), context.context().device_name, None)


def executable(concrete: Any) -> Executable:
    """Returns an executable that runs a concrete function."""
    eager_tensor = eager_ops.EagerTensor
    call, captured = concrete._inference_function.call_flat, concrete.captured_inputs

    def run(leaves: Sequence[Any]) -> Sequence[Tensor]:
        tensors = [x if type(x) is eager_tensor else tensor_of(x) for x in leaves]
        return call(*tensors, *captured)  # type: ignore[no-any-return]

    return run
