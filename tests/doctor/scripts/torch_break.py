"""A decision on a tensor's value: the graph breaks at the if, which nothing can compile."""

import torch
import witness


@torch.compile(backend=witness.dynamo("step"))
def step(x):
    y = x * 2
    if y.sum() > 0:  # <- break
        return y + 1
    return y - 1


for _ in range(3):
    step(torch.ones(3))
witness.say(traces={}, graphs=witness.COUNTS["step"])
