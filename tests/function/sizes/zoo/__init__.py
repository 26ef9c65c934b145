"""The zoo: small cases, each a training step whose arrays may vary in size.

`base` says what a case is; every other file adds cases to `CASES` when it is imported.
"""

from . import (
    attention,
    batchwise,
    contrast,
    convolved,
    layers,
    models,
    objectives,
    pending,
    recurrent,
    refusals,
    steps,
)
from .base import CASES, ENGINES, Built, Case

pending.apply()

__all__ = [
    "CASES",
    "ENGINES",
    "Built",
    "Case",
    "attention",
    "batchwise",
    "contrast",
    "convolved",
    "layers",
    "models",
    "objectives",
    "pending",
    "recurrent",
    "refusals",
    "steps",
]
