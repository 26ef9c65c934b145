"""PyTorch: sums, gathers and broadcasts between the processes of a job.

Bytes are sent as tensors: torch's collectives of objects use pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainstep._common.errors import ProcessLostError
from trainstep._engines.contract import Tensor
from trainstep._engines.shared.heartbeat import note_lost


def sum_all(parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the sums of tensors over all processes, with one message for each dtype."""
    found: list[Any] = [None] * len(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        places = [place for place, part in enumerate(parts) if part.dtype == dtype]
        flat = torch.cat([parts[place].reshape(-1) for place in places])
        reduce(flat)
        pieces = flat.split([parts[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            # Memory of its own: an optimizer may update it in place.
            found[place] = piece.clone().reshape(parts[place].shape)
    return found


def gather(part: Tensor, axis: int, start: int, size: int) -> Tensor:
    """Returns the full tensor, of which each process has a part along an axis."""
    shape = list(part.shape)
    shape[axis] = size
    is_bool = part.dtype == torch.bool
    full = torch.zeros(shape, dtype=torch.uint8 if is_bool else part.dtype)
    full.narrow(axis, start, part.shape[axis]).copy_(part)
    reduce(full)
    return full.bool() if is_bool else full


def reduce(tensor: Tensor) -> None:
    """Adds a tensor up over all processes, in place."""
    _run(dist.all_reduce, tensor)


def broadcast_bytes(data: bytes) -> bytes:
    """Returns the bytes of the first process, in every process."""
    size = torch.tensor([len(data)])
    _run(dist.broadcast, size, 0)
    own = _as_tensor(data) if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    _run(dist.broadcast, own, 0)
    return _as_bytes(own)


def gather_bytes(data: bytes) -> list[bytes]:
    """Returns the bytes of each process, in every process."""
    count = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    _run(dist.all_gather, sizes, torch.tensor([len(data)]))
    longest = max(map(int, sizes))  # a collective takes tensors of one size
    padded = _as_tensor(data.ljust(longest, b"\0"))
    every = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    _run(dist.all_gather, every, padded)
    return [_as_bytes(each[: int(n)]) for each, n in zip(every, sizes, strict=True)]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.numpy())


def _run(collective: Callable[..., Any], *arguments: Any) -> None:
    try:
        collective(*arguments)
    except RuntimeError as error:
        note_lost()
        raise ProcessLostError(str(error).splitlines()[0]) from error
