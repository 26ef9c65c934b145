"""One function called with gradients and without: a program for each, and no more."""

import torch
import witness

weights = torch.ones(4, 1, requires_grad=True)


@torch.compile(backend=witness.dynamo("forward"))
def forward(x):
    return torch.tanh(x @ weights)


x = torch.ones(2, 4)
for _ in range(3):
    forward(x).sum().backward()
    with torch.no_grad():
        forward(x)
witness.say()
