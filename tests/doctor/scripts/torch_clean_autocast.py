"""The same call under autocast, which is a mode as training and testing are: each has a program."""

import torch
import witness


@torch.compile(backend=witness.dynamo("product"))
def product(a, b):
    return a @ b


a = torch.ones(3, 3)
product(a, a)
with torch.autocast("cpu", dtype=torch.bfloat16):
    product(a, a)  # <- autocast
product(a, a)
witness.say()
