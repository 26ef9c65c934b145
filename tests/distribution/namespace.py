"""Runs processes in a network of their own, in which there is nothing but the loopback device.

    python namespace.py '{"script": ..., "count": 2, ...}'

Tools listen on all interfaces even when told otherwise; here, that is nobody else's business.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 1
PORT = 29500


def enter() -> bool:
    """Moves this process into such a network; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_NET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", _UP, b"")
        fcntl.ioctl(any_socket, _SET_FLAGS, request)
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Runs a script in several processes; ends or freezes one of them if asked to.

    Args:
        plan: `script` and `args`; `count` of processes; `torchrun`: restarts, if it starts them;
            `kill`: `rank`, `signal`, and after how many lines of its progress, or at random.
    """
    directory = Path(plan["directory"])
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    command = [sys.executable, plan["script"], str(directory), *plan.get("args", [])]
    if "torchrun" in plan:
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"),
            *("--nproc-per-node", str(plan["count"]), "--master-port", str(PORT)),
            *("--max-restarts", str(plan["torchrun"]), "--monitor-interval", "0.5"),
        ]
        processes = [_started([*torchrun, *command[1:]], dict(os.environ), directory / "out")]
    else:
        processes = [
            _started(
                command,
                {**base, "WORLD_SIZE": str(plan["count"]), "RANK": str(rank)},
                directory / f"out.{rank}",
            )
            for rank in range(plan["count"])
        ]
    killed, moment = None, 0.0
    if "kill" in plan:
        killed = _victim(directory, plan["kill"], processes)
        moment = time.monotonic()
        if killed is not None:
            os.kill(killed, plan["kill"]["signal"])
    codes, seconds = [], []
    for rank, process in enumerate(processes):
        if "torchrun" not in plan and plan.get("kill", {}).get("rank") == rank:
            continue
        codes.append(process.wait(plan.get("timeout", 240)))
        seconds.append(time.monotonic() - moment)
    if killed is not None and plan["kill"]["signal"] == signal.SIGSTOP:
        try:
            os.kill(killed, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for process in processes:
        process.wait(60)
    text = {p.name: p.read_text(errors="replace") for p in sorted(directory.glob("out*"))}
    return {"codes": codes, "seconds": seconds, "text": text, "killed": killed}


def _started(command: list[str], env: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def _victim(directory: Path, kill: dict[str, Any], processes: list[Any]) -> int | None:
    """The id of the process to end, once it has come far enough."""
    progress = directory / f"progress.{kill['rank']}"
    limit = time.monotonic() + 200
    while time.monotonic() < limit and processes[0].poll() is None:
        lines = progress.read_text().splitlines() if progress.exists() else []
        if len(lines) >= kill["after"]:
            time.sleep(random.random() * kill.get("within", 0.0))
            return int(progress.read_text().splitlines()[-1].split()[0])
        time.sleep(0.05)
    return None


if __name__ == "__main__":
    if not enter():
        print(json.dumps({"refused": "no network namespace may be made here"}))
    else:
        print(json.dumps(run(json.loads(sys.argv[1]))))
