"""Runs processes in a network namespace of their own, which has the loopback device only.

    python namespace.py '{"script": ..., "count": 2, ...}'

TensorFlow, Ray and torchrun listen on all interfaces; in here, no other machine can reach them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import re
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
_ADOPT = 36
PORT = 29500


def enter() -> bool:
    """Moves this process into such a network; returns False where that is not allowed."""
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
            `ray`: whether the script starts the others itself, by Ray; `kill`: `rank`, `signal`,
            and after how many lines of its progress, or once how many steps are saved.
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
    elif "ray" in plan:
        processes = [_started(command, dict(os.environ), directory / "out")]
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
        if len(processes) > 1 and plan.get("kill", {}).get("rank") == rank:
            continue
        codes.append(_code(process, plan.get("timeout", 240)))
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


def _code(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """How a process has ended; None for one that did not, and was ended here."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def _started(command: list[str], env: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def _victim(directory: Path, kill: dict[str, Any], processes: list[Any]) -> int | None:
    """The id of the process to end, once it has come far enough."""
    find = _by_ray if "saved" in kill else _by_progress
    limit = time.monotonic() + 200
    while time.monotonic() < limit and processes[0].poll() is None:
        if find(directory, kill) is not None:
            time.sleep(random.random() * kill.get("within", 0.0))
            return find(directory, kill)
        time.sleep(0.05)
    return None


def _by_progress(directory: Path, kill: dict[str, Any]) -> int | None:
    progress = directory / f"progress.{kill['rank']}"
    lines = progress.read_text().splitlines() if progress.exists() else []
    return int(lines[-1].split()[0]) if len(lines) >= kill["after"] else None


def _by_ray(directory: Path, kill: dict[str, Any]) -> int | None:
    """Of a worker that Ray has named."""
    steps = [int(re.split("[-.]", path.name)[1]) for path in directory.glob("step-*")]
    if max(steps, default=0) < kill["saved"]:
        return None
    text = (directory / "out").read_text(errors="replace")
    found = re.findall(rf"pid=(\d+)\) world_rank={kill['rank']}\b", text)
    return int(found[-1]) if found else None


def adopt() -> None:
    """Makes this process the parent of what its children leave behind."""
    ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)


def left(patience: float = 20.0) -> list[str]:
    """What is still running after a while; it is ended."""
    limit = time.monotonic() + patience
    names = []
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there are none
            return names
        if not ended and time.monotonic() > limit:
            for child in _children():
                names.append(Path(f"/proc/{child}/comm").read_text().strip())
                os.kill(child, signal.SIGKILL)  # its own children are ours then
        if not ended:
            time.sleep(0.1)


def _children() -> list[int]:
    """Ids of those that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    if not enter():
        print(json.dumps({"refused": "no network namespace may be made here"}))
    else:
        adopt()
        try:
            found = run(plan)
        finally:
            remains = left()
        print(json.dumps({**found, "left": remains}))
