"""Adds slots to a built optimizer.

A Keras optimizer has slots for the variables that it was built with. A layer that was frozen then
and is trainable now has variables without slots. They get slots here; the slots of the others, and
the programs that use them, stay valid.
"""

from __future__ import annotations

from typing import Any


def make_known(optimizer: Any, model: Any) -> None:
    """Adds slots for trainable variables of a model that a built optimizer has none for.

    All slots are in the order of the model's variables, as if the optimizer had been built with
    all of them, so that a saved model can be loaded.
    """
    optimizer = innermost(optimizer)
    places = optimizer._trainable_variables_indices
    key = optimizer._var_key
    if not optimizer.built or all(key(v) in places for v in model.trainable_variables):
        return
    wanted = {key(v) for v in model.trainable_variables} | set(places)
    variables = [v for v in model.variables if key(v) in wanted]
    if len(variables) < len(wanted):  # it also has slots for variables of another model
        return
    # A second optimizer of the same class creates the slots: lists, one slot for each variable.
    other = type(optimizer).from_config(optimizer.get_config())
    other.build(variables)
    mine: dict[int, Any] = {}  # this optimizer's variable for each of the second one's, by id
    for name, slots in vars(other).items():
        own = vars(optimizer).get(name)
        if _is_slots(name, slots, len(variables)) and _is_slots(name, own, len(places)):
            merged = [
                own[places[key(v)]] if key(v) in places else slot
                for v, slot in zip(variables, slots, strict=True)
            ]
            mine.update((id(s), m) for s, m in zip(slots, merged, strict=True) if s is not None)
            vars(optimizer)[name] = merged
    # The other variables belong to no variable of the model: the counter, the learning rate.
    slotted = {id(slot) for slot in mine.values()}
    rest = [v for v in other._variables if id(v) not in mine]
    kept = [v for v in optimizer._variables if id(v) not in slotted]
    mine.update((id(v), k) for v, k in zip(rest, kept, strict=False))
    ordered = [mine.get(id(v), v) for v in other._variables]
    while optimizer._variables:  # TensorFlow's tracked lists allow no replacement
        optimizer._variables.pop()
    optimizer._variables.extend(ordered)
    vars(optimizer)["_trainable_variables"] = variables  # past Keras's tracking, as in `build`
    places.clear()
    places.update({key(v): place for place, v in enumerate(variables)})


def known(optimizer: Any, model: Any) -> list[int]:
    """The indices of the model's variables that an optimizer has slots for."""
    optimizer = innermost(optimizer)
    places, key = optimizer._trainable_variables_indices, optimizer._var_key
    return [place for place, v in enumerate(model.variables) if key(v) in places]


def slots_beyond(optimizer: Any, model: Any, places: list[int]) -> list[Any]:
    """The optimizer's slots for all variables of a model but those at some indices."""
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
    """The optimizer that updates the weights, without a loss-scaling wrapper."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _is_slots(name: str, value: Any, count: int) -> bool:
    lists = name not in ("_variables", "_trainable_variables") and isinstance(value, list)
    return lists and len(value) == count
