"""The step as a graph: placeholders, expressions, operations, and a session that runs any of them.

Fetches and feed values enter: symbolic tensors and operations that the user built from this module,
`keras.ops` and layers, or from `of(trainer)`. NumPy values leave, computed by one `Function` for
each set of fetches. This room may import `_trainer` and the rooms below it, and neither `_doctor`
nor an engine's library.

`session.run([train, loss], feed_dict={x: batch, y: labels})` computes its fetches and nothing else,
and compiles each set of fetches once.
"""

from trainstep.graph import train as train
from trainstep.graph._calls import call as call
from trainstep.graph._calls import identity as identity
from trainstep.graph._calls import shape as shape
from trainstep.graph._cond import cond as cond
from trainstep.graph._draw import draw as draw
from trainstep.graph._gradients import clip_by_global_norm as clip_by_global_norm
from trainstep.graph._gradients import clip_by_norm as clip_by_norm
from trainstep.graph._gradients import clip_by_value as clip_by_value
from trainstep.graph._gradients import global_norm as global_norm
from trainstep.graph._gradients import gradients as gradients
from trainstep.graph._graph import Graph as Graph
from trainstep.graph._graph import get_default_graph as get_default_graph
from trainstep.graph._graph import reset_default_graph as reset_default_graph
from trainstep.graph._of_trainer import TrainerGraph as TrainerGraph
from trainstep.graph._of_trainer import of as of
from trainstep.graph._operations import Operation as Operation
from trainstep.graph._operations import assign as assign
from trainstep.graph._operations import assign_add as assign_add
from trainstep.graph._operations import assign_sub as assign_sub
from trainstep.graph._operations import control_dependencies as control_dependencies
from trainstep.graph._operations import global_variables_initializer as global_variables_initializer
from trainstep.graph._operations import group as group
from trainstep.graph._operations import no_op as no_op
from trainstep.graph._session import Session as Session
from trainstep.graph._session import get_default_session as get_default_session
from trainstep.graph._sources import constant as constant
from trainstep.graph._sources import placeholder as placeholder
from trainstep.graph._sources import random_normal as random_normal
from trainstep.graph._sources import random_uniform as random_uniform
from trainstep.graph._tensors import Tensor as Tensor
from trainstep.graph._variables import Variable as Variable
from trainstep.graph._variables import global_variables as global_variables
from trainstep.graph._variables import read as read
from trainstep.graph._variables import trainable_variables as trainable_variables
from trainstep.graph._while_loop import while_loop as while_loop

__all__ = [
    "Graph",
    "Operation",
    "Session",
    "Tensor",
    "TrainerGraph",
    "Variable",
    "assign",
    "assign_add",
    "assign_sub",
    "call",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "cond",
    "constant",
    "control_dependencies",
    "draw",
    "get_default_graph",
    "get_default_session",
    "global_norm",
    "global_variables",
    "global_variables_initializer",
    "gradients",
    "group",
    "identity",
    "no_op",
    "of",
    "placeholder",
    "random_normal",
    "random_uniform",
    "read",
    "reset_default_graph",
    "shape",
    "train",
    "trainable_variables",
    "while_loop",
]
