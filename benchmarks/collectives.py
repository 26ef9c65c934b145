"""The traffic between the devices of a JAX program, read from the compiled text."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator

import keras

WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
Sent = dict[str, tuple[int, int]]  # number and bytes of the collectives, by kind


@contextlib.contextmanager
def noted() -> Iterator[Sent]:
    """Yields the traffic of the last program compiled in this block; empty on other engines."""
    found: Sent = {}
    if keras.backend.backend() != "jax":
        yield found
        return
    import jax

    compile_ = jax.stages.Lowered.compile

    def noting(self: jax.stages.Lowered) -> jax.stages.Compiled:
        compiled = compile_(self)
        found.clear()
        found.update(sent_by(compiled.as_text()))
        return compiled

    jax.stages.Lowered.compile = noting
    try:
        yield found
    finally:
        jax.stages.Lowered.compile = compile_


def sent_by(text: str) -> Sent:
    """Returns the traffic of a program."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for found in COLLECTIVE.finditer(text):
        counts[found["kind"]] += 1
        for dtype, shape in ARRAY.findall(found["shapes"]):
            numbers = [int(n) for n in shape.split(",") if n]
            size = WIDTHS[dtype]
            for number in numbers:
                size *= number
            sizes[found["kind"]] += size
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def told(sent: Sent) -> tuple[str, str]:
    """Returns kilobytes and kinds as text; dashes where they are unknown."""
    if keras.backend.backend() != "jax":
        return "-", "-"
    kinds = ", ".join(f"{n} {what}" for what, (n, _) in sorted(sent.items()))
    return f"{sum(size for _, size in sent.values()) / 1000:.0f}", kinds or "nothing"
