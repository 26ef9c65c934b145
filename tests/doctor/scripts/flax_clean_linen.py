"""linen and optax as they should be: a train state passed through, dropout keys, batch statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import witness
from flax.training import train_state


class Net(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, training):
        x = nn.Dense(self.width)(x)
        x = nn.BatchNorm(use_running_average=not training)(x)
        x = nn.Dropout(0.2, deterministic=not training)(nn.relu(x))
        return nn.Dense(1)(x)


class State(train_state.TrainState):
    statistics: dict


@jax.jit
def step(state, x, y, key):
    witness.mark("step")

    def loss_of(params):
        out, updates = state.apply_fn(
            {"params": params, "batch_stats": state.statistics},
            x,
            training=True,
            rngs={"dropout": jax.random.fold_in(key, state.step)},
            mutable=["batch_stats"],
        )
        return jnp.mean((out - y) ** 2), updates["batch_stats"]

    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, statistics=statistics), loss


@jax.jit
def evaluate(state, x, y):
    witness.mark("evaluate")
    variables = {"params": state.params, "batch_stats": state.statistics}
    return jnp.mean((state.apply_fn(variables, x, training=False) - y) ** 2)


net, rng = Net(), np.random.default_rng(0)
variables = net.init(jax.random.key(0), np.zeros((8, 4), "float32"), training=False)
state = State.create(
    apply_fn=net.apply,
    params=variables["params"],
    tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(0.1, 9))),
    statistics=variables["batch_stats"],
)
for _ in range(5):
    x = rng.normal(size=(8, 4)).astype("float32")
    state, loss = step(state, x, x[:, :1], jax.random.key(1))
    evaluate(state, x, x[:, :1])
witness.say(steps=int(state.step))
