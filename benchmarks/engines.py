"""The engines that Keras runs on: choose one here, or run a benchmark on one in a new process."""

import os
import subprocess
import sys

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
