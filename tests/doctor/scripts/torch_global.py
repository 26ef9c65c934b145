"""A global that the function reads changes: torch.compile watches it and compiles again."""

import torch
import witness

mode = "sum"


@torch.compile(backend=witness.dynamo("reduced"))
def reduced(x):
    return x.sum() if mode == "sum" else x.mean()


reduced(torch.ones(4))
mode = "mean"
reduced(torch.ones(4))  # <- changed
mode = "sum"
reduced(torch.ones(4))
witness.say()
