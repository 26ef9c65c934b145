"""TensorFlow: rules for operations on single rows of a batch, and for sums over rows.

A rule gets an operation of the record with an input that is cut, or whose sum is pending, and emits
the operation for each device; it returns None if it does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainstep._engines.contract import Tensor
from trainstep._engines.tensorflow.partition.partition import Partition, Rule, Values
from trainstep._engines.tensorflow.partition.shape_rules import (
    SHAPES,
    first_cut,
    keeping_sums_pending,
)

# Elementwise, with broadcasting.
_POINTWISE = """
Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BitwiseAnd BitwiseOr
BitwiseXor Cast Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu EluGrad Equal Erf
Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv InvGrad Invert
IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd
LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient Real
RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round Rsqrt
RsqrtGrad SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Snapshot Softplus SoftplusGrad
Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference StopGradient Sub Tan Tanh TanhGrad
TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike
"""


def rule_of(kind: str) -> Rule:
    """Returns the rule for a kind of operation."""
    return _RULES.get(kind, _unknown)


def _unknown(part: Partition, op: Any) -> Values:
    """No rule: the operation gets whole values."""
    return None


def _pointwise(part: Partition, op: Any) -> Values:
    rank, found = part.rank(op.outputs[0]), first_cut(part, op.inputs)
    ranks = {x.name: part.rank(x) for x in op.inputs}
    if rank is None or found is None or None in ranks.values():
        return None
    cut = part.cut_of(found)
    assert cut is not None
    of_all = cut._replace(axis=cut.axis + rank - int(ranks[found.name] or 0))

    def local(k: int) -> list[Tensor]:
        return [
            part.along(x, of_all._replace(axis=of_all.axis - rank + int(ranks[x.name] or 0)), k)
            for x in op.inputs
        ]

    return part.of_parts(op, local, [of_all])


# Sums ---------------------------------------------------------------------------------------------


def _axes(part: Partition, op: Any) -> tuple[list[int] | None, bool]:
    """Returns the axes that an operation reduces, and whether they are kept."""
    rank, axes = part.rank(op.inputs[0]), part.shapes.value(op.inputs[1])
    if axes is None or rank is None:
        return None, False
    axes = axes if isinstance(axes, list) else [axes]
    return [axis % rank for axis in axes], bool(op.node_def.attr["keep_dims"].b)


def _reduced(part: Partition, op: Any) -> Values:
    cut, (axes, keep) = part.cut_of(op.inputs[0]), _axes(part, op)
    if cut is None or axes is None or part.cut_of(op.inputs[1]):
        return None
    if cut.axis not in axes:
        return part.on_rows(op, [cut.without(axes, keep=keep)])
    if op.type == "Sum":
        return part.on_rows(op, [None])
    if op.type != "Mean" or not op.outputs[0].dtype.is_floating:
        return None
    x = op.inputs[0]
    counts = tf.gather(part.full_shape(x), axes)
    count = tf.cast(tf.reduce_prod(counts), x.dtype)
    return [part.summed(part.map(x, lambda tensor: tf.reduce_sum(tensor, axes, keep) / count))]


def _index_of_most(part: Partition, op: Any) -> Values:
    x, axis = op.inputs[0], part.shapes.value(op.inputs[1])
    cut, rank = part.cut_of(x), part.rank(x)
    if cut is None or rank is None or axis is None or axis % rank == cut.axis:
        return None
    return part.on_rows(op, [cut.without([axis % rank])])


def _added_up(part: Partition, op: Any) -> Values:
    """An operation that sums over all rows."""
    return part.on_rows(op, [None])


def _bias_grad(part: Partition, op: Any) -> Values:
    cut, rank = part.cut_of(op.inputs[0]), part.rank(op.inputs[0])
    channels_last = op.node_def.attr["data_format"].s != b"NCHW"
    channels = None if rank is None else (rank - 1 if channels_last else rank - 3)
    return None if cut is None or cut.axis == channels else part.on_rows(op, [None])


# Products -----------------------------------------------------------------------------------------


def _product(part: Partition, op: Any, terms: Sequence[str], result: str) -> Values:
    """A product in einsum notation; rows that are contracted become a pending sum."""
    found = first_cut(part, op.inputs)
    if found is None:
        return None
    place = next(p for p, x in enumerate(op.inputs) if x is found)
    cut = part.cut_of(found)
    assert cut is not None
    letter = terms[place][cut.axis]
    if any(term.count(letter) > 1 for term in (*terms, result)):
        return None
    if letter not in result and not all(letter in term for term in terms):
        return None

    def local(k: int) -> list[Tensor]:
        return [
            part.along(x, cut._replace(axis=term.find(letter)), k) if letter in term else whole(x)
            for x, term in zip(op.inputs, terms, strict=True)
        ]

    def whole(x: Tensor) -> Tensor:
        return part.whole(x)

    new = cut._replace(axis=result.index(letter)) if letter in result else None
    return part.of_parts(op, local, [new])


def _matmul(part: Partition, op: Any) -> Values:
    attributes = op.node_def.attr
    if op.type == "MatMul":
        a, b = attributes["transpose_a"].b, attributes["transpose_b"].b
    else:
        a, b = attributes["adj_x"].b, attributes["adj_y"].b
    ranks = [part.rank(x) for x in op.inputs]
    if None in ranks or op.inputs[0].dtype.is_complex:
        return None
    letters = "abcdefgh"
    first, second = (letters[len(letters) - (int(rank or 0) - 2) :] for rank in ranks)
    longest = max(first, second, key=len)
    terms = [first + ("ki" if a else "ik").upper(), second + ("jk" if b else "kj").upper()]
    return _product(part, op, terms, longest + "IJ")


def _einsum(part: Partition, op: Any) -> Values:
    equation = op.node_def.attr["equation"].s.decode()
    if "." in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    return _product(part, op, given.split(","), result)


def _along_axis(place: int) -> Rule:
    """Returns a rule for operations along an axis, given as an input, other than the rows'."""

    def rule(part: Partition, op: Any) -> Values:
        cut, axes = part.cut_of(op.inputs[0]), part.shapes.value(op.inputs[place])
        rank = part.rank(op.inputs[0])
        if cut is None or axes is None or rank is None:
            return None
        every = axes if isinstance(axes, list) else [axes]
        if cut.axis in [axis % rank for axis in every]:
            return None
        return part.on_rows(op, [cut] * len(op.outputs))

    return rule


