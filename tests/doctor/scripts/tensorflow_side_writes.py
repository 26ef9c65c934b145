"""A counter in a global, one in an attribute and one in a dictionary: each counts traces."""

import tensorflow as tf
import witness

steps = 0
totals = {"steps": 0}


class Trainer:
    def __init__(self):
        self.seen = 0

    @tf.function
    def step(self, x):
        global steps
        steps += 1  # <- global
        self.seen += 1  # <- attribute
        totals["steps"] += 1  # <- entry
        return x * 2


trainer = Trainer()
for _ in range(4):
    trainer.step(tf.ones((2,)))
witness.say(traces={"step": 1}, counted=[steps, trainer.seen, totals["steps"]])
