"""Optimizers that learn of new variables.

A Keras optimizer knows the variables that it was built with. A layer that was frozen then and is
trainable now brings new ones. They get slots of their own; those of the others stay as they are,
and so do the programs that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def make_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Gives a built optimizer slots for variables that it was not built with."""
    optimizer = innermost(optimizer)
    if not optimizer.built:
        return
    known = optimizer._trainable_variables_indices
    new = [v for v in variables if optimizer._var_key(v) not in known]
    if not new:
        return
    # A second optimizer of the kind makes the slots; one for each variable, in lists.
    other = type(optimizer).from_config(optimizer.get_config())
    shared = {id(v) for v in other.variables}  # the counter and the learning rate: the first's stay
    other.build(new)
    for name, slots in vars(other).items():
        mine = vars(optimizer).get(name)
        if _is_slots(slots, len(new)) and _is_slots(mine, len(known)):
            mine.extend(slots)
    shared |= {id(v) for v in optimizer._variables}  # lists that Keras tracks have entered theirs
    optimizer._variables.extend(v for v in other._variables if id(v) not in shared)
    for variable in new:
        known[optimizer._var_key(variable)] = len(known)


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates weights, inside one that scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _is_slots(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count
