"""A Python float that changes."""

import torch
import witness


@torch.compile(backend=witness.dynamo("scaled"))
def scaled(x, rate):
    return x * rate


for rate in (0.5, 0.25, 0.125, 0.75):
    scaled(torch.ones(3), rate)  # <- call
witness.say()
