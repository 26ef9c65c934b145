"""Batches of four sizes: one program for the first, and one for any size from the second on."""

import torch
import witness


@torch.compile(backend=witness.dynamo("mean"))
def mean(batch):
    return (batch * 2).mean()


for size in (8, 6, 5, 3):
    mean(torch.ones(size, 4))  # <- call
witness.say()
