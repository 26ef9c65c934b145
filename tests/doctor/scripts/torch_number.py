"""A Python integer that changes: compiled for its value first, then once for any."""

import torch
import witness


@torch.compile(backend=witness.dynamo("shifted"))
def shifted(x, offset):
    return x + offset


for offset in (3, 4, 5, 6):
    shifted(torch.ones(3), offset)  # <- call
witness.say()
