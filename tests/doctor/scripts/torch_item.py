"""A loss read with .item() inside the compiled function: a break, and what follows it is compiled
for the number.
"""

import torch
import witness


@torch.compile(backend=witness.dynamo("step"))
def step(x):
    loss = (x * 2).sum()
    value = loss.item()  # <- item
    return x * value


for scale in (0.5, 1.5, 2.5):
    step(scale * torch.ones(3))  # <- call
witness.say(traces={}, graphs=witness.COUNTS["step"])
