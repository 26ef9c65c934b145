"""Keras scopes that turn a stateful step into a pure function.

A step that reads and writes `keras.Variable`s enters, with the callbacks that an engine sets. The
variables read and written, their new values, the output structure and one lock per set of shared
variables leave. This room may import `_explain` and `_common`, and Keras, but no engine.
"""
