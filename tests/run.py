"""Runs the tests on each engine and prints what passed.

    python -m tests.run [--slow | --slow-part] [--engines jax,torch] [pytest's own arguments]
    python -m tests.run [--interpreter | --core] [--engines jax,torch]

Each engine has a process of its own: Keras fixes its backend when it is imported. The tests of
several devices, and of the engine without tricks and without private names, have processes of their
own, too. As many processes run at a time as there are processors; more processors than runs share
out the tests of a run (`--jobs`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ENGINES = ("jax", "torch", "tensorflow")  # the one that takes longest first
# The engines must give the same numbers without private names (dynamic sizes need some of them),
WITHOUT_PRIVATE_NAMES = (
    "tests/function/test_parity.py",
    "tests/function/test_safety.py",
    "tests/function/test_aliasing.py",
    "tests/trainer/test_threads.py",
)
# and without tricks.
WITHOUT_TRICKS = (*WITHOUT_PRIVATE_NAMES, "tests/function/sizes/test_policy.py")
# What depends on the interpreter: its instructions, reference counts, frames and hooks.
INTERPRETER = (
    "tests/common",
    "tests/doctor",
    "tests/engines",
    "tests/explain",
    "tests/function/inside/test_host_calls.py",
    "tests/function/test_aliasing.py",
    "tests/function/test_memory.py",
    "tests/function/test_safety.py",
    "tests/surroundings",
    "tests/trainer/test_threads.py",
)
# What a new version of an engine may break.
CORE = (
    "tests/engines",
    "tests/function",
    "tests/state",
    "tests/surroundings",
    "tests/trainer/test_parity.py",
    "tests/trainer/test_fit.py",
)
COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")
NO_TESTS = 5  # pytest's exit code
SLOW_PARTS = 6  # as in conftest.py, which imports Keras


@dataclass
class Run:
    """A run of pytest, in a process of its own."""

    name: str
    arguments: list[str]
    environment: dict[str, str]


@dataclass
class Result:
    """The outcome of one run of pytest."""

    name: str
    code: int
    seconds: float
    counts: dict[str, int]

    def line(self) -> str:
        """One row of the summary."""
        failed = self.counts.get("failed", 0) + self.counts.get("error", 0)
        words = "ok" if not self.code else f"exit code {self.code}"
        passed, skipped = self.counts.get("passed", 0), self.counts.get("skipped", 0)
        return (
            f"{self.name:34} {passed:5} passed {failed:4} failed {skipped:4} skipped "
            f"{self.seconds / 60:5.1f} min  {words}"
        )


def run(what: Run, jobs: int) -> Result:
    """Runs pytest, with its lines behind a name as they come."""
    started, last = time.monotonic(), ""
    shared = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else ["-p", "no:xdist"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *shared, *what.arguments],
        env={**os.environ, **what.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{what.name}: {line}", end="", flush=True)
        last = line if COUNT.search(line) and " in " in line else last
    code = process.wait()
    counts = {word: int(number) for number, word in COUNT.findall(last)}
    return Result(what.name, 0 if code == NO_TESTS else code, time.monotonic() - started, counts)


def others(engine: str, selected: str) -> list[Run]:
    """The runs of one engine beside that of most of its tests."""
    found, chosen = [], {"KERAS_BACKEND": engine}
    if engine != "torch":  # which has one device in a process
        devices = ["-m", f"({selected}) and devices", "tests/distribution"]
        found.append(Run(f"{engine}, devices", devices, {**chosen, "TRAINSTEP_DEVICES": "4"}))
    if selected != "slow":
        quick = ["-m", "not slow and not devices"]
        tricks = {**chosen, "TRAINSTEP_TRICKS": "off"}
        names = {**chosen, "TRAINSTEP_PRIVATE_NAMES": "off"}
        found.append(Run(f"{engine}, without tricks", [*quick, *WITHOUT_TRICKS], tricks))
        public = [*quick, *WITHOUT_PRIVATE_NAMES]
        found.append(Run(f"{engine}, without private names", public, names))
    return found


def main() -> int:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slow", action="store_true", help="the slow tests as well")
    parser.add_argument("--slow-part", action="store_true", help="a sixth of the slow tests alone")
    parser.add_argument(
        "--interpreter", action="store_true", help="what depends on the interpreter alone"
    )
    parser.add_argument("--core", action="store_true", help="what depends on the engines alone")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas between")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options, more = parser.parse_known_args()
    selected = "slow" if options.slow_part else "slow or not slow" if options.slow else "not slow"
    if options.slow_part:
        os.environ["TRAINSTEP_SLOW_PART"] = str(_commit() % SLOW_PARTS)
    more += INTERPRETER if options.interpreter else CORE if options.core else ()
    engines = options.engines.split(",")
    quick = f"({selected}) and not devices"
    runs = [Run(e, ["-m", quick, *more], {"KERAS_BACKEND": e}) for e in engines]
    if options.interpreter:
        plain = ["-m", "plain and not slow"]
        runs.append(Run("without an engine", plain, {"KERAS_BACKEND": engines[0]}))
    if not more:  # files of the caller's choice, and nothing else
        runs += [each for engine in engines for each in others(engine, selected)]
    with ThreadPoolExecutor(options.jobs) as pool:  # the longest come first
        results = list(pool.map(lambda each: run(each, options.jobs // len(runs)), runs))
    print("", *(result.line() for result in results), sep="\n")
    return int(any(result.code for result in results))


def _commit() -> int:
    """A number that changes from commit to commit."""
    asked = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return int(found or "0", 16)


if __name__ == "__main__":
    sys.exit(main())
