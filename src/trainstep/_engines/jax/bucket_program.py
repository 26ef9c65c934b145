"""JAX: compiles a step that was recorded for dynamic sizes, for one bucket of sizes.

arrays --padded to the bucket--> program(state, arrays, true sizes) --unpadded--> outputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainstep._common.codegen import Source
from trainstep._engines.contract import Axes, Executable, Options, Refused, Sizes, Tensor, Variable
from trainstep._engines.jax.masking import evaluate
from trainstep._engines.jax.masking.bucket import Bucket, dynamic_axes
from trainstep._engines.jax.processes import gather
from trainstep._engines.jax.program import FastExecutable, WaitingExecutable, build
from trainstep._engines.jax.symbolic_sizes import true_shape
from trainstep._engines.shared.padding import Padding, own


def check_state(closed: Any, writes: Sequence[Variable]) -> None:
    """Refuses a step that assigns a value of a dynamic shape to a variable."""
    for variable, value in zip(writes, closed.jaxpr.outvars, strict=False):
        if dynamic_axes(value.aval.shape):
            raise Refused(f"variable `{variable.path}` is assigned a value of a dynamic size")


def build_bucket(
    closed: Any,
    reads: list[Variable],
    writes: list[Variable],
    options: Options,
    *,
    axes: Axes,
    sizes: Sizes,
    packable: Mapping[int, str],
) -> Executable:
    """Compiles a step for arrays of up to these sizes; see `build`."""
    names = sorted(sizes)

    def masked(*operands: Tensor) -> list[Tensor]:
        *arrays, true = operands
        bucket = Bucket(sizes, {name: true[place] for place, name in enumerate(names)})
        return evaluate(bucket, closed.jaxpr, closed.consts, arrays)

    bucket = Bucket(sizes, sizes)
    shapes = [
        jax.ShapeDtypeStruct(bucket.shape(aval.shape), aval.dtype) for aval in closed.in_avals
    ]
    recorded = jax.make_jaxpr(masked)(*shapes, jax.ShapeDtypeStruct((len(names),), jnp.int32))
    run = build(recorded, reads, writes, options, packable=packable)
    paddings = [
        Padding(array.shape, array.dtype, dynamic_axes(aval.shape))
        if dynamic_axes(aval.shape)
        else None
        for array, aval in zip(shapes[len(reads) :], closed.in_avals[len(reads) :], strict=True)
    ]
    outputs = [v.aval.shape for v in closed.jaxpr.outvars[len(writes) :]]
    return Bucketed(run, names, paddings, axes, outputs)


class Bucketed:
    """Runs the program of a bucket on arrays of any size up to the bucket's."""

    def __init__(
        self,
        run: FastExecutable | WaitingExecutable,
        names: Sequence[str],
        paddings: Sequence[Padding | None],
        axes: Axes,
        outputs: Sequence[Sequence[Any]],
    ) -> None:
        self._run, self._names, self._paddings, self._outputs = run, names, paddings, outputs
        places = {
            name: (leaf, axis)
            for leaf, labels in reversed(list(enumerate(axes)))
            for axis, name in enumerate(labels)
            if name is not None
        }
        self._places = [places[name] for name in names]  # the array and axis that have each size
        self._padded = [place for place, shape in enumerate(outputs) if dynamic_axes(shape)]
        self._slices: dict[tuple[int, ...], list[tuple[slice, ...]]] = {}

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        sizes = tuple(leaves[leaf].shape[axis] for leaf, axis in self._places)
        arrays = [
            pad(readable(x)) if pad else x for x, pad in zip(leaves, self._paddings, strict=True)
        ]
        outs = list(self._run([*arrays, np.array(sizes, np.int32)]))
        return self.unpad(outs, sizes) if self._padded else outs

    def fits(self) -> bool:
        """Whether the variables are stored as they were when the program was compiled."""
        return self._run.fits()

    def inline(self, arrays: dict[str, Any]) -> Source:
        """Returns the same for arguments like these, as statements of the fast path."""
        names: dict[str, Any] = {"bucketed": self, "sizes_on_device": _SizesOnDevice()}
        names |= {"readable": readable, "own": own}
        if not isinstance(self._run, FastExecutable):
            return Source(f"outs = bucketed(({''.join(f'{name}, ' for name in arrays)}))", names)
        leaves = []
        for (name, x), pad in zip(arrays.items(), self._paddings, strict=True):
            is_numpy = type(x) is np.ndarray
            given = name if is_numpy else f"readable({name})"
            kept = f"own({name})" if is_numpy else name
            leaves.append(f"pad_{name}({given})" if pad else kept)
            names[f"pad_{name}"] = pad
        named = list(arrays)
        sizes = "".join(f"{named[leaf]}.shape[{axis}], " for leaf, axis in self._places)
        given = "sizes_on_device[sizes]"
        run = self._run.running([*leaves, f"readable({given})" if self._run.is_spread else given])
        cut = "outs = bucketed.unpad(outs, sizes)\n" if self._padded else ""
        return Source(f"sizes = ({sizes})\n{run.text}{cut}", {**run.names, **names})

    def unpad(self, outs: list[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
        """Removes the padding from the outputs."""
        slices = self._slices.get(sizes)
        if slices is None:
            by_name = dict(zip(self._names, sizes, strict=True))
            shapes = [true_shape(self._outputs[place], by_name) for place in self._padded]
            slices = [tuple(map(slice, shape)) for shape in shapes]
            if len(self._slices) < _MOST:
                self._slices[sizes] = slices
        for place, part in zip(self._padded, slices, strict=True):
            outs[place] = _leading_part(outs[place], part)
        return outs


class _SizesOnDevice(dict[tuple[int, ...], Tensor]):
    """A cache of sizes as arrays on the device."""

    def __missing__(self, sizes: tuple[int, ...]) -> Tensor:
        if len(self) >= _MOST:
            self.clear()
        made = self[sizes] = jnp.asarray(np.array(sizes, np.int32))
        return made


def readable(x: Any) -> Any:
    """Returns an array that this process can read whole."""
    return gather(x) if isinstance(x, jax.Array) else x


_MOST = 4096  # entries of each cache


def _leading_part(x: Tensor, part: tuple[slice, ...]) -> Tensor:
    """Returns the first part of an array."""
    # On a CPU by NumPy: JAX compiles a program for every new size of a slice.
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if jax.default_backend() == "cpu" and not is_key:
        return jax.device_put(np.asarray(x)[part])
    return x[part]
