"""An attribute of an object that the function reads changes."""

import torch
import witness


class Settings:
    clip = "hard"


settings = Settings()


@torch.compile(backend=witness.dynamo("clipped"))
def clipped(x):
    return x.clamp(-1, 1) if settings.clip == "hard" else torch.tanh(x)


clipped(torch.ones(4))
settings.clip = "soft"
clipped(torch.ones(4))  # <- changed
witness.say()
