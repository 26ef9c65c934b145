"""PyTorch: keeps tensor values and random numbers from becoming constants of a traced graph.

Under `make_fx`, tensors have real values, so Python could read one (`if`, `float`) and the graph
would contain the result. Also, Keras generates random numbers with a new `torch.Generator`, seeded
with the integer value of a `SeedGenerator`'s state. The guard detects both, as both read the value
of a tensor:

    read by Keras's seeding    returns a number of the guard's own; an operation that uses a
                               generator with this seed becomes one that takes the seed as a
                               tensor, and seeds at every run
    read by other Keras code   Uncompilable: the step has to run as Python
    read by the user           TensorValueNeeded
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep._engines.contract import Tensor
from trainstep._engines.torch.private import lists
from trainstep._engines.torch.state import memory
from trainstep._state.control_flow import Uncompilable

_aten = torch.ops.aten
_MEMORY_READS = (
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
)
_VALUE_READS = (_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default)


class TensorValueNeeded(RuntimeError):
    """Python code needs the value of a traced tensor."""

    _keras_call_info_injected = True  # keeps Keras from rewriting the text


class TraceGuard:
    """Watches one trace."""

    def __init__(self) -> None:
        # Below 2**32, as Keras masks seeds, and random, to differ from seeds that users choose.
        self._numbers = itertools.count(random.SystemRandom().randrange(2**30, 2**31))
        self.seeds: dict[int, Any] = {}
        self._updated: dict[int, Any] = {}
        self._made: set[int] = set()

    def __enter__(self) -> TraceGuard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.seeds.clear()
        self._updated.clear()
        self._made.clear()

    def watching(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn`, run with the guard above the tracing modes."""

        def watched(*args: Any) -> Any:
            with _FunctionMode(), _DispatchMode(self):
                return fn(*args)

        return watched

    def note_updates(self, func: Any, args: Any, kwargs: Any) -> None:
        """Records the memory that an operation updates in place."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, torch.Tensor):
                        storage = tensor.untyped_storage()
                        self._updated[storage._cdata] = storage  # alive, so its id is unique

    def note_results(self, args: Any, kwargs: Any, results: Any) -> None:
        """Records the memory that an operation allocated, without that of its inputs."""
        given = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = {memory(x) for x in tree_leaves(results) if isinstance(x, torch.Tensor)}
        self._made |= made - given

    def made(self, tensor: Any) -> bool:
        """Whether the tensor's memory was allocated during the trace."""
        return memory(tensor) in self._made

    def updated(self, tensor: Any) -> bool:
        """Whether an operation updated the tensor's memory in place."""
        return memory(tensor) in self._updated

    def number_for(self, seed: Any) -> int:
        """Returns a number that stands for a seed."""
        number = next(self._numbers)
        self.seeds[number] = seed
        return number


class _FunctionMode(TorchFunctionMode):  # type: ignore[misc]
    """Intercepts torch's functions before their arguments are converted.

    Keras's SGD passes the learning rate as `alpha`, which torch converts to a Python number: here,
    a tensor stays a tensor. Functions that expose a tensor's memory to Python are refused.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MEMORY_READS:
            _check_reader(sys._getframe(1))
        if isinstance(kwargs.get("alpha"), torch.Tensor):
            factor = kwargs.pop("alpha")
            target, other = args
            many = isinstance(other, (list, tuple))
            args = (target, _multiplied(other, factor) if many else other * factor)
        return func(*args, **kwargs)


def _multiplied(tensors: Sequence[Tensor], factor: Tensor) -> Any:
    if lists is not None:
        return lists._foreach_mul(tensors, factor)
    return [each * factor for each in tensors]


class _DispatchMode(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, guard: TraceGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VALUE_READS:
            _check_reader(sys._getframe(1))
            return self._guard.number_for(args[0])
        if _size_depends_on_values(func, args):
            raise Uncompilable(f"{func}, whose result has a size that depends on values")
        if func._schema.is_mutable:
            self._guard.note_updates(func, args, kwargs)
        generator = kwargs.get("generator") or next(
            (a for a in args if isinstance(a, torch.Generator)), None
        )
        if generator is not None:
            seed = self._guard.seeds.get(generator.initial_seed())
            if seed is not None:
                kept = [a for a in args if not isinstance(a, torch.Generator)]
                kwargs.pop("generator", None)
                func, args = _seeded(func), (seed, *kept)
        results = func(*args, **kwargs)
        self._guard.note_results(args, kwargs, results)
        return results


def _check_reader(reader: FrameType | None) -> None:
    """Raises the error for a read of a tensor's value, unless Keras's seeding reads it.

    The reader is the innermost frame that is neither torch's nor ours; `convert_to_numpy` reads on
    behalf of its caller.
    """
    while reader is not None and (
        _module(reader) in ("torch", "trainstep", "numpy")
        or reader.f_code.co_qualname.startswith("convert_to_numpy")
    ):
        reader = reader.f_back
    if reader is None or _module(reader) != "keras":
        raise TensorValueNeeded("the value of a traced tensor")
    if reader.f_code.co_name != "torch_seed_generator":
        raise Uncompilable(f"{reader.f_globals['__name__']}.{reader.f_code.co_name}")


def _size_depends_on_values(func: Any, args: Any) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is _aten.index.Tensor:  # with positions the size is fixed, with a mask it is not
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_made: dict[Any, Any] = {}
_library = torch.library.Library("trainstep", "FRAGMENT")


def _seeded(func: Any) -> Any:
    """Returns an operation like `func` that takes the seed as a tensor, not a generator."""
    if func not in _made:
        name = "seeded_" + str(func).replace("aten.", "").replace(".", "_")
        schema = str(func._schema)
        arguments = schema[schema.index("(") + 1 : schema.rindex(") ->")].split(", ")
        kept = [a for a in arguments if not a.startswith("Generator")]
        declared = ", ".join(["Tensor seed", *(kept[:-1] if kept[-1] == "*" else kept)])
        _library.define(f"{name}({declared}) -> Tensor")

        def run(seed: Any, *args: Any, **kwargs: Any) -> Any:
            generator = torch.Generator(device=seed.device)
            generator.manual_seed(int(seed) & 0xFFFFFFFF)
            return func(*args, **kwargs, generator=generator)

        # torch's `rand` with a generator does not support symbolic sizes; the one without does.
        plain = func._overloadname.replace("generator", "").strip("_") or "default"
        unseeded = getattr(func.overloadpacket, plain)

        def shape_only(seed: Any, *args: Any, **kwargs: Any) -> Any:
            return unseeded(*args, **kwargs)

        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"trainstep::{name}", shape_only, lib=_library)
        _made[func] = getattr(torch.ops.trainstep, name).default
    return _made[func]
