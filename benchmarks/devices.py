"""What spreading a step over several devices costs, at equal total work (JAX).

`python -m benchmarks.devices [--quick]`

The devices are parts of one processor. What is seen is the cost of cutting, feeding and summing,
and not what real devices would gain: they have arithmetic units of their own, and wires between
them. The step of one device waits for each result, as that of several has to on a processor.

The bytes are read from the compiled program: of all that devices send each other in a step.
"""

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Iterator

from benchmarks import table, timing
from benchmarks.engines import choose

COUNTS = (1, 2, 4, 8)
WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def main() -> None:
    """Measure both ways to spread, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    choose("jax")
    import jax

    jax.config.update("jax_num_cpu_devices", max(COUNTS))
    headers = ["network, batch", "strategy", "devices", "step / one device", "KB sent", "by"]
    lines = [line for case in cases() for line in measured(case, options.quick)]
    title = "JAX: a step over parts of one processor, by that of one device, on this machine"
    table.console().print(table.Table(headers, lines).rich(title))


def cases() -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Name, batch size, and widths of dense layers."""
    yield "784-128-10, 256", 256, (784, 128, 10)
    yield "512-1024-1024-10, 256", 256, (512, 1024, 1024, 10)


def measured(case: tuple[str, int, tuple[int, ...]], quick: bool) -> Iterator[list[str]]:
    """A line for each strategy and number of devices."""
    plan = timing.QUICK if quick else timing.FULL
    calls, sent = {}, {}
    for kind in ("Mirrored", "Sharded"):
        for count in COUNTS if kind == "Mirrored" else COUNTS[1:]:
            calls[f"{kind} {count}"], sent[f"{kind} {count}"] = step_of(case, kind, count)
    times = timing.measure(calls, float, plan)
    one = times["Mirrored 1"].each
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found.each, one, strict=True))
        kind, count = name.split()
        kinds = ", ".join(f"{n} {what}" for what, (n, _) in sorted(sent[name].items()))
        total = sum(size for _, size in sent[name].values()) / 1000
        yield [case[0], kind, count, f"{ratio:.2f}", f"{total:.0f}", kinds or "nothing"]


def step_of(
    case: tuple[str, int, tuple[int, ...]], kind: str, count: int
) -> tuple[timing.Call, dict[str, tuple[int, int]]]:
    """A step that returns its loss, and what its devices send each other."""
    import jax
    import keras
    import numpy as np

    import trainstep as ts

    _, rows, widths = case
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    model = keras.Sequential(
        [keras.layers.Input((widths[0],)), *dense, keras.layers.Dense(widths[-1])]
    )
    strategy = getattr(ts, kind)(range(count))
    trainer = ts.Trainer(model, optimizer="adam", loss="mse", strategy=strategy)
    x = np.random.default_rng(0).normal(size=(rows, widths[0])).astype("float32")
    y = np.zeros((rows, widths[-1]), "float32")
    texts: list[str] = []
    compile_ = jax.stages.Lowered.compile

    def noting(self: jax.stages.Lowered) -> jax.stages.Compiled:
        compiled = compile_(self)
        texts.append(compiled.as_text())
        return compiled

    jax.stages.Lowered.compile = noting
    try:
        trainer.train_on_batch(x, y)
    finally:
        jax.stages.Lowered.compile = compile_
    return lambda: trainer.train_on_batch(x, y)["loss"], collectives(texts[-1])


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """How many collectives of each kind a program has, and the bytes of what they make."""
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


if __name__ == "__main__":
    main()
