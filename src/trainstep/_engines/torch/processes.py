"""PyTorch: starts the runtime of many processes, and sends values between them."""

from __future__ import annotations

import atexit
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainstep._common.errors import StrategyError
from trainstep._engines.shared.messages import decode, encode
from trainstep._engines.torch.collectives import broadcast_bytes, gather_bytes, reduce


def connect(address: str, count: int, index: int, *, timeout: float) -> KeyValues:
    """Starts the runtime. The store of the first process listens on the given address only."""
    host, _, port = address.rpartition(":")
    wait = timedelta(seconds=timeout)
    try:
        server = _listen(host, int(port)) if index == 0 else None
        store = dist.TCPStore(
            host,
            int(port),
            count,
            index == 0,
            wait,
            master_listen_fd=None if server is None else server.detach(),
        )
        dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=wait)
    except (RuntimeError, OSError) as error:
        raise StrategyError(
            f"process {index} of {count} could not join the others.\n"
            f"  expected: process 0 at {address}\n"
            f"  got:      {str(error).splitlines()[0]}\n"
            "  to fix:   check that all processes run, and that the address belongs to the machine "
            "of process 0"
        ) from error
    atexit.register(dist.destroy_process_group)
    return KeyValues(dist.TCPStore(host, int(port), count, False, wait), count)


def _listen(host: str, port: int) -> socket.socket:
    """Binds here: a TCPStore that binds for itself listens on all interfaces."""
    server = socket.create_server((host, port), backlog=2048)
    server.setblocking(False)
    return server


class KeyValues:
    """The strings that the first process stores."""

    def __init__(self, store: Any, count: int) -> None:
        self._store, self._count = store, count

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def all(self, prefix: str) -> dict[str, str]:
        names = [*map(str, range(self._count)), "lost"]
        keys = [f"{prefix}/{name}" for name in names]
        return {key: self._store.get(key).decode() for key in keys if self._store.check([key])}


def broadcast(value: Any) -> Any:
    """Returns the value of the first process, in every process."""
    return decode(broadcast_bytes(encode(value)))


def all_gather(value: Any) -> list[Any]:
    """Returns the values of all processes, in every process."""
    return [decode(message) for message in gather_bytes(encode(value))]


def any_of(asked: bool) -> bool:
    """Returns whether `asked` is true in any process; all get the answer at the same step."""
    if not dist.is_initialized():
        return False
    flag = torch.tensor([int(asked)])
    reduce(flag)
    return bool(flag)
