"""trainstep's own functions: their ledger says why, and doctor repeats it, with no engine's part."""

import keras
import numpy as np
import witness

import trainstep as ts

weights = keras.Variable(np.ones((4, 1), "float32"))


@ts.function
def step(x, reduction):
    product = keras.ops.matmul(x, weights)
    return keras.ops.sum(product) if reduction == "sum" else keras.ops.mean(product)


x = np.ones((3, 4), "float32")
step(x, "sum")
step(x, "mean")  # <- mean
step(x, "sum")
witness.say(traces={"step": len(step.ledger)})
