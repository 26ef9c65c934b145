"""Evaluates a jaxpr with symbolic sizes on padded arrays, as if they had their true sizes.

Every dynamic size is a symbol in the jaxpr. An evaluation is for one bucket: the arrays have the
bucket's sizes; the true sizes, which are not larger, are inputs of the program.

    invariant   along a symbolic axis, the first `true` positions have the values of the unpadded
                step; the padding behind them may have any value, NaN included

An elementwise operation preserves the invariant. An operation that mixes positions (a sum, a
contraction, a window, a sort) gets its operand with a neutral value in the padding: zero for a sum,
minus infinity for a maximum. An operation without a rule is refused. The jaxpr holds the whole
step, gradients and optimizer included, so losses, metrics and layers need no masks.
"""

from trainstep._engines.jax.masking import (
    control,  # noqa: F401  # each registers its rules
    index,  # noqa: F401  # each registers its rules
    linear,  # noqa: F401  # each registers its rules
    random,  # noqa: F401  # each registers its rules
    reduce,  # noqa: F401  # each registers its rules
    shape,  # noqa: F401  # each registers its rules
)
from trainstep._engines.jax.masking.evaluate import evaluate as evaluate
