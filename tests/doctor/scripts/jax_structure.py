"""A dictionary of parameters that gets another entry, and an optional argument."""

import jax
import numpy as np
import witness


@jax.jit
def forward(params, x, mask=None):
    witness.mark("forward")
    y = x @ params["kernel"]
    if "bias" in params:
        y = y + params["bias"]
    return y if mask is None else y * mask


x, kernel = np.ones((2, 3), "float32"), np.ones((3, 1), "float32")
forward({"kernel": kernel}, x)
forward({"kernel": kernel, "bias": np.zeros((1,), "float32")}, x)  # <- bias
forward({"kernel": kernel}, x, np.ones((2, 1), "float32"))  # <- mask
forward({"kernel": kernel}, x)
assert forward._cache_size() == witness.COUNTS["forward"] == 3
witness.say()
