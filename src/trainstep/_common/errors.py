"""Every exception that trainstep raises, in one tree.

    TrainstepError
    ├── ArgumentError        an argument that cannot enter a compiled step, or does not fit its Spec
    ├── RetraceLimitError    one more trace than `max_traces` allows; carries the ledger entry
    ├── ControlFlowError     Python asked for the value of a tensor while a step was traced
    ├── ForeignTraceError    a function called inside another compiler's trace
    ├── GradientError        a gradient that cannot be computed
    ├── StateError           a variable written in a branch or loop, which its value cannot leave
    ├── SideEffectError      Python in a step that would run during tracing and never again
    ├── StaleCaptureError    a captured value has changed since the trace
    ├── NonFiniteError       the loss or a gradient is not finite; no variable was updated
    ├── StrategyError        a step cannot be distributed as requested
    ├── ProcessLostError     another process of the job is gone
    └── CheckpointError      a checkpoint does not belong to this trainer
    SizesWarning             each dynamic size needs a program of its own, and why
    SideEffectWarning        a side effect was found; the step continues
    StaleCaptureWarning      a captured value has changed; the step continues

A message is one line of fact, then the expected and the given value, and the fix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainstep._explain.ledger import TraceEvent


class TrainstepError(Exception):
    """The base of every error that trainstep raises itself."""

    # Keras rebuilds an exception that passes through a layer from its text, which drops our
    # attributes, unless this flag says that it did so already.
    _keras_call_info_injected = True


class ArgumentError(TrainstepError, TypeError):
    """An argument cannot enter a compiled step, or does not fit the signature."""

    def __init__(self, function: str, argument: str, expected: str, got: str, cure: str) -> None:
        super().__init__(
            f"`{function}`: argument `{argument}` does not fit.\n"
            f"  expected: {expected}\n"
            f"  got:      {got}\n"
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
    """A gradient cannot be computed as requested."""


def nothing_to_differentiate_by() -> GradientError:
    """The error for an empty `variables`, or a function that reads no trainable variable."""
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
    """Python in a step would run during tracing, and never again."""


class StaleCaptureError(TrainstepError):
    """A captured value has changed since the step was traced."""


class NonFiniteError(TrainstepError):
    """The loss or a gradient is not finite; no variable was updated.

    Attributes:
        function: The name of the function.
        skipped: How many batches it has skipped so far.
    """

    def __init__(self, function: str, got: str, which: str, skipped: int) -> None:
        where = f"  which:    {which}; the other batches updated the variables\n" if which else ""
        super().__init__(
            f"`{function}`: the loss or a gradient of this batch is not finite; no variable was "
            "updated.\n"
            f"  got:      {got}\n"
            f"{where}"
            f"  skipped:  {skipped} so far\n"
            "  to fix:   look at the batch with `Trainer.inspect`, which names the first layer "
            'where it arises; `nan_policy="skip"` skips such batches and continues'
        )
        self.function = function
        self.skipped = skipped


class StrategyError(TrainstepError):
    """A step cannot be distributed over devices or processes as requested."""


class ProcessLostError(StrategyError):
    """Another process of the job is gone; this one cannot continue without it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "a step of many processes failed, most likely because one of them is gone.\n"
            f"  got:      {reason}\n"
            "  to fix:   let this process end, and restart all of them: they resume from the "
            "newest checkpoint (`trainstep.Checkpoints`)"
        )


class CheckpointError(TrainstepError):
    """A checkpoint does not fit the trainer that restores it."""


def calls_the_host() -> StrategyError:
    """The error for a host call in a step over several devices or processes."""
    return StrategyError(
        "a step over several devices cannot call the host.\n"
        "  expected: a step without `trainstep.print` and `trainstep.callback`\n"
        "  got:      a step with one of them\n"
        "  to fix:   return the values and use them after the step; or use `Single()`"
    )


def variables_are_whole(engine: str) -> StrategyError:
    """The error for `Sharded` on an engine that can shard batches only."""
    return StrategyError(
        f"on {engine}, every process holds whole variables.\n"
        "  expected: the JAX backend, for `Sharded`\n"
        f"  got:      {engine}\n"
        "  to fix:   use `trainstep.Mirrored()`, or set KERAS_BACKEND=jax"
    )


def runs_on_one_device(engine: str) -> StrategyError:
    """The error for a strategy of several devices on an engine with one."""
    return StrategyError(
        f"on {engine}, a step runs on one device.\n"
        "  expected: a Keras backend, for a strategy of several devices or processes\n"
        f"  got:      {engine}\n"
        "  to fix:   use `trainstep.Single()`"
    )


class SideEffectWarning(UserWarning):
    """Python in a step ran during tracing, and will not run again."""


class StaleCaptureWarning(UserWarning):
    """A captured value has changed since the step was traced."""


class SizesWarning(UserWarning):
    """Something in the step makes each dynamic size need a program of its own."""
