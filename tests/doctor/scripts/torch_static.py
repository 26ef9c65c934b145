"""A flag and a name as arguments: a program for each combination that is used."""

import torch
import witness


@torch.compile(backend=witness.dynamo("forward"))
def forward(x, noisy, activation="relu"):
    if noisy:
        x = x + 1
    return torch.relu(x) if activation == "relu" else torch.tanh(x)


batch = torch.ones(4, 5)
forward(batch, True)
forward(batch, False)  # <- flag
forward(batch, False, "tanh")  # <- name
forward(batch, True)
witness.say()
