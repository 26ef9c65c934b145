"""`Trainer`: trains, evaluates and inspects a Keras model through compiled steps.

A Keras model, what it is compiled with, and data enter. Updated variables, logs, outputs, reports
and checkpoints leave. This room may import `_distribution` and the rooms below it.
"""
