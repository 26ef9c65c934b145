"""Two compiled models that train each other, as a generator and a critic do."""

import torch
import witness


class Net(torch.nn.Module):
    def __init__(self, units):
        super().__init__()
        self.layer = torch.nn.Linear(3, units)

    def forward(self, x):
        return torch.tanh(self.layer(x))


torch.manual_seed(0)
backend = witness.dynamo("forward")
generator = torch.compile(Net(3), backend=backend)
critic = torch.compile(Net(1), backend=backend)
for _ in range(4):
    score = critic(generator(torch.ones(2, 3))).mean()
    score.backward()
witness.say()
