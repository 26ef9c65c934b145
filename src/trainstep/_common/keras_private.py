"""The private names of Keras that trainstep is built on.

Keras has no public way to ask for the current scope, seed generator or backend, or to install
another. Without one of these names trainstep cannot work, and says so when it is imported.
"""

from __future__ import annotations

from typing import Any

from trainstep._common.private_names import need

# The base class of all variables.
KerasVariable: Any = need("keras.src.backend.common", "KerasVariable")
# The current scope, call and name scope of each thread.
global_state = need("keras.src.backend.common", "global_state")
in_symbolic_scope = need("keras.src.backend.common.symbolic_scope", "in_symbolic_scope")
# Gives the variables that were created in a scope their values.
initialize_all_variables = need("keras.src.backend.common.variables", "initialize_all_variables")
# Has the generator of draws without a seed.
seed_generator = need("keras.src.random", "seed_generator")
# The functions that Keras's operations call, for the current backend.
backend = need("keras.src", "backend")
# The masks that layers attach to tensors.
get_keras_mask = need("keras.src.backend.common.masking", "get_keras_mask")
set_keras_mask = need("keras.src.backend.common.masking", "set_keras_mask")
# The nodes of a symbolic graph, and the names of their operations.
Node = need("keras.src.ops.node", "Node")
to_snake_case = need("keras.src.utils.naming", "to_snake_case")
LossFunctionWrapper: Any = need("keras.src.losses.losses", "LossFunctionWrapper")
# Runs the workers of a `keras.utils.PyDataset`.
PyDatasetAdapter: Any = need(
    "keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter"
)
# The loss of a compiled model.
CompileLoss: Any = need("keras.src.trainers.compile_utils", "CompileLoss")
# The dtypes that Python numbers stand for.
dtypes = need("keras.src.backend.common", "dtypes")
