"""Cures for Keras, on the engine of this process."""

from __future__ import annotations

from .cure import Cures

CURES = Cures()
