"""`Trainer.inspect`: reports on one batch, layer by layer, and changes no variable.

It runs two programs. The first returns the loss, the activations and the gradients by weights. The
second adds a zero to every activation; the gradient by that zero is the gradient by the activation.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from trainstep._common.keras_private import get_keras_mask, set_keras_mask
from trainstep._function.inside.gradients import global_norm, value_and_grad
from trainstep._state.scopes import discarded
from trainstep._trainer.layer_outputs import Activations, layer_outputs
from trainstep._trainer.recipe import Recipe
from trainstep._trainer.steps import Steps, apply_class_weights


@dataclass(frozen=True, slots=True)
class Range:
    """A summary of the numbers in some arrays."""

    low: float
    high: float
    norm: float
    nans: int
    infinities: int

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return not (self.nans or self.infinities)

    def __str__(self) -> str:
        parts = [] if np.isnan(self.low) else [f"{self.low:.3g} .. {self.high:.3g}"]
        parts += [f"{self.nans} NaN"] * bool(self.nans)
        parts += [f"{self.infinities} inf"] * bool(self.infinities)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One call of a layer.

    Attributes:
        name: The layer's name.
        kind: The layer's class.
        shape: The shape of its output.
        activation: The range of its output.
        gradient: The range of the loss's gradient by its output; None if there is none.
        weights: The range of its own weights; None without any.
        weight_gradient: The range of the gradient by its own trainable weights; None without any.
        dead: The share of its units, along the last axis, that are zero for the whole batch.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    activation: Range
    gradient: Range | None
    weights: Range | None
    weight_gradient: Range | None
    dead: float


@dataclass(frozen=True)
class Inspection:
    """The report of `Trainer.inspect`. Printing it shows a table.

    Attributes:
        loss: The loss of the batch.
        layers: A report per call of a layer, in the order of the calls.
        first_bad: The first place where a NaN or an infinity arises, in the order of computation:
            inputs, weights, activations, loss, gradients from the last layer back; None if all is
            finite.
    """

    model: str
    loss: float
    layers: tuple[LayerReport, ...]
    first_bad: str | None
    gradient_norm: float = field(default=float("nan"))

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(title=self._title(), title_justify="left", caption=self._verdict())
        table.caption_justify = "left"
        headings = ("layer", "output", "activation", "norm", "dead", "gradient", "norm")
        for heading in (*headings, "weight gradient", "norm"):
            table.add_column(heading, justify="left" if heading in ("layer", "output") else "right")
        for layer in self.layers:
            cells = [f"{layer.name} ({layer.kind})", str(layer.shape)]
            cells += [str(layer.activation), f"{layer.activation.norm:.3g}", f"{layer.dead:.0%}"]
            for gradient in (layer.gradient, layer.weight_gradient):
                cells += ["", ""] if gradient is None else [str(gradient), f"{gradient.norm:.3g}"]
            style = "bold red" if self.first_bad and f"'{layer.name}'" in self.first_bad else None
            table.add_row(*cells, style=style)
        return table

    def _title(self) -> str:
        return f"{self.model}: loss {self.loss:.5g}, gradient norm {self.gradient_norm:.3g}"

    def _verdict(self) -> str:
        if self.first_bad is None:
            return "every number is finite"
        return f"the first number that is not finite: {self.first_bad}"

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=150, highlight=False).print(self._table())
        return out.getvalue()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Inspector:
    """The two steps that inspect a batch."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._steps = Steps(model, recipe)
        self.layers: list[Any] = []  # in the order of their calls

    def forward_and_backward(
        self, x: Any, y: Any, sample_weight: Any, class_weight: Any
    ) -> dict[str, Any]:
        """Returns the loss, the activations and the gradients by weights."""
        with self._recipe.installed(), discarded():
            weights = apply_class_weights(y, sample_weight, class_weight)
            (_, calls), loss, gradients = self._steps.backward(
                x, y, weights, reset=True, forward=self._forward
            )
            gradients = self._recipe.unscaled(gradients)
            norm = global_norm(gradients)
            return {"loss": loss, "calls": calls, "gradients": gradients, "norm": norm}

    def _forward(self, x: Any) -> tuple[Any, Any]:
        activations = Activations(self._model, None)
        with layer_outputs(activations):
            outputs = self._steps.forward(x, training=True)
        self.layers = [layer for layer, _ in activations.calls]
        return outputs, [tree.flatten(output) for _, output in activations.calls]

    def activation_gradients(
        self, zeros: Any, x: Any, y: Any, sample_weight: Any, class_weight: Any
    ) -> Any:
        """Returns the gradients of the loss by every activation, given zeros of their shapes."""
        with self._recipe.installed(), discarded():
            weights = apply_class_weights(y, sample_weight, class_weight)

            def loss_of(zeros: Any) -> Any:
                add = _AddZeros(self._model, zeros)
                with layer_outputs(add):
                    y_pred = self._steps.forward(x, training=True)
                return self._steps.tracked_loss(x, y, y_pred, weights, True, training=True)

            return value_and_grad(loss_of, argnums=0)(zeros)[1]


