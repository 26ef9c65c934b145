"""`Trainer.run`: a step that computes the named values and nothing else.

"loss", "outputs", "metrics", "metrics/<name>", "gradient_norm",
"gradients", "gradients/<variable path>", "updates", "updates/<variable path>",
"activations", "activations/<layer name>"
"""

from __future__ import annotations

import contextlib
import difflib
from typing import Any

from keras import tree

from trainstep._common.errors import ArgumentError
from trainstep._explain.signature import distinct
from trainstep._function.inside.gradients import global_norm
from trainstep._state.scopes import discarded
from trainstep._trainer.layer_outputs import Activations, layer_outputs
from trainstep._trainer.recipe import Recipe
from trainstep._trainer.steps import Steps, apply_class_weights

_GROUPS = ("loss", "outputs", "metrics", "gradients", "gradient_norm", "activations", "updates")
_GROUPS_WITH_PARTS = ("metrics", "gradients", "activations", "updates")


def needs_targets(names: list[str]) -> bool:
    """Whether any of these values needs the loss."""
    return not all(name.startswith(("outputs", "activations")) for name in names)


class FetchStep:
    """A step that returns the named values.

    Args:
        model: The model.
        recipe: Its recipe.
        names: The names of the values to return.
        update: Whether the step trains; if not, it changes no variable.
        training: Whether layers are called as in training.
    """

    def __init__(
        self, model: Any, recipe: Recipe, names: list[str], *, update: bool, training: bool
    ) -> None:
        self._model, self._recipe = model, recipe
        self._steps = Steps(model, recipe)
        self._names, self._update, self._training = names, update, training
        self._groups = {name.partition("/")[0] for name in names}

    def __call__(self, x: Any, y: Any, sample_weight: Any, class_weight: Any) -> list[Any]:
        updates = contextlib.nullcontext() if self._update else discarded()
        with self._recipe.installed(), updates:
            weights = apply_class_weights(y, sample_weight, class_weight)
            found = self._values(x, y, weights)
            return [_select(found, name) for name in self._names]

    def _values(self, x: Any, y: Any, weights: Any) -> dict[str, Any]:
        steps, model, recipe = self._steps, self._model, self._recipe
        found: dict[str, Any] = {}
        if not needs_targets(self._names) and not self._update:
            found["outputs"], found["activations"] = self._forward(x)
            return found
        backward = self._update or self._groups & {"gradients", "gradient_norm", "updates"}
        if backward:
            result = steps.backward(x, y, weights, reset=True, forward=self._forward)
            (y_pred, found["activations"]), found["loss"], gradients = result
            plain = recipe.unscaled(gradients)
            variables = list(model.trainable_variables)
            paths = distinct(v.path for v in variables)
            found["gradients"] = dict(zip(paths, plain, strict=True))
            if "gradient_norm" in self._groups:
                found["gradient_norm"] = global_norm(plain)
            if self._update or "updates" in self._groups:
                # `+ 0` copies: an engine with in-place updates would change the old value too.
                before = [v.value + 0 for v in variables]
                steps.apply(gradients)
                changes = [v.value - old for v, old in zip(variables, before, strict=True)]
                found["updates"] = dict(zip(paths, changes, strict=True))
        else:
            y_pred, found["activations"] = self._forward(x)
            found["loss"] = steps.tracked_loss(x, y, y_pred, weights, True, training=self._training)
        found["outputs"] = y_pred
        if self._update or "metrics" in self._groups:
            found["metrics"] = dict(model.compute_metrics(x, y, y_pred, sample_weight=weights))
        return found

    def _forward(self, x: Any) -> tuple[Any, Any]:
        """Returns the outputs and the named activations."""
        if "activations" not in self._groups:
            return self._steps.forward(x, training=self._training), {}
        named = {name.partition("/")[2] for name in self._names if name.startswith("activations")}
        activations = Activations(self._model, None if "" in named else named)
        with layer_outputs(activations):
            outputs = self._steps.forward(x, training=self._training)
        return outputs, activations.by_name()


def flat_names(fetches: Any, model: Any) -> list[str]:
    """Returns the names in a structure of fetches, and rejects unknown ones."""
    names: list[str] = tree.flatten(fetches)
    for name in names:
        if not isinstance(name, str):
            raise _unknown_name_error(repr(name), _known_names(model))
        group, _, part = name.partition("/")
        if (group in _GROUPS and not part) or (
            group in _GROUPS_WITH_PARTS and _may_have(model, group, part)
        ):
            continue
        raise _unknown_name_error(repr(name), _known_names(model))
    if not names:
        raise _unknown_name_error("nothing", _known_names(model))
    return names


def _may_have(model: Any, group: str, part: str) -> bool:
    """Whether a step of this model may have a value of this name."""
    built = all(layer.built for layer in model._flatten_layers())
    if group == "metrics" or not built:  # known only after the trace; `_select` checks again
        return True
    return f"{group}/{part}" in _known_names(model)


def _known_names(model: Any) -> list[str]:
    variables = distinct(v.path for v in model.trainable_variables)
    layers = [layer.name for layer in model._flatten_layers(include_self=False)]
    return [
        *_GROUPS,
        *(f"{group}/{path}" for group in ("gradients", "updates") for path in variables),
        *(f"activations/{name}" for name in layers),
    ]


def _unknown_name_error(got: str, known: list[str]) -> ArgumentError:
    close = difflib.get_close_matches(got.strip("'"), known, n=3, cutoff=0.5)
    return ArgumentError(
        "Trainer.run",
        "fetches",
        "names of values of the step: " + ", ".join(f"{name!r}" for name in _GROUPS),
        got,
        f"did you mean {' or '.join(map(repr, close))}?" if close else "pass one of them",
    )


def _select(found: dict[str, Any], name: str) -> Any:
    group, _, part = name.partition("/")
    value = found[group]
    if not part:
        return value
    if part not in value:
        raise _unknown_name_error(repr(name), [f"{group}/{each}" for each in value])
    return value[part]
