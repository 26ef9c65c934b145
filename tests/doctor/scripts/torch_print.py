"""print inside the compiled function: the graph breaks there."""

import torch
import witness


@torch.compile(backend=witness.dynamo("step"))
def step(x):
    y = torch.tanh(x)
    print("step runs")  # <- break
    return y * 2


for _ in range(3):
    step(torch.ones(3))
witness.say(traces={}, graphs=witness.COUNTS["step"])
