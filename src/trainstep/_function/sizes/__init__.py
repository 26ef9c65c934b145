"""Dynamic sizes: chooses the record of a step, and the program of that record, for a call.

The key of a call enters; a program leaves, or the pattern by which the step is to be recorded once
for all sizes. These files may import what `_function` may.
"""
