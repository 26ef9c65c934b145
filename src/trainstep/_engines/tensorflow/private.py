"""The private names of TensorFlow that trainstep uses, and what it does without each.

Each is a module that has what is used of it, or None. The tricks look here as well.
"""

from __future__ import annotations

from trainstep._common.private_names import find

# Tells gradient tapes that a variable is read, whose place a tensor takes.
pywrap_tfe = find(
    "tensorflow.python.pywrap_tfe",
    "TFE_Py_TapeVariableAccessed",
    without="a `tf.GradientTape` in a step may have to watch variables by `tape.watch(v.value)`",
)
# Has the functions of `tf.custom_gradient`, for ever.
ops = find(
    "tensorflow.python.framework.ops",
    "gradient_registry._registry",
    without="memory of custom gradients is not freed",
)
# The class of variables, also inside the scope of a strategy.
resource_variable_ops = find(
    "tensorflow.python.ops.resource_variable_ops",
    "ResourceVariable",
    without="the class of a new `tf.Variable` is used",
)
# The class of tensors with values, whose constructor takes half the time of `tf.constant`.
eager_ops = find(
    "tensorflow.python.framework.ops", "EagerTensor", without="calls of a program cost more"
)
# Evaluates a constant that a graph computes.
tensor_util = find(
    "tensorflow.python.framework.tensor_util",
    "try_evaluate_constant",
    without="steps that compute a shape or an axis are refused on several devices",
)
# The device of this thread.
context = find("tensorflow.python.eager.context", "context", without="calls of a program cost more")
