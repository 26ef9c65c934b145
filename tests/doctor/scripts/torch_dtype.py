"""The same batch as float32, as float64 and as int32."""

import torch
import witness


@torch.compile(backend=witness.dynamo("total"))
def total(batch):
    return (batch + 1).sum()


total(torch.ones(4, 3))
total(torch.ones(4, 3, dtype=torch.float64))  # <- double
total(torch.ones(4, 3, dtype=torch.int32))  # <- int
total(torch.zeros(4, 3))
witness.say()
