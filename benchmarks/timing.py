"""Times several callables side by side on a noisy machine.

The callables run in turn, in short blocks, for many rounds: a disturbance of the machine affects
all of them, and the medians over the rounds remove short disturbances. They do not correct for a
machine that is busy throughout; see `benchmarks.load`.
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

    Long calls have fewer rounds, of one call each: at least `long_rounds`, and more until
    `long_seconds` have passed.
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
    """Times every callable, interleaved; `read` waits for a result and copies it to the host."""
    lengths = {name: block_length(call, read, plan) for name, call in calls.items()}
    times = {name: Times([], []) for name in calls}
    for names in turns(calls, plan.rounds):
        for name in names:
            times[name].each.append(time_each(calls[name], read, lengths[name]))
        for name in names:
            times[name].end.append(time_end(calls[name], read, lengths[name]))
    return times


def medians_of_long(calls: Mapping[str, Call], plan: Plan) -> dict[str, float]:
    """Times long callables that wait for their results, interleaved; returns seconds per call."""
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
    """Yields the order of each round, so that none always follows the same one."""
    order = list(names)
    for _ in range(rounds):
        order.append(order.pop(0))
        yield order


def block_length(call: Call, read: Read, plan: Plan) -> int:
    """Warms a callable up; returns the number of its calls that fill one block."""
    for _ in range(plan.warmup):
        read(call())
    seconds = statistics.median(time_each(call, read, 1) for _ in range(5))
    return max(3, round(plan.block / seconds))


def time_each(call: Call, read: Read, length: int) -> float:
    """Returns the seconds per call when each result is read at once."""
    start = time.perf_counter()
    for _ in range(length):
        read(call())
    return (time.perf_counter() - start) / length


def time_end(call: Call, read: Read, length: int) -> float:
    """Returns the seconds per call when only the last result is read."""
    start = time.perf_counter()
    for _ in range(length - 1):
        call()
    read(call())
    return (time.perf_counter() - start) / length
