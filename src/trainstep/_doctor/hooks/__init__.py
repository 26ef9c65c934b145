"""Hooks: calls of JAX, TensorFlow, torch, Keras, Flax and trainstep enter, as a script makes them.

Records of traces, compilations and incidents leave, into the `Log`. A hook may import
`_doctor.records`, `_surroundings`, `_explain` and `_common`, but no engine: it waits for the script
to import one.
"""
