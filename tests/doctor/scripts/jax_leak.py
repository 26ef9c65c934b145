"""A tracer kept in a list: using it later raises, and the list grows at traces only."""

import jax
import jax.numpy as jnp
import numpy as np
import witness

losses = []


@jax.jit
def step(x):
    witness.mark("step")
    loss = jnp.mean(x)
    losses.append(loss)  # <- leak
    return loss


for _ in range(3):
    step(np.ones((3,), "float32"))
try:
    float(losses[0])
    outcome = "a number"
except jax.errors.ConcretizationTypeError:
    outcome = "raised"
except jax.errors.UnexpectedTracerError:
    outcome = "raised"
witness.say(outcome=outcome, length=len(losses))
