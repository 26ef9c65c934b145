"""Rules for contractions, convolutions and windows."""

from __future__ import annotations

from typing import Any

from trainstep._engines.jax.masking.bucket import Tensor, dynamic_axes, is_dynamic
from trainstep._engines.jax.masking.evaluate import Equation, Rule, rule
from trainstep._engines.jax.masking.reduce import Neutral, highest, lowest, zero


@rule("dot_general")
def _contract(e: Equation) -> Tensor:
    (left, right), _ = e.params["dimension_numbers"]
    # Both sides: zero times NaN is NaN.
    return e.bind(e.filled(0, left, 0), e.filled(1, right, 0))


@rule("conv_general_dilated")
def _convolve(e: Equation) -> Tensor:
    """Fills with zeros: they act like the convolution's own padding at the end."""
    numbers = e.params["dimension_numbers"]
    left, right = numbers.lhs_spec, numbers.rhs_spec  # batch or outputs first, then features
    groups = e.params["feature_group_count"], e.params["batch_group_count"]
    if any(map(is_dynamic, groups)):
        raise e.refuse("with a dynamic number of groups has no rule")
    if groups[1] != 1 and is_dynamic(e.shapes[0][left[0]]):
        raise e.refuse("in groups of a batch of dynamic size has no rule")
    if groups[0] != 1 and is_dynamic(e.shapes[0][left[1]]):
        raise e.refuse("in groups of a dynamic number of features has no rule")
    return e.bind(
        e.filled(0, left[1:], 0), e.filled(1, right[1:], 0), padding=_padding(e, e.params)
    )


def _padding(e: Equation, params: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Returns the padding parameter; dynamic padding at the front would shift positions."""
    if any(is_dynamic(low) for low, _ in params["padding"]):
        raise e.refuse("with dynamic padding at the front has no rule")
    return tuple((low, e.bucket.at(high)) for low, high in params["padding"])


def _windows(e: Equation, index: int) -> list[int]:
    """Returns the axes of an operand along which positions mix."""
    shape, window = e.shapes[index], e.params["window_dimensions"]
    if any(map(is_dynamic, window)):
        raise e.refuse("with a window of dynamic size has no rule")
    plain = [
        size == 1 and tuple(padding) == (0, 0)
        for size, padding in zip(window, e.params["padding"], strict=True)
    ]
    return [axis for axis in dynamic_axes(shape) if not plain[axis]]


def _windowed(neutral: Neutral) -> Rule:
    def reduce(e: Equation) -> Tensor:
        x = e.filled(0, _windows(e, 0), neutral(e.operands[0].dtype))
        return e.bind(x, padding=_padding(e, e.params))

    return reduce


rule("reduce_window_sum")(_windowed(zero))
rule("reduce_window_max")(_windowed(lowest))
rule("reduce_window_min")(_windowed(highest))


@rule("select_and_scatter_add")
def _unpool(e: Equation) -> Tensor:
    """The gradient of a maximum over windows."""
    axes = _windows(e, 1)
    source = e.filled(0, axes, 0)
    operand = e.filled(1, axes, lowest(e.operands[1].dtype))
    return e.bind(source, operand, padding=_padding(e, e.params))


@rule("select_and_gather_add")
def _pick(e: Equation) -> Tensor:
    if _windows(e, 1):
        raise e.refuse("over windows of an axis of dynamic size has no rule")
    return e.bind(*e.operands, padding=_padding(e, e.params))


def _matrices(e: Equation) -> Any:
    """Decompositions of matrices, one for each position of the other axes."""
    others = len(e.shapes[0]) - 2
    for shape in (*e.shapes, *e.results):
        if any(axis >= others for axis in dynamic_axes(shape)):
            raise e.refuse("of a matrix of dynamic size has no rule")
    return e.bind(*e.operands)


rule("cholesky", "eigh", "geqrf", "householder_product", "lu", "qr", "svd", "triangular_solve")(
    _matrices
)


@rule("fft")
def _transform(e: Equation) -> Tensor:
    (shape,), lengths = e.shapes, e.params["fft_lengths"]
    if any(axis >= len(shape) - len(lengths) for axis in dynamic_axes(shape)):
        raise e.refuse("along an axis of dynamic size has no rule")
    return e.bind(*e.operands)
