"""One model trained and evaluated, with gradients and without: a program for each, and no more."""

import torch
import witness

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
model = torch.compile(network, backend=witness.dynamo("forward"))
x = torch.ones(2, 4)
for _ in range(2):
    model.train()
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
witness.say()
