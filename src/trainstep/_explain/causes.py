"""The texts that explain side effects, stale values and retraces, and how to fix each.

The ledger, warnings, errors and doctor share these texts, so that they describe one problem in one
way. `CURES` has a fix for each cause and engine: trainstep's own functions and the functions that
doctor observes have the same causes, but different fixes. Causes are in order of importance: a
trace with several causes gets the advice for the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trainstep._common import user_code


class Advice(NamedTuple):
    """A consequence, and how to avoid it."""

    happens: str
    cure: str


# Python side effects in a traced step, by kind.
EFFECTS = {
    "random": Advice(
        "it drew{value} once, during tracing; every step uses that number",
        "draw with keras.random and a keras.random.SeedGenerator, or draw outside the step and "
        "pass the numbers as an argument",
    ),
    "clock": Advice(
        "it returned{value} once, during tracing; every step uses that time",
        "read the clock outside the step and pass it as an argument, or use trainstep.callback",
    ),
    "print": Advice(
        "it ran once, during tracing, and does not run in later steps",
        "trainstep.print, which runs at every step",
    ),
    "file": Advice(
        "it ran once, during tracing, and does not run in later steps",
        "do it outside the step and pass the result as an argument, or in a "
        "trainstep.callback, which runs at every step",
    ),
    "write": Advice(
        "it ran once, during tracing{value}, and does not run in later steps",
        "return the value from the step, or keep it in a keras.Variable",
    ),
    "argument": Advice(
        "the step gets a copy of its arguments{value}: the change is lost",
        "return the value from the step",
    ),
}


@dataclass(frozen=True, slots=True)
class Effect:
    """A Python side effect of a step during tracing."""

    kind: str  # of `EFFECTS`
    what: str
    file: str
    line: int
    value: str = ""
    leaks: bool = False  # whether a tensor of the trace is stored outside of the step

    @property
    def site(self) -> str:
        """The user's line."""
        return user_code.name(self.file, self.line)

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"

    def message(self, function: str) -> str:
        """The full message: effect, line, consequence and fix."""
        advice = EFFECTS[self.kind]
        line = user_code.with_text(self.file, self.line)
        return (
            f"`{function}`: {self.what}, in Python, at {line}.\n"
            f"  what happens: {advice.happens.format(value=self.value)}\n"
            f"  to fix:       {advice.cure}"
        )


STALE = Advice(
    "the compiled step holds the old value as a constant",
    "pass it as an argument, or keep it in a keras.Variable; captures='retrace' traces again when "
    "it changes",
)
LARGE = Advice(
    "it is a constant of the program, and too large to be compared at every call: trainstep does "
    "not notice an in-place change",
    "pass it as an argument, or keep it in a keras.Variable",
)
OFTEN = Advice(
    "the step is traced again for every new value",
    "pass it as an argument, or keep it in a keras.Variable",
)

# Doctor's findings, in order of importance. The keys are the values of `--fail-on`.
FINDINGS = {
    "recompile-limit": Advice(
        "torch stopped compiling it after too many recompilations: from here on it runs "
        "uncompiled, without a warning",
        "remove the causes of its recompilations; a higher "
        "`torch._dynamo.config.recompile_limit` only delays this",
    ),
    "retraces": Advice("each of them ran the Python and the compiler again", ""),
    "compilations": Advice("the compiler ran again, though nothing was traced", ""),
    "frozen": Advice(
        "Keras chose the variables to train at `compile()`, or at the first batch",
        "set `trainable` before `compile()`, or call `compile()` again after it",
    ),
    "metrics": Advice(
        "`train_on_batch` resets metrics in Python, which runs during tracing only, and these were "
        "not built then: the values that it returns are means over all batches so far",
        "run one batch, or `model.compute_metrics`, before the function is traced; or call "
        "`train_on_batch` outside of it; or use trainstep.Trainer inside a trainstep.function",
    ),
    "stale": Advice(
        "the compiled function holds the old value as a constant",
        "pass it as an argument, or keep it in a variable (`tf.Variable`, `keras.Variable`)",
    ),
    "side-effects": Advice("it ran during tracing, and does not run in later calls", ""),
    "leaks": Advice(
        "a tensor of the trace has no value; using it later is an error",
        "return it from the function",
    ),
    "eager": Advice(
        "the gradient is computed outside of any compiled function: Python dispatches every "
        "operation of the step, one by one",
        "move the step into a function, and decorate it with `tf.function`, `jax.jit`, "
        "`torch.compile` or trainstep.function",
    ),
    "graph-breaks": Advice(
        "the function is compiled in parts, with Python between them",
        "move code that cannot be traced out of the compiled function",
    ),
}

# Causes of a trace --------------------------------------------------------------------------

_OUTSIDE = "create it once, before the loop, and call the same one"
_KERAS_SIZES = (
    "make the batches equal (`batch_size` that divides the data, `drop_remainder=True`), or train "
    "with trainstep.Trainer, which serves all sizes from one trace"
)

