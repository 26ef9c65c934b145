"""One model trained and evaluated, with gradients and without: a program for each, and no more."""

import torch
import witness


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.layer(x))


torch.manual_seed(0)
model = torch.compile(Net(), backend=witness.dynamo("forward"))
x = torch.ones(2, 4)
for _ in range(2):
    model.train()
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
witness.say()
