"""Time several callables side by side on a noisy machine.

The callables are run in turn, in short blocks, for many rounds: what disturbs the machine for a
while disturbs all of them, and the medians over the rounds set a short disturbance aside. They do
not make up for a machine that is busy throughout; see `benchmarks.load`.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Call = Callable[[], object]
Read = Callable[[Any], object]


@dataclass(frozen=True)
class Plan:
    """How long to measure: warm-up calls, rounds, and the seconds that one block should last.

    Calls that are long by themselves have fewer rounds, one call in each: so many at least, and
    more where so many seconds are not over yet.
    """

    warmup: int
    rounds: int
    block: float
    long_rounds: int
    long_seconds: float


FULL = Plan(warmup=20, rounds=40, block=0.03, long_rounds=15, long_seconds=25.0)
QUICK = Plan(warmup=5, rounds=9, block=0.01, long_rounds=3, long_seconds=0.0)


@dataclass(frozen=True)
class Times:
    """Seconds per call, one for each round: the result read at every call, or only at the end."""

    each: list[float]
    end: list[float]


def measure(calls: Mapping[str, Call], read: Read, plan: Plan) -> dict[str, Times]:
    """Time every callable, interleaved; `read` waits for a result and brings it to the host."""
    lengths = {name: block_length(call, read, plan) for name, call in calls.items()}
    times = {name: Times([], []) for name in calls}
    for names in turns(calls, plan.rounds):
        for name in names:
            times[name].each.append(time_each(calls[name], read, lengths[name]))
        for name in names:
            times[name].end.append(time_end(calls[name], read, lengths[name]))
    return times


def medians_of_long(calls: Mapping[str, Call], plan: Plan) -> dict[str, float]:
    """Time callables that are long and wait for their results, interleaved: seconds per call."""
    start = time.perf_counter()
    for call in calls.values():
        call()
    rounds = max(plan.long_rounds, round(plan.long_seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for names in turns(calls, rounds):
        for name in names:
            times[name].append(time_end(calls[name], lambda _: None, 1))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def turns(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round, such that none always follows the same one."""
    order = list(names)
    for _ in range(rounds):
        order.append(order.pop(0))
        yield order


def block_length(call: Call, read: Read, plan: Plan) -> int:
    """Warm a callable up; give the number of its calls that fill one block."""
    for _ in range(plan.warmup):
        read(call())
    seconds = statistics.median(time_each(call, read, 1) for _ in range(5))
    return max(3, round(plan.block / seconds))


def time_each(call: Call, read: Read, length: int) -> float:
    """Seconds per call when each result is read at once."""
    start = time.perf_counter()
    for _ in range(length):
        read(call())
    return (time.perf_counter() - start) / length


def time_end(call: Call, read: Read, length: int) -> float:
    """Seconds per call when only the last result is read."""
    start = time.perf_counter()
    for _ in range(length - 1):
        call()
    read(call())
    return (time.perf_counter() - start) / length
