"""The engines that Keras runs on: chooses one here, or runs a benchmark in a new process."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

# Keras's name of each engine: its usual name.
ENGINES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}


def choose(engine: str) -> None:
    """Chooses the engine of this process. Keras must not have been imported yet."""
    os.environ["KERAS_BACKEND"] = engine
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if engine == "torch":
        # A second thread speeds these networks up by less than 10 %, and stalls on a busy machine.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def run_on(engine: str, benchmark: str, *options: str) -> None:
    """Runs `python -m benchmarks.BENCHMARK --engine ENGINE OPTIONS` and waits for it."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--engine", engine, *options]
    subprocess.run(command, check=True)


def main(benchmark: str, doc: str | None, run_here: Callable[[str, bool], None]) -> None:
    """Reads the command line of a benchmark that has only these options, and runs it.

    `run_here` gets the engine, and whether the run is a quick one.
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
