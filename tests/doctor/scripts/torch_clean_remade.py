"""Functions and modules that every turn makes anew: torch.compile knows them by their code, and
compiles each once.
"""

import torch
import witness


class Scaler(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((1,), factor))

    def forward(self, x):
        return x * self.factor


of_function, of_module = witness.dynamo("shifted"), witness.dynamo("forward")
for turn in range(3):
    offset = torch.full((1,), float(turn))

    def shifted(x):
        return x + offset

    torch.compile(shifted, backend=of_function)(torch.ones(3))
    torch.compile(Scaler(float(turn)), backend=of_module)(torch.ones(3))
witness.say()
