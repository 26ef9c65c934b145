"""The words for every surprise: what happens, what causes it, and what to do about it.

One place, so that the ledger, warnings, errors and doctor say the same of the same thing. `CURES`
is one table for the ledger of our own functions and for what doctor finds in other people's: the
causes are the same, the cures differ. Causes are in order of weight: of several, the first that
applies is the one to talk about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trainstep._common import user_code


class Advice(NamedTuple):
    """What really happens, and the cure."""

    happens: str
    cure: str


# Python that runs while a step is traced, by what it does.
EFFECTS = {
    "random": Advice(
        "it drew{value} once, while the step was traced; every step uses that number",
        "draw with keras.random and a keras.random.SeedGenerator, or draw outside the step and "
        "pass the numbers as an argument",
    ),
    "clock": Advice(
        "it gave{value} once, while the step was traced; every step sees that moment",
        "read the clock outside the step and pass it as an argument, or use trainstep.callback",
    ),
    "print": Advice(
        "it ran once, while the step was traced, and runs at no step",
        "trainstep.print, which runs at every step",
    ),
    "file": Advice(
        "it ran once, while the step was traced, and runs at no step",
        "do it outside the step and pass what it gives as an argument, or in a "
        "trainstep.callback, which runs at every step",
    ),
    "write": Advice(
        "it happened once, while the step was traced{value}, and happens at no step",
        "return the value from the step, or keep it in a keras.Variable",
    ),
    "argument": Advice(
        "the step works on a copy of its arguments{value}: the change is lost",
        "return the value from the step",
    ),
}


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that a step did in Python while it was traced."""

    kind: str  # of `EFFECTS`
    what: str
    file: str
    line: int
    value: str = ""
    leaks: bool = False  # whether a tensor of the trace is left somewhere

    @property
    def site(self) -> str:
        """The user's line."""
        return user_code.name(self.file, self.line)

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"

    def message(self, function: str) -> str:
        """The whole story."""
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
    "it is part of the program, and too large to be compared at every call: a change made to it in "
    "place would go unnoticed",
    "pass it as an argument, or keep it in a keras.Variable",
)
OFTEN = Advice(
    "the step is traced again for every new value",
    "pass it as an argument, or keep it in a keras.Variable",
)

