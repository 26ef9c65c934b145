"""PyTorch: what the processes of a step send each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainstep._common.errors import ProcessLostError
from trainstep._engines.contract import Tensor
from trainstep._engines.shared.heartbeat import note_lost


def sum_all(parts: Sequence[Tensor]) -> list[Tensor]:
    """The sums of tensors over all processes, one message for each dtype."""
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
    """The whole of a tensor, of which each process has a part along an axis."""
    shape = list(part.shape)
    shape[axis] = size
    is_bool = part.dtype == torch.bool
    full = torch.zeros(shape, dtype=torch.uint8 if is_bool else part.dtype)
    full.narrow(axis, start, part.shape[axis]).copy_(part)
    reduce(full)
    return full.bool() if is_bool else full


def reduce(tensor: Tensor) -> None:
    """Adds a tensor up over all processes, in place."""
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        note_lost()
        raise ProcessLostError(str(error).splitlines()[0]) from error
