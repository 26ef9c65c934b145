"""Every exception that trainstep raises, in one tree.

    TrainstepError
    ├── ArgumentError        an argument that cannot enter a compiled step, or does not fit its Spec
    ├── RetraceLimitError    one more trace than `max_traces` allows; carries the ledger entry
    ├── ControlFlowError     Python asked for the value of a tensor while a step was traced
    ├── ForeignTraceError    a function called inside another compiler's trace
    ├── GradientError        a differentiation that cannot be made
    ├── StateError           a variable written where its value cannot leave
    ├── SideEffectError      Python in a step that would run while tracing and never again
    ├── StaleCaptureError    a value that a step took from around it has changed since
    ├── NonFiniteError       a loss or gradients that are not finite; nothing was changed
    ├── StrategyError        a step cannot be spread as was asked
    ├── ProcessLostError     another process of the job is gone
    └── CheckpointError      a checkpoint that is not of this trainer
    SizesWarning             sizes that vary cost a program each, and why
    SideEffectWarning        what a SideEffectError says, and the step goes on
    StaleCaptureWarning      what a StaleCaptureError says, and the step goes on

A message is one line of fact, then what came, what was expected, and the cure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainstep._explain.ledger import TraceEvent


class TrainstepError(Exception):
    """The base of every error that trainstep raises itself."""

    # Keras rebuilds an exception that passes through a layer from its text, unless told that
    # this was done. Ours say where they come from themselves.
    _keras_call_info_injected = True


class ArgumentError(TrainstepError, TypeError):
    """An argument cannot enter a compiled step, or does not fit the signature."""

    def __init__(self, function: str, argument: str, expected: str, came: str, cure: str) -> None:
        super().__init__(
            f"`{function}`: argument `{argument}` does not fit.\n"
            f"  expected: {expected}\n"
            f"  came:     {came}\n"
            f"  to fix:   {cure}"
        )
        self.argument = argument


class RetraceLimitError(TrainstepError):
    """A function needed more traces than its `max_traces` allows.

    Attributes:
        event: The ledger entry that the trace would have had.
    """

    def __init__(self, limit: int, event: TraceEvent) -> None:
        since = f"trace {event.nearest}" if event.nearest is not None else "no earlier trace"
        super().__init__(
            f"`{event.function}` is limited to max_traces={limit}, and this call needs one more.\n"
            f"  changed:  {'; '.join(event.changes)}\n"
            f"  since:    {since}\n"
            f"  called:   {event.site}\n"
            f"  to fix:   {event.advice}"
        )
        self.event = event


class ControlFlowError(TrainstepError):
    """Python asked for the value of a tensor while a step was traced."""

    def __init__(self, function: str, site: str, line: str) -> None:
        where = f"{site}: {line}" if line else site
        super().__init__(
            f"`{function}` needs the value of a tensor in Python while it is being compiled.\n"
            f"  where:    {where}\n"
            "  why:      a compiled step is traced once; its tensors have no values yet, so `if`, "
            "`while`, `float()`, `int()`, `bool()` and NumPy cannot read them\n"
            "  to fix:   keras.ops.cond, keras.ops.while_loop, keras.ops.scan or keras.ops.where "
            "for control flow; return the tensor and read it outside the step"
        )
        self.site = site


class ForeignTraceError(TrainstepError):
    """A function of trainstep was called inside another compiler's trace."""

    def __init__(self, function: str, compiler: str) -> None:
        super().__init__(
            f"`{function}` was called inside `{compiler}`, which cannot see the variables that it "
            "reads and writes: their updates would be lost.\n"
            f"  to fix:   decorate the outer function with `trainstep.function` instead of "
            f"`{compiler}`; functions called inside it are inlined"
        )


class GradientError(TrainstepError):
    """A differentiation that cannot be made as asked."""


def nothing_to_differentiate_by() -> GradientError:
    """No variables were given, or none that is trainable was read."""
    return GradientError(
        "`variables` is empty: there is nothing to differentiate by.\n"
        "  why:      a model that is not built yet has no variables before its first call; a "
        "frozen one has no trainable ones\n"
        "  to fix:   build the model first, or pass a function: "
        "`variables=lambda: model.trainable_variables`"
    )


class StateError(TrainstepError):
    """A variable was written inside a branch or loop body of the engine."""

    def __init__(self, variable: str) -> None:
        super().__init__(
            f"variable `{variable}` is written inside a branch or a loop body (keras.ops.cond, "
            "while_loop, scan, map), which is a program of its own: the new value cannot leave.\n"
            "  to fix:   return the new value from the branch and assign it after the "
            "`keras.ops` call"
        )
        self.variable = variable


class SideEffectError(TrainstepError):
    """Python in a step would run while it is traced, and never again."""


class StaleCaptureError(TrainstepError):
    """A value that a step took from around it while it was traced has changed since."""


class NonFiniteError(TrainstepError):
    """The loss or a gradient was not finite; every variable is as it was.

    Attributes:
        function: The name of the function.
        skipped: How many batches it has skipped so far.
    """

    def __init__(self, function: str, came: str, which: str, skipped: int) -> None:
        where = f"  which:    {which}; the others were trained on\n" if which else ""
        super().__init__(
            f"`{function}` met a batch that is not finite; nothing was changed by it.\n"
            f"  came:     {came}\n"
            f"{where}"
            f"  skipped:  {skipped} so far\n"
            "  to fix:   look at the batch with `Trainer.inspect`, which names the first layer "
            'where it arises; `nan_policy="skip"` leaves such batches out and goes on'
        )
        self.function = function
        self.skipped = skipped


class StrategyError(TrainstepError):
    """A step cannot be spread over devices or processes as was asked."""


class ProcessLostError(StrategyError):
    """Another process of the job is gone; this one cannot go on without it."""

    def __init__(self, told: str) -> None:
        super().__init__(
            "a step of many processes failed, most likely because one of them is gone.\n"
            f"  came:     {told}\n"
            "  to fix:   let this process end, and restart all of them: they go on from the newest "
            "checkpoint (`trainstep.Checkpoints`)"
        )


class CheckpointError(TrainstepError):
    """A checkpoint does not fit the trainer that is to go on from it."""


def calls_the_host() -> StrategyError:
    """A step over several devices or processes that calls Python."""
    return StrategyError(
        "a step over several devices cannot call the host.\n"
        "  expected: a step without `trainstep.print` and `trainstep.callback`\n"
        "  came:     a step with one of them\n"
        "  to fix:   return the values, and look at them after the step; or use `Single()`"
    )


def variables_are_whole(engine: str) -> StrategyError:
    """`Sharded` on an engine that cuts batches alone."""
    return StrategyError(
        f"on {engine}, variables are whole in every process.\n"
        "  expected: the JAX backend, for `Sharded`\n"
        f"  came:     {engine}\n"
        "  to fix:   use `trainstep.Mirrored()`, or set KERAS_BACKEND=jax"
    )


def runs_on_one_device(engine: str) -> StrategyError:
    """A strategy of several devices on an engine that has none."""
    return StrategyError(
        f"on {engine}, a step runs on one device.\n"
        "  expected: a backend of Keras's, for a strategy of several devices or processes\n"
        f"  came:     {engine}\n"
        "  to fix:   use `trainstep.Single()`"
    )


class SideEffectWarning(UserWarning):
    """Python in a step ran while it was traced, and never will again."""


class StaleCaptureWarning(UserWarning):
    """A value that a step took from around it while it was traced has changed since."""


class SizesWarning(UserWarning):
    """Sizes that vary cost a program each, because of something in the step."""
