"""Many processes: who this one is, as its launcher told it, and the start of the engine's runtime.

There is no launcher here. Whatever started the processes (torchrun, SLURM, Kubernetes, a shell) has
set variables that say how many there are, which one this is, and where the first one listens.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from trainstep import _engines
from trainstep._common.errors import ArgumentError, StrategyError
from trainstep._engines.shared.heartbeat import Pulse


@dataclass(frozen=True)
class Processes:
    """The processes of a job.

    Attributes:
        index: The number of this one.
        count: How many there are.
        address: Where the first one listens, as `host:port`; empty if there is one only.
    """

    index: int = 0
    count: int = 1
    address: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that shows progress and writes checkpoints."""
        return self.index == 0


_job = Processes()


def job() -> Processes:
    """The processes that this one is one of."""
    return _job


def initialize(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    heartbeat: float = 10.0,
    timeout: float = 300.0,
) -> Processes:
    """Makes this process one of many, before anything else is done with the engine.

    Without arguments, they are what the launcher has set: torchrun's `RANK`, `WORLD_SIZE`,
    `MASTER_ADDR` and `MASTER_PORT`; `TF_CONFIG`; or SLURM, Open MPI and Kubernetes as JAX detects
    them. If nothing is set, this is the only process, and nothing is started.

    The first process listens on the address that was given, and on no other. TensorFlow's runtime
    binds a port of every process on all interfaces; the kernel lets it hear one address alone.
    A process that is not heard of for `heartbeat` seconds ends the job: every other one says so
    and exits.

    Args:
        address: Where the first process listens, as `host:port`.
        count: How many processes there are.
        index: The number of this one.
        heartbeat: Seconds of silence after which a process is given up.
        timeout: Seconds to wait for the others at the start.

    Returns:
        Who this process is.

    Example:
        >>> import trainstep as ts
        >>> ts.initialize().count
        1
    """
    global _job
    engine = _engines.current()
    given = (address, count, index)
    if None in given and given != (None, None, None):
        raise ArgumentError(
            "initialize",
            "address, count, index",
            "all three, or none of them",
            repr(given),
            "pass all three, or let the launcher set them",
        )
    if address is None or count is None or index is None:
        found = _from_torchrun() or _from_tf_config() or engine.launched()
        address, count, index = found or ("", 1, 0)
    if count == 1:
        return _job
    if _job.count > 1:
        raise StrategyError(
            "this process is one of many already.\n"
            f"  expected: one call of `trainstep.initialize`\n"
            f"  came:     a second one, as process {index} of {count}\n"
            "  to fix:   call it once, at the start of the script"
        )
    if not 0 <= index < count:
        raise ArgumentError(
            "initialize",
            "index",
            f"a number from 0 to {count - 1}",
            repr(index),
            "number the processes from 0",
        )
    store = engine.connect(address, count, index, heartbeat=heartbeat, timeout=timeout)
    _job = Processes(index, count, address)
    Pulse(store, index, count, heartbeat).start()
    return _job


Found = tuple[str, int, int]


def _from_torchrun() -> Found | None:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if not all(name in os.environ for name in names):
        return None
    host, port, count, index = (os.environ[name] for name in names)
    # torchrun's own store has that port, and an attempt that was killed may hold on to the next.
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return f"{host}:{int(port) + 1 + attempt}", int(count), int(index)


def _from_tf_config() -> Found | None:
    if "TF_CONFIG" not in os.environ:
        return None
    config: Any = {}
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        workers, task = config["cluster"]["worker"], config["task"]
        is_worker, index = task["type"] == "worker", int(task["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise _bad_tf_config() from error
    if not is_worker:
        raise _bad_tf_config()
    return str(workers[0]), len(workers), index


def _bad_tf_config() -> StrategyError:
    return StrategyError(
        "`TF_CONFIG` cannot be read.\n"
        '  expected: {"cluster": {"worker": ["host:port", ...]}, '
        '"task": {"type": "worker", "index": 0}}\n'
        f"  came:     {os.environ['TF_CONFIG']}\n"
        "  to fix:   set it so in every process, with the index of each; every process is a worker"
    )
