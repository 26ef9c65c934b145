"""JAX: the runtime of many processes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import clusters, distributed
from jax.experimental import multihost_utils

from trainstep._common.errors import ProcessLostError, StrategyError
from trainstep._engines.shared.heartbeat import note_lost

Found = tuple[str, int, int]
_PATIENCE = 3  # JAX's own heartbeat ends a process without a word: ours comes first


def launched() -> Found | None:
    """What SLURM, Open MPI, Kubernetes or a cloud has set, as JAX detects it."""
    if not any(env.is_env_present() for env in clusters.ClusterEnv._cluster_types):
        return None
    address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, 300
    )
    if address is None or count is None or index is None:
        return None
    return address, count, index


def connect(address: str, count: int, index: int, *, heartbeat: float, timeout: float) -> KeyValues:
    """Starts the runtime; the first process listens on the address itself, not on all."""
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
            f"  expected: to be called before JAX computes, with process 0 at {address}\n"
            f"  came:     {str(error).splitlines()[0]}\n"
            "  to fix:   call `trainstep.initialize` at the start of the script; see that all "
            "processes run, and that the address is one of the first's"
        ) from error
    return KeyValues()


class KeyValues:
    """The strings that JAX's coordinator keeps."""

    def set(self, key: str, value: str) -> None:
        distributed.global_state.client.key_value_set(key, value, allow_overwrite=True)

    def all(self, prefix: str) -> dict[str, str]:
        return dict(distributed.global_state.client.key_value_dir_get(prefix))


def broadcast(value: Any) -> Any:
    """What the first process has, in all of them."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    own = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes())


def gather(value: Any) -> Any:
    """An array that may lie in many processes, in the memory of this one."""
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def with_others(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call in which all processes take part; if one is gone, it fails with that message."""

    def run(*operands: Any) -> Any:
        try:
            return call(*operands)
        except jax.errors.JaxRuntimeError as error:
            note_lost()
            raise ProcessLostError(str(error).splitlines()[0]) from error

    return run
