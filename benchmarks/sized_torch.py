"""Hand-written torch steps for dynamic sizes: eager, so any size works."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import settings as s
from benchmarks.native_torch import linear, load, mlp, step_of
from benchmarks.streams import Contender


class Adam(torch.optim.Adam):
    """Adam that adds epsilon before the bias correction, as Keras does, so that losses agree."""

    steps = 0

    def step(self) -> None:
        self.steps += 1
        self.param_groups[0]["eps"] = s.EPSILON / (1 - s.BETA_2**self.steps) ** 0.5
        super().step()


class Convolution(nn.Module):
    """Embedded tokens, a convolution with ReLU, the mean over the length, a dense layer."""

    def __init__(self, weights: s.Weights) -> None:
        super().__init__()
        table, kernel, bias, *last = weights
        self.embedding = nn.Embedding(*table.shape)
        load(self.embedding, table)
        size, inner, outer = kernel.shape
        self.convolution = nn.Conv1d(inner, outer, size, padding="same")
        load(self.convolution, kernel.transpose(2, 1, 0), bias)
        self.last = linear(*last)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.convolution(self.embedding(x).transpose(1, 2))
        return self.last(functional.relu(mixed).mean(2))


def build(stream: str, weights: s.Weights) -> Contender:
    """Returns the step of a stream; it has no program and no padding."""
    module = mlp(weights) if stream == "rows" else Convolution(weights)
    return Contender(step_of(module, False, Adam), lambda: 0, lambda: 0.0)
