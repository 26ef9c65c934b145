"""The same batch as float32, then as int32."""

import jax
import numpy as np
import witness


@jax.jit
def total(batch):
    witness.mark("total")
    return batch.sum()


total(np.ones((4, 3), "float32"))
total(np.ones((4, 3), "int32"))  # <- int
total(np.zeros((4, 3), "float32"))
assert total._cache_size() == witness.COUNTS["total"]
witness.say()
