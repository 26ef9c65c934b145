"""JAX: a step that was recorded for sizes that vary, compiled for one bucket of them.

arrays --padded to the bucket--> program(state, arrays, true sizes) --cut--> outputs
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
from trainstep._engines.jax.masking.bucket import Bucket, varying
from trainstep._engines.jax.processes import gather
from trainstep._engines.jax.program import FastExecutable, WaitingExecutable, build
from trainstep._engines.jax.symbolic_sizes import true_shape
from trainstep._engines.shared.padding import Padding, own


def check_state(closed: Any, writes: Sequence[Variable]) -> None:
    """Refuses a step that gives a variable a shape that varies."""
    for variable, value in zip(writes, closed.jaxpr.outvars, strict=False):
        if varying(value.aval.shape):
            raise Refused(f"variable `{variable.path}` gets a value whose size varies")


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
    """Compiles a step for arrays of at most these sizes; see `build`."""
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
        Padding(array.shape, array.dtype, varying(aval.shape)) if varying(aval.shape) else None
        for array, aval in zip(shapes[len(reads) :], closed.in_avals[len(reads) :], strict=True)
    ]
    outputs = [v.aval.shape for v in closed.jaxpr.outvars[len(writes) :]]
    return Bucketed(run, names, paddings, axes, outputs)


class Bucketed:
    """Runs a program on arrays of any size up to its own."""

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
        self._places = [places[name] for name in names]  # where each size can be read
        self._cut = [place for place, shape in enumerate(outputs) if varying(shape)]
        self._true: dict[tuple[int, ...], list[tuple[slice, ...]]] = {}

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        sizes = tuple(leaves[leaf].shape[axis] for leaf, axis in self._places)
        arrays = [pad(here(x)) if pad else x for x, pad in zip(leaves, self._paddings, strict=True)]
        outs = list(self._run([*arrays, np.array(sizes, np.int32)]))
        return self.cut(outs, sizes) if self._cut else outs

    def fits(self) -> bool:
        """Whether the variables are where they were when the program was compiled."""
        return self._run.fits()

    def inline(self, arrays: dict[str, Any]) -> Source:
        """The same for these arguments, to be written into the path of a hit."""
        names: dict[str, Any] = {"bucketed": self, "known_sizes": _KnownSizes()}
        names |= {"here": here, "own": own}
        if not isinstance(self._run, FastExecutable):
            return Source(f"outs = bucketed(({''.join(f'{name}, ' for name in arrays)}))", names)
        leaves = []
        for (name, x), pad in zip(arrays.items(), self._paddings, strict=True):
            is_numpy = type(x) is np.ndarray
            given = name if is_numpy else f"here({name})"
            kept = f"own({name})" if is_numpy else name
            leaves.append(f"pad_{name}({given})" if pad else kept)
            names[f"pad_{name}"] = pad
        named = list(arrays)
        sizes = "".join(f"{named[leaf]}.shape[{axis}], " for leaf, axis in self._places)
        given = "known_sizes[sizes]"
        run = self._run.running([*leaves, f"here({given})" if self._run.is_spread else given])
        cut = "outs = bucketed.cut(outs, sizes)\n" if self._cut else ""
        return Source(f"sizes = ({sizes})\n{run.text}{cut}", {**run.names, **names})

    def cut(self, outs: list[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
        """The outputs without their padding."""
        slices = self._true.get(sizes)
        if slices is None:
            by_name = dict(zip(self._names, sizes, strict=True))
            shapes = [true_shape(self._outputs[place], by_name) for place in self._cut]
            slices = [tuple(map(slice, shape)) for shape in shapes]
            if len(self._true) < _REMEMBERED:
                self._true[sizes] = slices
        for place, part in zip(self._cut, slices, strict=True):
            outs[place] = _part(outs[place], part)
        return outs


class _KnownSizes(dict[tuple[int, ...], Tensor]):
    """Sizes as arrays on the device, where they are when a size comes again."""

    def __missing__(self, sizes: tuple[int, ...]) -> Tensor:
        if len(self) >= _REMEMBERED:
            self.clear()
        made = self[sizes] = jnp.asarray(np.array(sizes, np.int32))
        return made


def here(x: Any) -> Any:
    """An array that can be read in this process."""
    return gather(x) if isinstance(x, jax.Array) else x


_REMEMBERED = 4096  # sizes whose shapes of outputs are kept


def _part(x: Tensor, part: tuple[slice, ...]) -> Tensor:
    """The first part of an array. JAX would compile a program for every new size of it."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if jax.default_backend() == "cpu" and not is_key:
        return jax.device_put(np.asarray(x)[part])
    return x[part]
