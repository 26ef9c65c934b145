"""A compiled model, the backward pass called outside, an optimizer, a schedule and dropout."""

import random
import time

import torch
import witness

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@torch.compile(backend=witness.dynamo("loss_of"))
def loss_of(x, y):
    return torch.nn.functional.mse_loss(model(x), y)


history = []
for _ in range(5):
    started = time.time()
    x = torch.rand(8, 4) + random.random()
    optimizer.zero_grad()
    loss = loss_of(x, x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    schedule.step()
    history.append(loss.item())
    assert time.time() >= started
witness.say(finite=all(map(torch.isfinite, torch.tensor(history))))
