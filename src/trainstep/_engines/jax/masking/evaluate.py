"""Evaluates equations one by one, and holds the table of rules, which other files register."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core as jex

from trainstep._engines.contract import Refused
from trainstep._engines.jax.masking.bucket import Bucket, Shape, Tensor, is_dynamic

# Elementwise operations: no position depends on another one.
_BY_POSITION = frozenset(
    " ".join(
        (
            "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e",
            "bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy",
            "copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt",
            "igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p",
            "logistic lt lt_to max min mul name ne neg nextafter not optimization_barrier or",
            "polygamma population_count pow random_clone random_fold_in random_seed",
            "random_unwrap random_wrap real reduce_precision regularized_incomplete_beta rem round",
            "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh",
            "sqrt square stop_gradient sub tan tanh threefry2x32 transpose xor zeta",
        )
    ).split()
)

Rule = Callable[["Equation"], Any]
_rules: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the primitives of these names."""

    def register(made: Rule) -> Rule:
        _rules.update(dict.fromkeys(names, made))
        return made

    return register


class Equation:
    """One operation of a jaxpr, on padded operands.

    Attributes:
        operands: The padded arrays.
        shapes: The symbolic shapes of the operands.
        results: The symbolic shapes of the results.
    """

    def __init__(self, bucket: Bucket, eqn: Any, operands: Sequence[Tensor]) -> None:
        self.bucket = bucket
        self.name: str = eqn.primitive.name
        self.params: dict[str, Any] = eqn.params
        self.operands = list(operands)
        self.shapes: list[Shape] = [_shape(v) for v in eqn.invars]
        self.results: list[Shape] = [_shape(v) for v in eqn.outvars]
        self.dtypes = [v.aval.dtype for v in eqn.outvars]
        self._primitive = eqn.primitive

    def bind(self, *operands: Tensor, **changed: Any) -> Any:
        """Applies the operation to other operands, with changed parameters."""
        return self._primitive.bind(*operands, **{**self.params, **changed})

    def filled(self, index: int, axes: Iterable[int], value: Any) -> Tensor:
        """Returns an operand with `value` in the padding along these axes."""
        return self.bucket.filled(self.operands[index], self.shapes[index], axes, value)

    def refuse(self, reason: str) -> Refused:
        """Returns the error for a case that the rule does not cover."""
        return Refused(f"`{self.name}` {reason}")

    def compute(self) -> Any:
        """Returns the results.

        Raises:
            Refused: If there is no rule, or the rule fails.
        """
        try:
            return self._computed()
        except Refused:
            raise
        except Exception as error:
            raise self.refuse(f"failed: {error}".splitlines()[0]) from error

    def _computed(self) -> Any:
        made = _rules.get(self.name)
        if made is not None:
            return made(self)
        if not self._mentions_sizes():
            return self.bind(*self.operands)
        if self.name in _BY_POSITION:
            return self.bind(*self.operands)
        raise self.refuse("along an axis of dynamic size has no rule")

    def check(self, results: Sequence[Tensor]) -> None:
        """Refuses results that do not have the padded shape: the rule is wrong."""
        for result, shape in zip(results, self.results, strict=True):
            if tuple(result.shape) != self.bucket.shape(shape):
                raise self.refuse(f"returned {tuple(result.shape)} for {tuple(shape)}")

    def _mentions_sizes(self) -> bool:
        shapes = (*self.shapes, *self.results)
        if any(is_dynamic(dim) for shape in shapes for dim in shape):
            return True
        inner = jex.jaxprs_in_params(self.params)
        return any(map(_mentioned, self.params.values())) or any(map(_jaxpr_mentions, inner))


def evaluate(bucket: Bucket, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Returns the results of a jaxpr for this bucket."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else values[v]

    for eqn in jaxpr.eqns:
        equation = Equation(bucket, eqn, [read(v) for v in eqn.invars])
        try:
            results = equation.compute()
            results = results if eqn.primitive.multiple_results else [results]
            equation.check(results)
        except Refused as refusal:
            refusal.frames = refusal.frames or _frames(eqn)
            raise
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def evaluate_closed(bucket: Bucket, closed: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the same for a closed jaxpr, or an open one without constants."""
    if hasattr(closed, "jaxpr"):
        return evaluate(bucket, closed.jaxpr, closed.consts, args)
    return evaluate(bucket, closed, (), args)


def _shape(v: Any) -> Shape:
    return tuple(getattr(v.aval, "shape", ()))


def _mentioned(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_mentioned, value))
    return is_dynamic(value)


def _jaxpr_mentions(jaxpr: Any) -> bool:
    avals = [v.aval for e in jaxpr.eqns for v in (*e.invars, *e.outvars)]
    return any(is_dynamic(d) for aval in avals for d in getattr(aval, "shape", ())) or any(
        any(map(_mentioned, e.params.values()))
        or any(map(_jaxpr_mentions, jex.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )


def _frames(eqn: Any) -> list[tuple[str, int]]:
    """Returns the Python lines that created an operation, innermost first."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return []
    return [(frame.file_name, frame.line_num) for frame in traceback.frames]
