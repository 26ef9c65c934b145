"""TensorFlow: what its runtime keeps of variables that are gone is given back.

To create a variable is an operation, and the eager runtime keeps a kernel of some 34 KB for each of
them, by the variable's name, for ever. A loop that trains and drops models with names of their own
would add half a megabyte for each.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.python.eager import context

from trainstep._beside import Beside
from trainstep._engines._base import Variable

_MOST = 1024  # variables that are gone before their kernels are given back: some 35 MB


class Kernels:
    """The variables that steps have met, and how many of them are gone."""

    def __init__(self) -> None:
        self._living: Beside[bool] = Beside()
        self._met = 0

    def note(self, variables: Iterable[Variable]) -> None:
        """Notes the variables of a step."""
        for variable in variables:
            if not self._living.get(variable):
                self._living.set(variable, True)
                self._met += 1

    def tidy(self) -> None:
        """Lets the runtime forget its kernels, if enough of them are of no more use.

        There is no way to choose: programs that live get theirs again at their next call, which
        takes as long as a trace. So this is for when a trace is due anyway.
        """
        if self._met - len(self._living) >= _MOST and tf.executing_eagerly():
            context.context().clear_kernel_cache()
            self._met = len(self._living)
