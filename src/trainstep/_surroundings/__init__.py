"""The Python code around a step, and the values that the step captures from it.

A step and the arguments of one call enter. Captured values with a generated test for changes, and
the side effects of a trace, leave. This room may import `_engines`, `_state`, `_explain` and
`_common`; today it imports `_explain` and `_common`, so that `_doctor` can use it without Keras.
"""
