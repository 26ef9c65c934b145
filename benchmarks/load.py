"""The load of other processes during a measurement.

No statistic corrects for a busy machine: threads that wait for each other stall when one of them
loses its core, so steps that use several threads slow down more than steps that use one, and ratios
can invert. Every row of a table therefore shows the load.
"""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


class Watch:
    """Measures the share of the machine that other processes use, from its creation on."""

    def __init__(self) -> None:
        self.start = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        """Returns the seconds that others have used, of all cores, and the seconds on the clock."""
        if not STAT.exists():
            return float("nan"), time.perf_counter()
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return busy - mine, time.perf_counter()

    def others(self) -> float:
        """Returns the share of all cores, 0 to 1; NaN if the system does not report it."""
        (busy, clock), (busy_before, clock_before) = self.now(), self.start
        share = (busy - busy_before) / ((clock - clock_before) * (os.cpu_count() or 1))
        return max(share, 0.0)  # the system counts in coarse ticks
