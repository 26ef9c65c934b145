"""An object that is a tree to JAX: what it carries beside its arrays is part of the structure."""

import jax
import jax.numpy as jnp
import witness


@jax.tree_util.register_pytree_node_class
class Scaler:
    def __init__(self, factor, power):
        self.factor, self.power = factor, power

    def tree_flatten(self):
        return (self.factor,), self.power

    @classmethod
    def tree_unflatten(cls, power, children):
        return cls(*children, power)


@jax.jit
def apply(scaler, x):
    witness.mark("apply")
    return scaler.factor * x**scaler.power


scaler, x = Scaler(jnp.ones(()), 2), jnp.ones((3,))
for power in (2, 3, 2):
    scaler.power = power
    scaler.factor = scaler.factor + 1
    apply(scaler, x)  # <- call
witness.say()
