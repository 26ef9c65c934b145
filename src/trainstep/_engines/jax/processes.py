"""JAX: starts the runtime of many processes, and sends values between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from trainstep._common.errors import ProcessLostError, StrategyError
from trainstep._engines.jax.private import clusters, distributed
from trainstep._engines.shared.heartbeat import note_lost
from trainstep._engines.shared.messages import decode, encode

Found = tuple[str, int, int]
_PATIENCE = 3  # JAX's own heartbeat ends a process without a message, so ours has to be faster
_DIGIT = 2**30  # sizes are sent as two digits: JAX cuts an int64 down to 32 bits


def launched() -> Found | None:
    """Returns the address, count and index set by SLURM, Open MPI, Kubernetes or a cloud."""
    cluster = None if clusters is None else clusters.ClusterEnv
    if cluster is None or not any(env.is_env_present() for env in cluster._cluster_types):
        return None
    address, count, index, _ = cluster.auto_detect_unset_distributed_params(
        None, None, None, None, None, 300
    )
    if address is None or count is None or index is None:
        return None
    return address, count, index


def connect(address: str, count: int, index: int, *, heartbeat: float, timeout: float) -> KeyValues:
    """Starts the runtime. Its coordinator listens on the given address only."""
    if distributed is None:
        raise StrategyError(
            f"JAX {jax.__version__} has no `jax._src.distributed.global_state`, by which the "
            "processes of a job exchange values.\n"
            "  to fix:   install a version of JAX that trainstep was tested with (see README.md)"
        )
    try:
        jax.distributed.initialize(
            address,
            num_processes=count,
            process_id=index,
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(timeout),
            heartbeat_timeout_seconds=math.ceil(_PATIENCE * heartbeat),
            shutdown_timeout_seconds=math.ceil(_PATIENCE * heartbeat),
        )
    except RuntimeError as error:
        raise StrategyError(
            f"process {index} of {count} could not join the others.\n"
            f"  expected: a call before JAX computes anything, and process 0 at {address}\n"
            f"  got:      {str(error).splitlines()[0]}\n"
            "  to fix:   call `trainstep.initialize` at the start of the script; check that all "
            "processes run, and that the address belongs to the machine of process 0"
        ) from error
    return KeyValues()


class KeyValues:
    """The strings that JAX's coordinator stores."""

    def set(self, key: str, value: str) -> None:
        distributed.global_state.client.key_value_set(key, value, allow_overwrite=True)

    def all(self, prefix: str) -> dict[str, str]:
        return dict(distributed.global_state.client.key_value_dir_get(prefix))


def broadcast(value: Any) -> Any:
    """Returns the value of the first process, in every process."""
    data = np.frombuffer(encode(value), np.uint8)
    digits = np.array(divmod(len(data), _DIGIT), np.int32)
    high, low = map(int, multihost_utils.broadcast_one_to_all(digits))
    own = data if jax.process_index() == 0 else np.zeros(high * _DIGIT + low, np.uint8)
    return decode(np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes())


def gather(value: Any) -> Any:
    """Returns an array, which may be sharded over processes, as a NumPy array."""
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def with_others(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a call of all processes: if it fails, it raises a ProcessLostError."""

    def run(*operands: Any) -> Any:
        try:
            return call(*operands)
        except jax.errors.JaxRuntimeError as error:
            note_lost()
            raise ProcessLostError(str(error).splitlines()[0]) from error

    return run
