"""Checks which addresses of the machine a process of a job listens on: `listening.py DIRECTORY`.

The loopback device has many addresses: the job is given 127.0.0.1, and 127.0.0.2 stands for the
address of another network.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import keras
import numpy as np

import trainstep as ts

LISTEN = "0A"


def listening_ports() -> set[int]:
    """Returns the ports that this process listens on."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor of the listing itself
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and f"socket:[{rest[5]}]" in own:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    me = ts.initialize(heartbeat=60)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    trainer = ts.Trainer(model, optimizer="sgd", loss="mse", strategy=ts.Mirrored())
    x, y = np.ones((8, 3)), np.ones((8, 1))
    trainer.fit(x, y, batch_size=4, progress=False)  # the collectives have connected
    ports = listening_ports()
    if keras.backend.backend() == "tensorflow":
        ports &= {int(me.address.rpartition(":")[2])}
    reached = sum(answers("127.0.0.1", port) for port in ports)
    for port in ports:
        assert not answers("127.0.0.2", port), port
        assert not answers("::1", port), port
    trainer.fit(x, y, batch_size=4, progress=False)  # the connections above did no harm
    Path(sys.argv[1], f"ports.{me.index}").write_text(str(reached))


if __name__ == "__main__":
    main()
