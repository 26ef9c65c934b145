"""The numbers that every contender shares, and the type of a step. Imports no engine."""

from collections.abc import Callable
from typing import Any

import numpy as np

BATCH = 32

# Adam, with Keras's defaults.
LEARNING_RATE = 1e-3
BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-7

# Layers, with Keras's defaults where there are any.
DROPOUT = 0.2
NORM_EPSILON = 1e-3
NORM_MOMENTUM = 0.99
HEADS = 4
KEY_SIZE = 8

Weights = list[np.ndarray]

# A training step on one batch: (x, y) -> the loss, or a dict with the loss; see `read_loss`.
Step = Callable[[np.ndarray, np.ndarray], Any]


def read_loss(result: Any) -> float:
    """Waits for a step and copies its loss to the host."""
    return float(result["loss"] if isinstance(result, dict) else result)
