"""Code that several engines share: padding, row cuts, host functions, messages, heartbeats.

Its inputs and outputs are plain Python values and NumPy arrays. These files import no engine.
"""
