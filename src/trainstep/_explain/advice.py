"""What happens, and what to do about it: the words for every surprise.

One place, so that the ledger, warnings and errors say the same of the same thing.
"""

from __future__ import annotations

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
