"""Dynamic sizes: which record of a step, and which program of it, serves a call.

The key of a call enters, with its shapes; a program leaves, or the pattern by which the step is to
be recorded once for all sizes. These files may import what `_function` may.
"""
