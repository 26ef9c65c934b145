"""Jobs of many processes: reads the role of this process and starts the engine's runtime.

trainstep has no launcher. The launcher (torchrun, SLURM, Kubernetes, a shell) sets environment
variables: the number of processes, the index of this one, and the address of the first.
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
        index: The index of this process.
        count: The number of processes.
        address: The address that the first process listens on, as `host:port`; empty if there is
            one process.
    """

    index: int = 0
    count: int = 1
    address: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this process shows progress and writes checkpoints."""
        return self.index == 0


_job = Processes()


def job() -> Processes:
    """Returns the job that this process belongs to."""
    return _job


def initialize(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    heartbeat: float = 10.0,
    timeout: float = 300.0,
) -> Processes:
    """Makes this process part of a job of many processes.

    Call it before the engine computes anything. Without arguments, it reads what the launcher has
    set: torchrun's `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; `TF_CONFIG`; or the
    variables of SLURM, Open MPI and Kubernetes as JAX detects them. If nothing is set, this is the
    only process, and nothing is started.

    The first process listens on the given address and on no other. **The ports of a job need a
    private network or a firewall:** the runtimes of JAX, TensorFlow and torch authenticate nobody
    and encrypt nothing, and TensorFlow's gRPC server listens on all interfaces of every machine.
    trainstep's own store, which TensorFlow needs, is protected by a key: `TRAINSTEP_AUTHKEY`, or
    the content of the file `TRAINSTEP_AUTHKEY_FILE` (mode 600). On a loopback address neither is
    needed.

    If a process sends no heartbeat for `heartbeat` seconds, every other process exits with a
    message.

    Args:
        address: The address that the first process listens on, as `host:port`.
        count: The number of processes.
        index: The index of this process.
        heartbeat: Seconds without a heartbeat after which a process counts as lost.
        timeout: Seconds to wait for the others at the start.

    Returns:
        The job, with the index of this process.

    Raises:
        ArgumentError: Some of `address`, `count` and `index` are missing, or `index` is too large.
        StrategyError: The processes do not find each other, `initialize` was called before, or, on
            TensorFlow, the address is not a loopback one and there is no key.

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
    # torchrun's own store uses MASTER_PORT, and a killed attempt may still occupy the next port.
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
        "  to fix:   set it like this in every process, each with its own index; all are workers"
    )
