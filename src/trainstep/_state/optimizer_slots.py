"""Optimizers that learn of new variables.

A Keras optimizer knows the variables that it was built with. A layer that was frozen then and is
trainable now brings new ones. They get slots of their own; those of the others stay as they are,
and so do the programs that use them.
"""

from __future__ import annotations

from typing import Any


def make_known(optimizer: Any, model: Any) -> None:
    """Gives a built optimizer slots for variables of a model that it was not built with.

    They are put in the order of the model's variables, as if it had been built with all of them:
    so a saved model can be loaded.
    """
    optimizer = innermost(optimizer)
    places = optimizer._trainable_variables_indices
    key = optimizer._var_key
    if not optimizer.built or all(key(v) in places for v in model.trainable_variables):
        return
    wanted = {key(v) for v in model.trainable_variables} | set(places)
    variables = [v for v in model.variables if key(v) in wanted]
    if len(variables) < len(wanted):  # it knows variables of another model too
        return
    # A second optimizer of the kind makes the slots; one for each variable, in lists.
    other = type(optimizer).from_config(optimizer.get_config())
    other.build(variables)
    mine: dict[int, Any] = {}  # what I have in place of each of its variables
    for name, slots in vars(other).items():
        own = vars(optimizer).get(name)
        if _is_slots(name, slots, len(variables)) and _is_slots(name, own, len(places)):
            merged = [
                own[places[key(v)]] if key(v) in places else slot
                for v, slot in zip(variables, slots, strict=True)
            ]
            mine.update((id(s), m) for s, m in zip(slots, merged, strict=True) if s is not None)
            vars(optimizer)[name] = merged
    # The rest belongs to no variable of the model: the counter, the learning rate.
    slotted = {id(slot) for slot in mine.values()}
    rest = [v for v in other._variables if id(v) not in mine]
    kept = [v for v in optimizer._variables if id(v) not in slotted]
    mine.update((id(v), k) for v, k in zip(rest, kept, strict=False))
    ordered = [mine.get(id(v), v) for v in other._variables]
    while optimizer._variables:  # TensorFlow's lists do not let their contents be replaced
        optimizer._variables.pop()
    optimizer._variables.extend(ordered)
    vars(optimizer)["_trainable_variables"] = variables  # past Keras's tracking, as in `build`
    places.clear()
    places.update({key(v): place for place, v in enumerate(variables)})


def known(optimizer: Any, model: Any) -> list[int]:
    """The places, among a model's variables, of those that an optimizer has slots for."""
    optimizer = innermost(optimizer)
    places, key = optimizer._trainable_variables_indices, optimizer._var_key
    return [place for place, v in enumerate(model.variables) if key(v) in places]


def slots_beyond(optimizer: Any, model: Any, places: list[int]) -> list[Any]:
    """The slots that an optimizer has for other variables of a model than those at some places."""
    optimizer = innermost(optimizer)
    key = optimizer._var_key
    old = {key(model.variables[place]) for place in places}
    new = [key(v) not in old for v in optimizer._trainable_variables]
    return [
        slot
        for name, slots in vars(optimizer).items()
        if _is_slots(name, slots, len(new))
        for slot, is_new in zip(slots, new, strict=True)
        if is_new
    ]


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates weights, inside one that scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _is_slots(name: str, value: Any, count: int) -> bool:
    lists = name not in ("_variables", "_trainable_variables") and isinstance(value, list)
    return lists and len(value) == count
