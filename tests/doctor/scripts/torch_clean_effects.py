"""Effects that torch.compile replays at every call: a list, an attribute, a dictionary."""

import torch
import witness


class Log:
    last = None


log, losses, counts = Log(), [], {"steps": torch.zeros(())}


@torch.compile(backend=witness.dynamo("step"))
def step(x):
    loss = (x * 2).mean()
    losses.append(loss)
    log.last = loss
    counts["steps"] = counts["steps"] + 1
    return loss


for _ in range(4):
    losses.clear()
    step(torch.ones(3))
witness.say(length=len(losses), last=float(log.last), steps=float(counts["steps"]))
