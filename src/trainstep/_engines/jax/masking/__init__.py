"""A jaxpr with symbolic sizes, evaluated on padded arrays as if they had their true sizes.

Every size that varies is a symbol in the jaxpr. An evaluation is for one bucket: the arrays have
the bucket's sizes, and the true sizes, at most as large, are known when the program runs.

    invariant   along an axis with a symbol, the first `true` positions are what the unpadded step
                would have there; what lies beyond is anything, NaN included

An operation that treats positions one by one keeps that by itself. One that mixes positions
(a sum, a contraction, a window, a sort) gets its operand filled with what does not count: zero for
a sum, minus infinity for a maximum. One that nobody has written a rule for is refused. The jaxpr
holds the whole step, gradients and optimizer included, so no loss, metric or layer needs to help.
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
