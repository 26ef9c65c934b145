"""What spreading a step over several devices costs, at equal total work.

`python -m benchmarks.devices [--engine jax|tensorflow|torch] [--quick]`

The devices are parts of one processor; on torch, which has one device in a process, they are
processes on it, in a network of their own. What is seen is the cost of cutting, feeding and
summing, and not what real devices would gain: they have arithmetic units of their own, and wires
between them. With more devices than cores, each also waits for the others to be run. The step of
one device waits for each result, as that of several has to on a processor.

On JAX, the bytes are read from the compiled program: of all that devices send each other in a step.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import engines, table, timing

COUNTS = (1, 2, 4, 8)
ROUNDS = 3  # of processes
Case = tuple[str, int, tuple[int, ...]]
# Name, batch size, and widths of dense layers.
CASES: list[Case] = [
    ("784-128-10, 256", 256, (784, 128, 10)),
    ("512-1024-1024-10, 256", 256, (512, 1024, 1024, 10)),
]


def run_here(engine: str, quick: bool) -> None:
    """Measure the ways to spread that an engine has, and print a table."""
    lines = list(of_processes(quick) if engine == "torch" else of_devices(engine, quick))
    headers = ["network, batch", "strategy", "devices", "step / one device", "KB sent", "by"]
    what = "processes" if engine == "torch" else "parts"
    title = f"{engines.ENGINES[engine]}: a step over {what} of one processor, by that of one"
    table.console().print(table.Table(headers, lines).rich(title))


def of_devices(engine: str, quick: bool) -> Iterator[list[str]]:
    """A line for each network, strategy and number of devices, all in this process."""
    if engine == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", max(COUNTS))
    else:
        import tensorflow as tf

        (processor,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * max(COUNTS)
        tf.config.set_logical_device_configuration(processor, parts)
    from benchmarks import collectives  # which imports Keras

    plan = timing.QUICK if quick else timing.FULL
    for case in CASES:
        names = [("Mirrored", count) for count in COUNTS]
        names += [("Sharded", count) for count in COUNTS[1:] if engine == "jax"]
        calls, sent = {}, {}
        for kind, count in names:
            with collectives.noted() as found:
                calls[f"{kind} {count}"] = step_of(case, kind, count)
            sent[f"{kind} {count}"] = found
        times = timing.measure(calls, float, plan)
        one = times["Mirrored 1"].each
        for name, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found.each, one, strict=True))
            yield [case[0], *name.split(), f"{ratio:.2f}", *collectives.told(sent[name])]


def step_of(case: Case, kind: str, count: int | None) -> timing.Call:
    """A step that returns its loss, compiled; over so many devices, or all that there are."""
    import keras
    import numpy as np

    import trainstep as ts

    _, rows, widths = case
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    model = keras.Sequential(
        [keras.layers.Input((widths[0],)), *dense, keras.layers.Dense(widths[-1])]
    )
    strategy = getattr(ts, kind)(None if count is None else range(count))
    trainer = ts.Trainer(model, optimizer="adam", loss="mse", strategy=strategy)
    x = np.random.default_rng(0).normal(size=(rows, widths[0])).astype("float32")
    y = np.zeros((rows, widths[-1]), "float32")
    trainer.train_on_batch(x, y)
    return lambda: trainer.train_on_batch(x, y)["loss"]


def of_processes(quick: bool) -> Iterator[list[str]]:
    """The same with processes: those of each number in turn, several times."""
    counts = COUNTS[:3] if quick else COUNTS
    rounds = [{count: job(count, quick) for count in counts} for _ in range(1 if quick else ROUNDS)]
    for place, case in enumerate(CASES):
        for count in counts:
            ratio = statistics.median(each[count][place] / each[1][place] for each in rounds)
            yield [case[0], "Mirrored", str(count), f"{ratio:.2f}", "-", "-"]


def job(count: int, quick: bool) -> list[float]:
    """Seconds of a step of each network, by so many processes."""
    from tests.distribution.namespace import PORT

    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(count),
        "BENCHMARK_CALLS": "20" if quick else "60",
    }
    command = [sys.executable, "-m", "benchmarks.devices_process"]
    processes = [
        subprocess.Popen(command, env={**base, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(count)
    ]
    texts = [process.communicate(timeout=600)[0].decode() for process in processes]
    return [float(number) for number in texts[0].split()]


def main() -> None:
    """Run; torch's processes go into a network that has nothing but a loopback device."""
    if "torch" in sys.argv:
        from tests.distribution.namespace import enter

        if not enter():
            print("torch: no network namespace may be made here, so nothing is measured")
            return
    engines.main("devices", __doc__, run_here)


if __name__ == "__main__":
    main()
