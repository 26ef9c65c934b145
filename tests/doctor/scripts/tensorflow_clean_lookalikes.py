"""What looks like a fault and is none: values that change before the first trace or after the last
call, that change and come back, that only untraced code reads, that are set to an equal value; a
list that dies with the call; a file opened and a number drawn by code that is not traced.
"""

import random

import tensorflow as tf
import witness

scale = 1.0
rate = 0.5
shown = 0
config = {"rate": 1.0, "epoch": 0}
scale = 2.0


def report(value):
    global shown
    shown += 1
    config["epoch"] += 1
    with open(__file__) as file:
        file.readline()
    return value * shown * random.random()


@tf.function
def step(x):
    witness.mark("step")
    parts = []
    for power in range(1, 4):
        parts.append(scale * x**power)
    bounds = {"low": -1.0}
    bounds["high"] = config["rate"]
    scale_here = rate
    return tf.clip_by_value(tf.add_n(parts), bounds["low"], bounds["high"]) * scale_here


for epoch in range(3):
    report(float(tf.reduce_sum(step(tf.ones((2,))))))
    rate = 0.25
    rate = 0.5
    config["rate"] = 2.0 / 2
scale = 5.0
witness.say()
