"""`trainstep.function`: from a call to a compiled program, and back.

The values of a call enter; the outputs of the step leave, in the structure that it returned, and
its variables have their new values. The settings of a step enter once, as a `StepSettings`. This
room may import `_surroundings` and the rooms below it, and knows no engine by name.
"""
