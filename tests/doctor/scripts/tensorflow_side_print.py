"""print, of text and of a tensor, and open: they happen at the trace, and at no step after it."""

import os
import tempfile

import tensorflow as tf
import witness

log = os.path.join(tempfile.mkdtemp(), "log.txt")


@tf.function
def step(x):
    print("step runs")  # <- print
    print("mean", tf.reduce_mean(x))  # <- tensor
    with open(log, "a") as file:  # <- open
        file.write("step\n")
    return x + 1


for _ in range(3):
    step(tf.ones((2,)))
with open(log) as file:
    lines = len(file.readlines())
witness.say(traces={"step": step.experimental_get_tracing_count()}, lines=lines)
