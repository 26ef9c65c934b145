"""Runs the tests on each engine and prints what passed.

    python -m tests.run [--slow | --slow-third] [--engines jax,torch] [pytest's own arguments]
    python -m tests.run [--interpreter | --core] [--engines jax,torch]

Each engine has a process of its own: Keras fixes its backend when it is imported. The tests of
several devices, and of the engine without tricks and without private names, follow in processes of
their own, too. JAX,
which takes as long as the other two, runs beside them: one process each, so that nothing is
imported and collected twice. More processors share out the tests of a process (`--jobs`).
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

ENGINES = ("jax", "tensorflow", "torch")
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
            f"{self.name:30} {passed:5} passed {failed:4} failed {skipped:4} skipped "
            f"{self.seconds / 60:5.1f} min  {words}"
        )


def run(name: str, arguments: list[str], **environment: str) -> Result:
    """Runs pytest, with its lines behind a name as they come."""
    started, last = time.monotonic(), ""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name}: {line}", end="", flush=True)
        last = line if COUNT.search(line) and " in " in line else last
    code = process.wait()
    counts = {word: int(number) for number, word in COUNT.findall(last)}
    return Result(name, 0 if code == NO_TESTS else code, time.monotonic() - started, counts)


def lane(engines: list[str], selected: str, jobs: int, more: list[str]) -> list[Result]:
    """All runs of some engines, one after the other."""
    return [result for engine in engines for result in runs(engine, selected, jobs, more)]


def runs(engine: str, selected: str, jobs: int, more: list[str]) -> list[Result]:
    """All runs of one engine."""
    chosen = {"KERAS_BACKEND": engine}
    shared = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else ["-p", "no:xdist"]
    shared += more
    found = [run(engine, ["-m", f"({selected}) and not devices", *shared], **chosen)]
    if more:  # files of the caller's choice, and nothing else
        return found
    if engine != "torch":  # which has one device in a process
        devices = ["-m", f"({selected}) and devices", "tests/distribution", *shared]
        found.append(run(f"{engine}, devices", devices, TRAINSTEP_DEVICES="4", **chosen))
    if selected != "slow":
        quick = ["-m", "not slow and not devices", *shared]
        tricks = {"TRAINSTEP_TRICKS": "off", **chosen}
        found.append(run(f"{engine}, without tricks", [*quick, *WITHOUT_TRICKS], **tricks))
        names = {"TRAINSTEP_PRIVATE_NAMES": "off", **chosen}
        public = [*quick, *WITHOUT_PRIVATE_NAMES]
        found.append(run(f"{engine}, without private names", public, **names))
    return found


def main() -> int:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slow", action="store_true", help="the slow tests as well")
    parser.add_argument("--slow-third", action="store_true", help="a third of the slow tests alone")
    parser.add_argument(
        "--interpreter", action="store_true", help="what depends on the interpreter alone"
    )
    parser.add_argument("--core", action="store_true", help="what depends on the engines alone")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas between")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options, more = parser.parse_known_args()
    selected = "slow" if options.slow_third else "slow or not slow" if options.slow else "not slow"
    if options.slow_third:
        os.environ["TRAINSTEP_SLOW_THIRD"] = str(_commit() % 3)
    more += INTERPRETER if options.interpreter else CORE if options.core else ()
    engines = options.engines.split(",")
    lanes = [engines]
    if "jax" in engines and len(engines) > 1 and options.jobs > 1:
        lanes = [["jax"], [engine for engine in engines if engine != "jax"]]
    jobs = -(-options.jobs // len(lanes))
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(lane, each, selected, jobs, more) for each in lanes]
        results = [result for each in started for result in each.result()]
    if options.interpreter:
        plain = ["-m", "plain and not slow", "-p", "no:xdist"]
        results.append(run("without an engine", plain, KERAS_BACKEND=engines[0]))
    print("", *(result.line() for result in results), sep="\n")
    return int(any(result.code for result in results))


def _commit() -> int:
    """A number that changes from commit to commit."""
    asked = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return int(found or "0", 16)


if __name__ == "__main__":
    sys.exit(main())
