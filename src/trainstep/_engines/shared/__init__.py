"""Parts of engines that two of them use, or that need no engine: padding, cuts, host functions.

Plain Python values and NumPy arrays enter and leave. These files import no engine.
"""