class _AddZeros(Activations):
    """Adds a zero to the output of each layer that returns one float tensor."""

    def __init__(self, model: Any, zeros: dict[int, Any]) -> None:
        super().__init__(model, None)
        self._zeros = zeros
        self._count = 0

    def __call__(self, layer: Any, output: Any) -> Any:
        if not self.is_model_call(layer):
            return output
        zero = self._zeros.get(self._count)
        self._count += 1
        if zero is None:
            return output
        added = output + ops.cast(zero, output.dtype)
        mask = get_keras_mask(output)  # Keras stores it on the tensor, so the sum has none
        if mask is not None:
            set_keras_mask(added, mask)
        return added


def zeros_for(calls: Sequence[Sequence[Any]]) -> dict[int, Any]:
    """Returns a zero for each output that is one float tensor, by the number of the call."""
    return {
        number: np.zeros(tuple(flat[0].shape), "float32")
        for number, flat in enumerate(calls)
        if len(flat) == 1 and "float" in keras.backend.standardize_dtype(flat[0].dtype)
    }


def build_report(
    model: Any, called: Sequence[Any], found: dict[str, Any], activation_gradients: Any, data: Any
) -> Inspection:
    """Builds the report from the results of the two steps."""
    layers = []
    gradients = dict(zip(map(id, model.trainable_variables), found["gradients"], strict=True))
    for number, (layer, flat) in enumerate(zip(called, found["calls"], strict=True)):
        arrays = [_to_numpy(x) for x in flat]
        gradient = activation_gradients.get(number)
        own = [gradients[id(v)] for v in layer._trainable_variables if id(v) in gradients]
        layers.append(
            LayerReport(
                name=layer.name,
                kind=type(layer).__name__,
                shape=tuple(arrays[0].shape) if arrays else (),
                activation=_range(arrays),
                gradient=None if gradient is None else _range([_to_numpy(gradient)]),
                weights=_range([_to_numpy(v.value) for v in layer._trainable_variables])
                if layer._trainable_variables
                else None,
                weight_gradient=_range([_to_numpy(g) for g in own]) if own else None,
                dead=_dead_share(arrays),
            )
        )
    loss = float(_to_numpy(found["loss"]))
    return Inspection(
        model=model.name,
        loss=loss,
        layers=tuple(layers),
        first_bad=_first_bad(data, model, layers, loss),
        gradient_norm=float(_to_numpy(found["norm"])),
    )


def _first_bad(data: Any, model: Any, layers: list[LayerReport], loss: float) -> str | None:
    for name, value in zip(("x", "y", "sample_weight"), data, strict=True):
        arrays = [_to_numpy(a) for a in tree.flatten(value) if a is not None]
        if arrays and not _range(arrays).finite:
            return f"the input `{name}`: {_range(arrays)}"
    for variable in model.variables:
        found = _range([_to_numpy(variable.value)])
        if not found.finite:
            return f"the weight '{variable.path}': {found}"
    for layer in layers:
        if not layer.activation.finite:
            return f"the activation of layer '{layer.name}': {layer.activation}"
    if not np.isfinite(loss):
        return f"the loss: {loss}"
    for layer in reversed(layers):
        for what, found_range in (
            ("the gradient by the activation", layer.gradient),
            ("the gradient by the weights", layer.weight_gradient),
        ):
            if found_range is not None and not found_range.finite:
                return f"{what} of layer '{layer.name}': {found_range}"
    return None


def _to_numpy(x: Any) -> Any:
    return ops.convert_to_numpy(x)


def _range(arrays: Sequence[Any]) -> Range:
    flat = np.concatenate([np.ravel(a).astype("float64") for a in arrays] or [np.zeros(0)])
    finite = flat[np.isfinite(flat)]
    return Range(
        low=float(finite.min()) if finite.size else float("nan"),
        high=float(finite.max()) if finite.size else float("nan"),
        norm=float(np.sqrt(np.square(finite).sum())),
        nans=int(np.isnan(flat).sum()),
        infinities=int(np.isinf(flat).sum()),
    )


def _dead_share(arrays: Sequence[Any]) -> float:
    if len(arrays) != 1 or arrays[0].ndim < 2 or not arrays[0].shape[-1]:
        return 0.0
    units = arrays[0].reshape(-1, arrays[0].shape[-1])
    return float((units == 0).all(axis=0).mean())
