"""A flag and a name as arguments: a trace for each combination that is used."""

import tensorflow as tf
import witness


@tf.function
def forward(x, training, activation="relu"):
    witness.mark("forward")
    if training:
        x = tf.nn.dropout(x, 0.5)
    return tf.nn.relu(x) if activation == "relu" else tf.nn.tanh(x)


batch = tf.ones((4, 5))
forward(batch, True)
forward(batch, False)  # <- flag
forward(batch, False, activation="tanh")  # <- name
forward(batch, True)
assert forward.experimental_get_tracing_count() == witness.COUNTS["forward"]
witness.say()
