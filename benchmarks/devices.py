"""The cost of running a step on several devices, at equal total work.

`python -m benchmarks.devices [--engine jax|tensorflow|torch] [--quick]`

The devices are parts of one processor; on torch, which has one device per process, they are
processes on it, in a network of their own. This measures the cost of splitting, feeding and
summing, not the gain from real devices, which have arithmetic units and connections of their own.
With more devices than cores, devices also wait for a free core. The step of one device waits for
each result, because the step of several devices on a processor has to.

On JAX, the bytes are those that the devices send each other in a step, read from the compiled text.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import engines, table, timing

COUNTS = (1, 2, 4, 8)
ROUNDS = 3  # repetitions of each number of processes
Case = tuple[str, int, tuple[int, ...]]
# Name, batch size, widths of dense layers.
CASES: list[Case] = [
    ("784-128-10, 256", 256, (784, 128, 10)),
    ("512-1024-1024-10, 256", 256, (512, 1024, 1024, 10)),
]


def run_here(engine: str, quick: bool) -> None:
    """Measures the strategies of an engine and prints a table."""
    lines = list(of_processes(quick) if engine == "torch" else of_devices(engine, quick))
    headers = ["network, batch", "strategy", "devices", "step / one device", "KB sent", "by"]
    what = "processes" if engine == "torch" else "parts"
    title = f"{engines.ENGINES[engine]}: a step over {what} of one processor, by that of one"
    table.console().print(table.Table(headers, lines).rich(title))


def of_devices(engine: str, quick: bool) -> Iterator[list[str]]:
    """Yields a line for each network, strategy and number of devices, all in this process."""
    if engine == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", max(COUNTS))
    else:
        import tensorflow as tf

        (processor,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * max(COUNTS)
        tf.config.set_logical_device_configuration(processor, parts)
    from benchmarks import collectives  # imports Keras

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
    """Returns a compiled step that returns its loss, on so many devices or on all."""
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
    """Yields the same for processes: each number of them in turn, several times."""
    counts = COUNTS[:3] if quick else COUNTS
    rounds = [{count: job(count, quick) for count in counts} for _ in range(1 if quick else ROUNDS)]
    for place, case in enumerate(CASES):
        for count in counts:
            ratio = statistics.median(each[count][place] / each[1][place] for each in rounds)
            yield [case[0], "Mirrored", str(count), f"{ratio:.2f}", "-", "-"]


def job(count: int, quick: bool) -> list[float]:
    """Returns the seconds of a step of each network, run by so many processes."""
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
    """Runs; torch's processes run in a network namespace with a loopback device only."""
    if "torch" in sys.argv:
        from tests.distribution.namespace import enter

        if not enter():
            print("torch: no network namespace may be made here, so nothing is measured")
            return
    engines.main("devices", __doc__, run_here)


if __name__ == "__main__":
    main()
