"""More programs than torch keeps for one function: from then on it runs uncompiled."""

import torch
import witness


@torch.compile(backend=witness.dynamo("named"))
def named(x, name):
    return x + len(name)


for turn in range(12):
    named(torch.ones(3), "x" * turn)  # <- call
witness.say(limit=torch._dynamo.config.recompile_limit)
