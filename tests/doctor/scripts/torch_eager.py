"""A training loop without torch.compile."""

import torch
import witness

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3)).pow(2).mean()
    loss.backward()  # <- gradient
    optimizer.step()
witness.say(loss=float(loss))
