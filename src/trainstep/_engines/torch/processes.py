"""PyTorch: the runtime of many processes."""

from __future__ import annotations

import atexit
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainstep._common.errors import StrategyError
from trainstep._engines.torch.collectives import reduce


def connect(address: str, count: int, index: int, *, timeout: float) -> KeyValues:
    """Starts the runtime; the first process listens on the address itself, not on all."""
    host, _, port = address.rpartition(":")
    wait = timedelta(seconds=timeout)
    try:
        listens = _listening(host, int(port)) if index == 0 else None
        store = dist.TCPStore(
            host,
            int(port),
            count,
            index == 0,
            wait,
            master_listen_fd=None if listens is None else listens.detach(),
        )
        dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=wait)
    except (RuntimeError, OSError) as error:
        raise StrategyError(
            f"process {index} of {count} could not join the others.\n"
            f"  expected: process 0 at {address}\n"
            f"  came:     {str(error).splitlines()[0]}\n"
            "  to fix:   see that all processes run, and that the address is one of the first's"
        ) from error
    atexit.register(dist.destroy_process_group)
    return KeyValues(dist.TCPStore(host, int(port), count, False, wait), count)


def _listening(host: str, port: int) -> socket.socket:
    made = socket.create_server((host, port), backlog=2048)
    made.setblocking(False)
    return made


class KeyValues:
    """The strings that the first process keeps."""

    def __init__(self, store: Any, count: int) -> None:
        self._store, self._count = store, count

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def all(self, prefix: str) -> dict[str, str]:
        names = [*map(str, range(self._count)), "lost"]
        keys = [f"{prefix}/{name}" for name in names]
        return {key: self._store.get(key).decode() for key in keys if self._store.check([key])}


def broadcast(value: Any) -> Any:
    """What the first process has, in all of them."""
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def any_of(asked: bool) -> bool:
    """Whether any process says so; all of them hear it at the same step."""
    if not dist.is_initialized():
        return False
    flag = torch.tensor([int(asked)])
    reduce(flag)
    return bool(flag)
