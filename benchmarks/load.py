"""How busy other processes keep the machine during a measurement.

No statistic undoes a busy machine: threads that wait for each other stall when one of them loses
its core, so steps that use several threads suffer more than those that use one, and ratios turn
over. It is better seen than guessed, so every row says it.
"""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


class Watch:
    """Started when made; tells the share of the machine that others have used since."""

    def __init__(self) -> None:
        self.start = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        """Seconds of all the cores in use by others, and on the clock."""
        if not STAT.exists():
            return float("nan"), time.perf_counter()
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return busy - mine, time.perf_counter()

    def others(self) -> float:
        """The share of all the cores, from 0 to 1; not a number where the system does not tell."""
        (busy, clock), (busy_before, clock_before) = self.now(), self.start
        share = (busy - busy_before) / ((clock - clock_before) * (os.cpu_count() or 1))
        return max(share, 0.0)  # the system counts in coarse ticks
