"""The same call under autocast: compiled again."""

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
