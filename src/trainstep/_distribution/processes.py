"""`initialize`: makes this process a member of a job, and starts the engine's runtime for it.

trainstep has no launcher of its own. The program that started the processes (torchrun, SLURM,
Kubernetes, a shell) sets environment variables: the number of processes, the index of this one, and
the address on which the first one listens.
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
        index: The number of this process, from 0.
        count: The number of processes.
        address: The address on which the first one listens, as `host:port`; empty if this is the
            only process.
    """

    index: int = 0
    count: int = 1
    address: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that shows progress and writes checkpoints."""
        return self.index == 0


_job = Processes()


def job() -> Processes:
    """Returns the job that this process is a member of."""
    return _job


def initialize(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    heartbeat: float = 10.0,
    timeout: float = 300.0,
) -> Processes:
    """Makes this process a member of a job. Call it before any other use of the engine.

    Without arguments, the settings of the launcher apply: torchrun's `RANK`, `WORLD_SIZE`,
    `MASTER_ADDR` and `MASTER_PORT`; `TF_CONFIG`; or SLURM, Open MPI and Kubernetes as JAX detects
    them. Without any of these, this is the only process, and nothing is started.

    The first process listens on the given address and on no other. TensorFlow's runtime binds a
    port on all interfaces in every process; the kernel accepts packets for one address only.
    If a process sends no heartbeat for `heartbeat` seconds, every other process reports it and
    exits.

    Args:
        address: The address on which the first process listens, as `host:port`.
        count: The number of processes.
        index: The number of this process, from 0.
        heartbeat: Seconds without a heartbeat after which a process counts as lost.
        timeout: Seconds to wait for the other processes at the start.

    Returns:
        The place of this process in its job.

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
        launch = _from_torchrun() or _from_tf_config() or engine.launched()
        address, count, index = launch or ("", 1, 0)
    if count == 1:
        return _job
    if _job.count > 1:
        raise StrategyError(
            "this process is already a member of a job.\n"
            f"  expected: one call of `trainstep.initialize`\n"
            f"  got:      a second call, as process {index} of {count}\n"
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


_Launch = tuple[str, int, int]  # address, count, index


def _from_torchrun() -> _Launch | None:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if not all(name in os.environ for name in names):
        return None
    host, port, count, index = (os.environ[name] for name in names)
    # torchrun's own store listens on MASTER_PORT, and a killed attempt may still hold the port that
    # it used, so each attempt takes the next one.
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return f"{host}:{int(port) + 1 + attempt}", int(count), int(index)


def _from_tf_config() -> _Launch | None:
    if "TF_CONFIG" not in os.environ:
        return None
    config: Any = {}
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        workers, task = config["cluster"]["worker"], config["task"]
        is_worker, index = task["type"] == "worker", int(task["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise _tf_config_error() from error
    if not is_worker:  # there is no chief, evaluator or parameter server
        raise _tf_config_error()
    return str(workers[0]), len(workers), index


def _tf_config_error() -> StrategyError:
    return StrategyError(
        "`TF_CONFIG` cannot be read.\n"
        '  expected: {"cluster": {"worker": ["host:port", ...]}, '
        '"task": {"type": "worker", "index": 0}}\n'
        f"  got:      {os.environ['TF_CONFIG']}\n"
        "  to fix:   set it like this in every process, with the index of that process; every "
        "process is a worker"
    )