def _along_last(part: Partition, op: Any) -> Values:
    """An operation along the last axis."""
    found, rank = first_cut(part, op.inputs), part.rank(op.inputs[0])
    cut = None if found is None else part.cut_of(found)
    if cut is None or rank is None or cut.axis == rank - 1:
        return None
    return part.on_rows(op, [cut] * len(op.outputs)) if len(op.inputs) == 1 else None


def _top(part: Partition, op: Any) -> Values:
    cut, rank = part.cut_of(op.inputs[0]), part.rank(op.inputs[0])
    if cut is None or rank is None or cut.axis == rank - 1:
        return None
    return part.on_rows(op, [cut, cut])


# Layers -------------------------------------------------------------------------------------------


def _layer(*rows: int, outputs: str = "r", shape: int | None = None) -> Rule:
    """Returns a rule for an operation on whole weights and on arguments cut along their first axis.

    Args:
        rows: The places of the arguments that are cut.
        outputs: For each result, "r": cut likewise; "s": a pending sum.
        shape: The place of the argument that is the shape of a result.
    """

    def rule(part: Partition, op: Any) -> Values:
        cuts = [part.cut_of(x) for x in op.inputs]
        first = next((cut for cut in cuts if cut is not None), None)
        if first is None or first.axis != 0:
            return None
        if any(cut not in (None, first) for cut in cuts):
            return None
        if any(cut is not None for place, cut in enumerate(cuts) if place not in rows):
            return None

        def local(k: int) -> list[Tensor]:
            return [
                part.along(x, first, k)
                if place in rows
                else part.local(x, first, k)
                if place == shape
                else part.whole(x)
                for place, x in enumerate(op.inputs)
            ]

        return part.of_parts(op, local, [first if kind == "r" else None for kind in outputs])

    return rule


def _gather(part: Partition, op: Any) -> Values:
    table, indices, axis = op.inputs
    at, rank = part.shapes.value(axis), part.rank(table)
    if op.node_def.attr["batch_dims"].i or at is None or rank is None:
        return None
    at %= rank
    of_table, of_indices = part.cut_of(table), part.cut_of(indices)
    if of_table is None and of_indices is not None:
        return part.on_rows(op, [of_indices._replace(axis=of_indices.axis + at)])
    more = part.rank(indices)
    if of_table is None or of_indices is not None or of_table.axis == at or more is None:
        return None
    shift = more - 1 if of_table.axis > at else 0
    return part.on_rows(op, [of_table._replace(axis=of_table.axis + shift)])


def _one_hot(part: Partition, op: Any) -> Values:
    cut, rank = part.cut_of(op.inputs[0]), part.rank(op.outputs[0])
    if cut is None or rank is None:
        return None
    axis = op.node_def.attr["axis"].i % rank
    return part.on_rows(op, [cut._replace(axis=cut.axis + (axis <= cut.axis))])


_RULES: dict[str, Rule] = {
    **SHAPES,
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
    "Identity": keeping_sums_pending(_pointwise),
    **dict.fromkeys(("Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"), _reduced),
    "Sum": keeping_sums_pending(_reduced),
    **dict.fromkeys(("ArgMax", "ArgMin"), _index_of_most),
    "L2Loss": _added_up,
    "BiasAddGrad": _bias_grad,
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    "Einsum": _einsum,
    **dict.fromkeys(("Cumsum", "Cumprod", "ReverseV2"), _along_axis(1)),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _along_last),
    "TopKV2": _top,
    "SoftmaxCrossEntropyWithLogits": _layer(0, 1, outputs="rr"),
    "SparseSoftmaxCrossEntropyWithLogits": _layer(0, 1, outputs="rr"),
    "InTopKV2": _layer(0, 1),
    "BiasAdd": _layer(0),
    "Conv2D": _layer(0),
    "Conv2DBackpropInput": _layer(2, shape=0),
    "Conv2DBackpropFilter": _layer(0, 2, outputs="s"),
    "Conv3D": _layer(0),
    "Conv3DBackpropInputV2": _layer(2, shape=0),
    "Conv3DBackpropFilterV2": _layer(0, 2, outputs="s"),
    "DepthwiseConv2dNative": _layer(0),
    "DepthwiseConv2dNativeBackpropInput": _layer(2, shape=0),
    "DepthwiseConv2dNativeBackpropFilter": _layer(0, 2, outputs="s"),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"), _layer(0)),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), _layer(0, 1, 2)),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), _layer(1, shape=0)),
    "GatherV2": _gather,
    "OneHot": _one_hot,
    "UnsortedSegmentSum": _layer(0, 1, outputs="s"),
}