# What doctor finds in a script, in order of weight. The keys are what `--fail-on` takes.
FINDINGS = {
    "recompile-limit": Advice(
        "torch gave up on compiling it after too many recompilations: from here on it runs "
        "uncompiled, without another word",
        "remove the causes of its recompilations; `torch._dynamo.config.recompile_limit` only "
        "puts it off",
    ),
    "retraces": Advice("each of them ran the Python and the compiler again", ""),
    "compilations": Advice("the compiler ran again, though nothing was traced", ""),
    "frozen": Advice(
        "Keras settled at `compile()`, or at the first batch, what is trained",
        "set `trainable` before `compile()`, or call `compile()` again after it",
    ),
    "metrics": Advice(
        "`train_on_batch` resets metrics in Python, which runs while tracing alone, and these were "
        "not built then: the values that it returns are means over all batches so far",
        "run one batch, or `model.compute_metrics`, before the function is traced; or call "
        "`train_on_batch` outside of it; or use trainstep.Trainer inside a trainstep.function",
    ),
    "stale": Advice(
        "the compiled function holds the old value as a constant",
        "pass it as an argument, or keep it in a variable of the engine's (`tf.Variable`, "
        "`keras.Variable`)",
    ),
    "side-effects": Advice("it ran while the function was traced, and runs at no call", ""),
    "leaks": Advice(
        "a tensor of the trace has no value of any call; using it later is an error",
        "return it from the function",
    ),
    "eager": Advice(
        "the gradient is taken outside of any compiled function: every operation of the step is "
        "dispatched by Python, one by one",
        "put the step in a function, and that under `tf.function`, `jax.jit`, `torch.compile` or "
        "trainstep.function",
    ),
    "graph-breaks": Advice(
        "the function is compiled in parts, with Python between them",
        "keep what cannot be traced outside of the compiled function",
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
            "`jax.jit` is given a new function, lambda, partial or bound method each time, which "
            f"never finds the earlier program: {_OUTSIDE}"
        ),
        "torch": f"`torch.compile` is given a new function each time: {_OUTSIDE}",
    },
    "instance": {
        "": f"each object traces its methods for itself: {_OUTSIDE}",
    },
    "object": {
        "": (
            "an object is part of the program: pass the same one, or expect one trace for each; "
            "create models, optimizers and functions outside the loop"
        ),
        "tensorflow": (
            "another Python object among the arguments is another program: create it once, or let "
            "the function take it from around it instead of as an argument"
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
            "the first call created variables, and was traced twice for it: build the model "
            "(`model.build(...)`) and the optimizer "
            "(`optimizer.build(model.trainable_variables)`) before"
        ),
        "keras": (
            "the first batch created variables, and was traced twice for it: begin the model with "
            "an Input, build the optimizer (`optimizer.build(model.trainable_variables)`), and "
            "pass metrics as objects, not as strings"
        ),
    },
    "capture": {
        "": (
            "a value that the step takes from around it is part of the program: pass it as an "
            "argument, or keep it in a keras.Variable, and no trace is needed"
        ),
        "torch": (
            "a value around the function is part of the program: pass it as a tensor argument, or "
            "keep it in a tensor (in a module: `register_buffer`)"
        ),
    },
    "structure": {
        "": "keep one structure: an optional argument that comes and goes costs a program",
        "keras": (
            "`fit` and `train_on_batch` hand the step different structures, and so does a batch "
            "with sample weights beside one without: keep to one"
        ),
    },
    "shape": {
        "": (
            "a program of its own: declare axes whose size varies (`dynamic=`, or None in a `Spec`)"
        ),
        "tensorflow": (
            "give `tf.function` an `input_signature` whose size is None where it varies, or "
            "`reduce_retracing=True`; or make all batches equal (`drop_remainder=True`)"
        ),
        "jax": "make all batches equal: drop the short one, or pad to a few sizes",
        "torch": (
            "make all batches equal (`drop_last=True`), or tell which size varies before the first "
            "call: `torch._dynamo.mark_dynamic(x, 0)`, or `torch.compile(dynamic=True)`"
        ),
        "keras": _KERAS_SIZES,
    },
    "dtype": {
        "": "a program of its own: convert to one dtype before the call",
    },
    "weak": {
        "": (
            "a Python number and an array take turns: pass `jnp.asarray(value, dtype)` at every "
            "call"
        ),
    },
    "number": {
        "": "pass a number of one type: an int and a float are different programs",
        "tensorflow": (
            "a Python number is part of the program, one trace for each value: pass "
            "`tf.constant(value)` or a NumPy number"
        ),
        "torch": (
            "a Python number is part of the program: pass a tensor (`torch.tensor(n)`); one that "
            "has changed once is taken to vary, as long as nothing branches on it"
        ),
    },
    "item": {
        "": (
            "a number that was taken out of a tensor (`.item()`, `float()`) is part of the rest of "
            "the program: keep it a tensor, or take it out after the compiled function"
        ),
    },
    "static": {
        "": "a bool, string, None or enum is part of the program: one trace per value",
        "jax": (
            "a static argument, or a plain attribute of an nnx module, is part of the program, one "
            "for each value: if it only enters arithmetic, take it out of "
            "`static_argnums`/`static_argnames`, or keep it in an `nnx.Variable`"
        ),
    },
    "flag": {
        "": "freezing is part of the program: one trace per pattern; going back reuses the first",
        "keras": "set `trainable` before `compile()`, and once",
    },
    "mode": {
        "": "each mode (with or without gradients, training or not) needs one trace of its own",
    },
    "sharding": {
        "": "place the arguments on the same devices at every call (`jax.device_put`)",
    },
    "context": {
        "": "the same arguments under another setting of the engine: set it once, at the start",
    },
    "hidden": {
        "": (
            "`jit_compile=True` compiles for every shape, also where no trace is needed: make the "
            "shapes equal, or leave `jit_compile` off"
        ),
        "keras": (
            "`jit_compile=True` compiles for every shape, also where no trace is needed: "
            "make the batches equal, or compile the model with `jit_compile=False`"
        ),
    },
    "unknown": {
        "": "nothing that doctor can see differs; the engine may have dropped the earlier program",
    },
}


def cure(kind: str, engine: str = "", *, keras: bool = False) -> str:
    """What to do about a cause on an engine; for a function that Keras made, if there is more."""
    cures = CURES.get(kind, CURES["unknown"])
    return (cures.get("keras") if keras else None) or cures.get(engine) or cures[""]


def trace_advice(kinds: Iterable[str]) -> str:
    """One line on what to do about a trace of ours, given the kinds of what changed."""
    changed = set(kinds)
    found = (cure(kind) for kind in CURES if kind in changed)
    return next(found, "nothing: the first trace is needed")
