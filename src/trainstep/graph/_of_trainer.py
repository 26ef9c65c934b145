"""`of`: the step of a `Trainer` as tensors and operations of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import ops, tree

from trainstep._common.errors import ArgumentError
from trainstep._common.keras_private import LossFunctionWrapper
from trainstep._function.spec import Spec
from trainstep._trainer.recipe import Recipe
from trainstep._trainer.steps import Steps
from trainstep._trainer.trainer import Trainer
from trainstep.graph._calls import call
from trainstep.graph._gradients import gradients
from trainstep.graph._operations import Operation
from trainstep.graph._sources import placeholder
from trainstep.graph._tensors import NodeOperation
from trainstep.graph.train import apply_gradients


@dataclass(frozen=True)
class TrainerGraph:
    """The parts of a trainer's step. Made by `graph.of`.

    Attributes:
        x: The placeholder of the inputs, or a structure of them.
        y: The placeholder of the targets, or a structure of them; None if the loss has no targets.
        sample_weight: The placeholder of the sample weights, if requested.
        outputs: The outputs of the model in training mode: with dropout, for example.
        predictions: The outputs of the model in inference mode.
        loss: The loss, including the losses of layers and regularizers.
        variables: The trainable variables.
        gradients: The gradients of the loss, in the order of the variables.
        train: The operation that updates the variables as the trainer does.
    """

    x: Any
    y: Any
    sample_weight: Any
    outputs: Any
    predictions: Any
    loss: Any
    variables: Sequence[Any]
    gradients: Sequence[Any]
    train: Operation
    _apply: Callable[..., Operation] = field(repr=False)

    def apply_gradients(self, grads: Sequence[Any], name: str | None = None) -> Operation:
        """Makes an operation that updates the variables by other gradients, same optimizer.

        Args:
            grads: A tensor for each of `variables`, or None for a variable that stays unchanged.
            name: The operation's name.
        """
        return self._apply(grads, name)


class _Loss(NodeOperation):
    kind = "loss"

    def __init__(self, model: Any, recipe: Recipe) -> None:
        super().__init__()
        self._steps, self._recipe = Steps(model, recipe), recipe

    def call(self, x: Any, y: Any, outputs: Any, weights: Any) -> Any:
        return self._steps.loss(x, y, outputs, weights)

    def uses(self) -> list[Any]:
        return self._recipe.used()


def of(trainer: Trainer, x: Any = None, y: Any = None, sample_weight: Any = False) -> TrainerGraph:
    """Adds the step of a trainer to the default graph, and returns its parts.

    A session can fetch each part, and other tensors and operations can use it: to clip gradients
    or add noise, to train each layer at its own learning rate. The model does not change.

    Args:
        trainer: A `Trainer`.
        x: A `Spec`, or a structure of them, for a model without declared inputs.
        y: The same for the targets; by default, like the outputs, or class indices for a sparse
            loss.
        sample_weight: Whether there are sample weights; or their `Spec`.

    Returns:
        A `TrainerGraph`.

    Example:
        >>> import keras, numpy as np, trainstep as ts
        >>> from trainstep import graph
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> parts = graph.of(ts.Trainer(model, keras.optimizers.SGD(0.1), "mse"))
        >>> clipped, norm = graph.clip_by_global_norm(parts.gradients, 0.5)
        >>> train = parts.apply_gradients(clipped)
        >>> feeds = {parts.x: np.ones((4, 2)), parts.y: np.ones((4, 1))}
        >>> with graph.Session() as session:
        ...     _, loss = session.run([train, parts.loss], feeds)
        ...     bool(session.run(parts.loss, feeds) < loss)
        True
    """
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            "graph.of", "trainer", "a trainstep.Trainer", f"a {type(trainer).__name__}",
            "wrap the model: `graph.of(ts.Trainer(model, optimizer=..., loss=...))`",
        )  # fmt: skip
    model, recipe = trainer.model, trainer._recipe
    inputs = _placeholders(_inputs(model) if x is None else x, "x")
    outputs = _call_model(model, inputs, training=True)
    targets = None
    if recipe.takes_targets:
        targets = _targets(model, recipe, outputs) if y is None else _placeholders(y, "y")
    weights = None
    if sample_weight is not False:
        spec = Spec((None,)) if sample_weight is True else sample_weight
        weights = _placeholders(spec, "sample_weight")
    spec = keras.KerasTensor((), keras.config.floatx())
    (loss,) = _Loss(model, recipe).make_outputs((inputs, targets, outputs, weights), [spec], "loss")
    return _with_gradients(model, recipe, (inputs, targets, weights, outputs, loss))


def _call_model(model: Any, inputs: Any, *, training: bool) -> Any:
    return model(inputs, training=training) if model._call_has_training_arg else model(inputs)


def _with_gradients(model: Any, recipe: Recipe, parts: tuple[Any, ...]) -> TrainerGraph:
    loss, variables, optimizer = parts[-1], list(model.trainable_variables), recipe.optimizer
    scales = recipe.scales
    scaled = call(optimizer.scale_loss, loss) if scales else loss
    raw = gradients(scaled, variables)
    plain = call(lambda found: recipe.unscaled(list(found)), raw) if scales else raw

    def apply(grads: Sequence[Any], name: str | None = None) -> Operation:
        grads = list(grads)
        if len(grads) != len(variables):
            raise ArgumentError(
                "TrainerGraph.apply_gradients", "grads", f"one for each of {len(variables)} "
                "`variables`", str(len(grads)), "pass None for a variable that stays unchanged",
            )  # fmt: skip
        if scales:
            grads = [None if g is None else call(_as_scaled(optimizer), g, loss) for g in grads]
        pairs = zip(grads, variables, strict=True)
        return apply_gradients(optimizer, pairs, name, around=recipe.installed)

    pairs = zip(raw, variables, strict=True)
    train = apply_gradients(optimizer, pairs, "train", around=recipe.installed)
    x, y, weights, outputs, _ = parts
    predictions = _call_model(model, x, training=False)
    return TrainerGraph(
        x, y, weights, outputs, predictions, loss, variables, list(plain), train, apply
    )


def _as_scaled(optimizer: Any) -> Callable[..., Any]:
    def scaled(gradient: Any, loss: Any) -> Any:
        return gradient * ops.cast(optimizer.scale_loss(ops.ones_like(loss)), gradient.dtype)

    return scaled


def _placeholders(specs: Any, name: str) -> Any:
    """Makes placeholders in the structure of specs."""
    flat = tree.flatten(specs)
    for each in flat:
        if not hasattr(each, "shape") or not hasattr(each, "dtype"):
            raise ArgumentError(
                "graph.of", name, "a `Spec`, or a structure of them", f"a {type(each).__name__}",
                f"pass a `Spec`, for example `{name}=ts.Spec((None, 4))`",
            )  # fmt: skip
    names = [name] if len(flat) == 1 else [f"{name}_{i}" for i in range(len(flat))]
    made = [
        placeholder(each.dtype, [s if isinstance(s, int) else None for s in each.shape], called)
        for each, called in zip(flat, names, strict=True)
    ]
    return tree.pack_sequence_as(specs, made)


def _inputs(model: Any) -> Any:
    found = getattr(model, "_inputs_struct", None)
    if found is None and getattr(model, "_functional", None) is not None:  # a Sequential
        found = model._functional._inputs_struct
    if found is None:
        raise ArgumentError(
            "graph.of",
            "x",
            "the shape of the inputs, since this model does not declare it",
            "None",
            "pass a `Spec`, for example `x=ts.Spec((None, 4))`",
        )
    return found


def _targets(model: Any, recipe: Recipe, outputs: Any) -> Any:
    """Makes placeholders of targets: like the outputs, or of class indices."""
    flat, loss = tree.flatten(outputs), recipe.loss
    if isinstance(loss, dict):
        names = list(outputs) if isinstance(outputs, dict) else getattr(model, "output_names", [])
        losses = [
            loss.get(name) for name in (sorted(names) if isinstance(outputs, dict) else names)
        ]
    else:
        losses = list(loss) if isinstance(loss, (list, tuple)) else [loss] * len(flat)
    if len(losses) != len(flat) or any(each is None for each in losses):
        raise ArgumentError(
            "graph.of",
            "y",
            f"the specs of the targets, since not all of the {len(flat)} outputs have a loss",
            "None",
            "pass `y=` as a structure of `ts.Spec`s, like the targets of `train_on_batch`",
        )
    found = [
        Spec(tuple(o.shape[:-1]), "int32")
        if _is_sparse(each)
        else Spec(tuple(o.shape), keras.config.floatx())
        for o, each in zip(flat, losses, strict=True)
    ]
    made = _placeholders(tree.pack_sequence_as(outputs, found), "y")
    for each, own in zip(tree.flatten(made), losses, strict=True):
        each.is_column = tuple(each.shape) == (None, 1) and _takes_flat(model, own)
    return made


def _takes_flat(model: Any, loss: Any) -> bool:
    """Whether the loss accepts targets `[n]` for `[n, 1]`: Keras reshapes them for its own."""
    if type(model).compute_loss is not keras.Model.compute_loss:
        return False
    return not isinstance(loss, keras.Loss) or type(loss).call is LossFunctionWrapper.call


def _is_sparse(loss: Any) -> bool:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return "sparse" in str(name).lower()
