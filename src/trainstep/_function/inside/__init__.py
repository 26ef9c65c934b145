"""Functions that a step may call while it is traced: gradients, host calls, the NaN guard.

Tensors of the trace enter; tensors leave, and the recorded program contains the rest. These files
may import what `_function` may.
"""