CURES: dict[str, dict[str, str]] = {
    "function": {
        "": f"a new function object is a new program: {_OUTSIDE}",
        "tensorflow": f"`tf.function` is applied again each time: {_OUTSIDE}",
        "jax": (
            "`jax.jit` gets a new function, lambda, partial or bound method each time, for which "
            f"its cache has no program: {_OUTSIDE}"
        ),
        "torch": f"`torch.compile` gets a new function each time: {_OUTSIDE}",
    },
    "instance": {
        "": f"each object has its own traces of its methods: {_OUTSIDE}",
    },
    "object": {
        "": (
            "an object is part of the program: pass the same one, or expect one trace for each; "
            "create models, optimizers and functions outside the loop"
        ),
        "tensorflow": (
            "another Python object among the arguments is another program: create it once, or let "
            "the function capture it instead of passing it as an argument"
        ),
        "torch": f"another Python object each time is another program: {_OUTSIDE}",
    },
    "compile": {
        "": (
            "`compile()` drops the compiled functions: call it once; a learning rate changes by "
            "`optimizer.learning_rate = ...`"
        ),
    },
    "variables": {
        "": (
            "the first call created variables, and so was traced twice: build the model "
            "(`model.build(...)`) and the optimizer "
            "(`optimizer.build(model.trainable_variables)`) before it"
        ),
        "keras": (
            "the first batch created variables, and so was traced twice: begin the model with "
            "an Input, build the optimizer (`optimizer.build(model.trainable_variables)`), and "
            "pass metrics as objects, not as strings"
        ),
    },
    "capture": {
        "": (
            "a captured value is a constant of the program: pass it as an argument, or keep it in "
            "a keras.Variable, and no retrace is needed"
        ),
        "torch": (
            "a captured value is a constant of the program: pass it as a tensor argument, or keep "
            "it in a tensor (in a module: `register_buffer`)"
        ),
    },
    "structure": {
        "": "keep one structure: calls with and without an optional argument need a trace each",
        "keras": (
            "`fit` and `train_on_batch` pass different structures to the step, and so do batches "
            "with and without sample weights: use one of them"
        ),
    },
    "shape": {
        "": ("each shape needs a program: declare dynamic sizes (`dynamic=`, or None in a `Spec`)"),
        "tensorflow": (
            "give `tf.function` an `input_signature` whose size is None where it varies, or "
            "`reduce_retracing=True`; or make all batches equal (`drop_remainder=True`)"
        ),
        "jax": "make all batches equal: drop the short one, or pad to a few sizes",
        "torch": (
            "make all batches equal (`drop_last=True`), or declare the dynamic size before the "
            "first call: `torch._dynamo.mark_dynamic(x, 0)`, or `torch.compile(dynamic=True)`"
        ),
        "keras": _KERAS_SIZES,
    },
    "dtype": {
        "": "each dtype needs a program: convert to one dtype before the call",
    },
    "weak": {
        "": (
            "some calls pass a Python number and some an array: pass `jnp.asarray(value, dtype)` "
            "at every call"
        ),
    },
    "number": {
        "": "pass numbers of one type: an int and a float need a program each",
        "tensorflow": (
            "a Python number is a constant of the program, one trace for each value: pass "
            "`tf.constant(value)` or a NumPy number"
        ),
        "torch": (
            "a Python number is a constant of the program: pass a tensor (`torch.tensor(n)`); "
            "after its first change torch treats it as dynamic, unless the code branches on it"
        ),
    },
    "item": {
        "": (
            "a number read from a tensor (`.item()`, `float()`) is a constant of the rest of the "
            "program: keep it a tensor, or read it after the compiled function"
        ),
    },
    "static": {
        "": "a bool, string, None or enum is a constant of the program: one trace per value",
        "jax": (
            "a static argument, or a plain attribute of an nnx module, is a constant of the "
            "program, one trace per value: if only arithmetic uses it, remove it from "
            "`static_argnums`/`static_argnames`, or keep it in an `nnx.Variable`"
        ),
    },
    "flag": {
        "": "trainable flags are part of the program: one trace per pattern, cached for later",
        "keras": "set `trainable` before `compile()`, and once",
    },
    "mode": {
        "": "each mode (with or without gradients, training or not) needs one trace",
    },
    "sharding": {
        "": "place the arguments on the same devices at every call (`jax.device_put`)",
    },
    "context": {
        "": "the same arguments under another setting of the engine: set it once, at the start",
    },
    "hidden": {
        "": (
            "`jit_compile=True` compiles for every shape, even without a retrace: make the shapes "
            "equal, or turn `jit_compile` off"
        ),
        "keras": (
            "`jit_compile=True` compiles for every shape, even without a retrace: make the batches "
            "equal, or compile the model with `jit_compile=False`"
        ),
    },
    "unknown": {
        "": "doctor sees no difference; the engine may have dropped the earlier program",
    },
}


def cure(kind: str, engine: str = "", *, keras: bool = False) -> str:
    """The fix for a cause on an engine; with `keras`, Keras's own where there is one."""
    cures = CURES.get(kind, CURES["unknown"])
    return (cures.get("keras") if keras else None) or cures.get(engine) or cures[""]


def trace_advice(kinds: Iterable[str]) -> str:
    """One line of advice for a trace of trainstep's, given the kinds of its changes."""
    changed = set(kinds)
    cures = (cure(kind) for kind in CURES if kind in changed)
    return next(cures, "nothing: the first trace is needed")
