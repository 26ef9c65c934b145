"""The engines that Keras runs on: choose one here, or run a benchmark on one in a new process."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

# By the name that Keras gives them: the name that people do.
ENGINES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}


def choose(engine: str) -> None:
    """Choose the engine of this process. Keras must not have been imported yet."""
    os.environ["KERAS_BACKEND"] = engine
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if engine == "torch":
        # A second thread gains these networks less than a tenth, and stalls on a busy machine.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def run_on(engine: str, benchmark: str, *options: str) -> None:
    """Run `python -m benchmarks.BENCHMARK --engine ENGINE OPTIONS` and wait for it."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--engine", engine, *options]
    subprocess.run(command, check=True)


def main(benchmark: str, doc: str | None, run_here: Callable[[str, bool], None]) -> None:
    """Read the command line of a benchmark that has no more options than these, and run it.

    `run_here` takes the engine, and whether to be quick.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    if options.engine:
        choose(options.engine)
        run_here(options.engine, options.quick)
    else:
        for engine in ENGINES:
            run_on(engine, benchmark, *["--quick"] * options.quick)
