"""Hand-written torch steps: modules and the fused Adam, eager and with `torch.compile`."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import settings as s


def load(module: nn.Module, *weights: np.ndarray) -> None:
    """Sets the parameters and the statistics of a module, in their order."""
    state = [tensor for tensor in module.state_dict().values() if tensor.ndim]
    for tensor, weight in zip(state, weights, strict=True):
        tensor.copy_(torch.from_numpy(weight))


def linear(kernel: np.ndarray, bias: np.ndarray) -> nn.Linear:
    """Returns a dense layer with Keras's weights; Keras's kernel is transposed."""
    layer = nn.Linear(*kernel.shape)
    load(layer, kernel.T, bias)
    return layer


def mlp(weights: s.Weights) -> nn.Module:
    """Dense layers with ReLU on all but the last."""
    layers: list[nn.Module] = []
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        layers += [linear(kernel, bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Convnet(nn.Module):
    """Two convolutions with batch normalization, pooling, dropout, a dense layer."""

    def __init__(self, weights: s.Weights) -> None:
        super().__init__()
        self.first = self.normed_convolution(*weights[:5])
        self.second = self.normed_convolution(*weights[5:10])
        self.last = linear(*weights[10:])

    @staticmethod
    def normed_convolution(kernel: np.ndarray, *norm_weights: np.ndarray) -> nn.Module:
        """A convolution without bias, then a batch normalization and a ReLU."""
        channels = kernel.shape[3]
        convolution = nn.Conv2d(kernel.shape[2], channels, 3, padding=1, bias=False)
        load(convolution, kernel.transpose(3, 2, 0, 1))
        norm = nn.BatchNorm2d(channels, eps=s.NORM_EPSILON, momentum=1 - s.NORM_MOMENTUM)
        load(norm, *norm_weights)
        return nn.Sequential(convolution, norm, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        # With one channel, moving it to the front copies no data.
        x = functional.max_pool2d(self.first(x.permute(0, 3, 1, 2)), 2)
        x = self.second(x).mean((2, 3))
        return self.last(functional.dropout(x, s.DROPOUT))


class Transformer(nn.Module):
    """One pre-norm attention block, then a mean over the sequence and a dense layer."""

    def __init__(self, weights: s.Weights) -> None:
        super().__init__()
        qkv, (out, out_bias) = weights[2:8], weights[8:10]
        # One product computes query, key and value.
        kernel = np.concatenate([w.reshape(len(w), -1) for w in qkv[::2]], axis=1)
        bias = np.concatenate([b.reshape(-1) for b in qkv[1::2]])
        self.norm_1 = self.normalization(weights[:2])
        self.qkv = linear(kernel, bias)
        self.out = linear(out.reshape(-1, out.shape[-1]), out_bias)
        self.norm_2 = self.normalization(weights[10:12])
        self.wide = linear(*weights[12:14])
        self.narrow = linear(*weights[14:16])
        self.last = linear(*weights[16:])

    @staticmethod
    def normalization(weights: Sequence[np.ndarray]) -> nn.LayerNorm:
        """A layer normalization over the last axis."""
        norm = nn.LayerNorm(len(weights[0]), eps=s.NORM_EPSILON)
        load(norm, *weights)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(2, (3, s.HEADS, s.KEY_SIZE))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.narrow(functional.relu(self.wide(self.norm_2(x))))
        return self.last(x.mean(1))


NETWORKS = {"convnet": Convnet, "transformer": Transformer}


def build(network: str, weights: s.Weights, compiled: bool) -> s.Step:
    """Returns the step of a network, which starts from the weights of its Keras model."""
    return step_of(NETWORKS.get(network, mlp)(weights), compiled)


def step_of(
    module: nn.Module, compiled: bool, adam_of: type[torch.optim.Adam] = torch.optim.Adam
) -> s.Step:
    """Returns the step of a module; it accepts batches of any size unless it is compiled."""
    module.train()
    betas = s.BETA_1, s.BETA_2
    parameters = list(module.parameters())
    adam = adam_of(parameters, s.LEARNING_RATE, betas, s.EPSILON, fused=True)
    error_sum, error_count = torch.zeros(()), torch.zeros(())

    def forward(x: Tensor, y: Tensor) -> Tensor:
        error = module(x) - y
        error_sum.add_(error.detach().abs().mean() * len(x))
        error_count.add_(len(x))
        return error.square().mean()

    run = torch.compile(forward, dynamic=False) if compiled else forward

    def step(x: np.ndarray, y: np.ndarray) -> Tensor:
        loss = run(torch.from_numpy(x), torch.from_numpy(y))
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def variants(network: str, weights: s.Weights, inductor: bool = True) -> dict[str, s.Step]:
    """Returns the hand-written steps to measure, by name."""
    steps = {"eager": build(network, weights, compiled=False)}
    if inductor:
        steps["torch.compile"] = build(network, weights, compiled=True)
    return steps
