"""A list of tensors, then a tuple, then a longer list; and an argument that is None at first."""

import torch
import witness


@torch.compile(backend=witness.dynamo("joined"))
def joined(parts, extra=None):
    total = sum(part.sum() for part in parts)
    return total if extra is None else total + extra


one = torch.ones(3)
joined([one, one])
joined((one, one))  # <- tuple
joined([one, one, one])  # <- longer
joined([one, one], one)  # <- extra
joined([one, one])
witness.say()
