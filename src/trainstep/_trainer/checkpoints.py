"""`Checkpoints`: saves a run, and resumes it after a stop, a crash or a kill."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from trainstep import _engines
from trainstep._common.errors import CheckpointError
from trainstep._common.version import __version__
from trainstep._data.batch_checks import check_positive
from trainstep._distribution.processes import job
from trainstep._state.optimizer_slots import innermost, known, slots_beyond
from trainstep._trainer import checkpoint_files

# The names are part of the file format.
_ORDER, _START, _RNG_STATE = "data/order", "data/start", "engine/draws"


@dataclass
class Position:
    """The position of a run in its data.

    Attributes:
        epoch: The number of the epoch, from 0.
        step: The number of steps that are done in this epoch.
        total: The number of steps that are done in all epochs.
        order: The state of NumPy's generator at the start of the epoch; it decides the row order.
        start: The state of NumPy's generator at the start of the run.
    """

    epoch: int = 0
    step: int = 0
    total: int = 0
    order: Any = field(default_factory=np.random.get_state)
    start: Any = field(default_factory=np.random.get_state)


class Checkpoints:
    """Saves all state that a training step reads and writes, and the position in the data.

    With `Trainer.fit(..., checkpoints=...)`, a run resumes from the newest checkpoint in the
    directory. On the same engine it ends with the same weights, to the bit, as a run that was never
    stopped. SIGTERM saves a checkpoint and ends the process. In a job of many processes, the first
    one writes.

    Args:
        directory: The directory of the checkpoints.
        every: The number of steps between checkpoints, besides the one at the end of each epoch.
        keep: The number of checkpoints to keep.

    Example:
        >>> import keras, numpy as np, tempfile, trainstep as ts
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> trainer = ts.Trainer(model, optimizer="adam", loss="mse")
        >>> x, y = np.ones((8, 2)), np.ones((8, 1))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     saved = ts.Checkpoints(directory, every=10)
        ...     history = trainer.fit(x, y, epochs=2, checkpoints=saved, progress=False)
        ...     saved.load(trainer).epoch
        2
    """

    def __init__(self, directory: Any, *, every: int | None = None, keep: int = 2) -> None:
        check_positive("Checkpoints", every=every, keep=keep)
        self.directory = Path(directory)
        self._every, self._keep = every, keep
        self._saved = 0  # total steps at the last checkpoint
        self._stop_requested = threading.Event()  # set by SIGTERM

    # By hand ----------------------------------------------------------------------------------

    def save(self, trainer: Any, position: Position | None = None) -> None:
        """Saves the current state of a trainer."""
        position = position or Position(total=int(trainer.optimizer.iterations.value))
        variables = state_of(trainer)
        gather = _engines.current().gather
        arrays = {_name(i, v): gather(v) for i, v in enumerate(variables)}
        self._saved = position.total
        if not job().is_first:
            return
        kind, arrays[_ORDER], *rest = position.order
        start_kind, arrays[_START], *start_rest = position.start
        manifest = {
            "trainstep": __version__,
            "keras": keras.__version__,
            "engine": keras.backend.backend(),
            "epoch": position.epoch,
            "epoch_step": position.step,
            "optimizer": _optimizer_name(trainer),
            "known": known(trainer.optimizer, trainer.model),
            "order": [kind, *rest],
            "start": [start_kind, *start_rest],
        }
        rng_state = _engines.current().rng_state()
        if rng_state is not None:
            arrays[_RNG_STATE] = rng_state
        checkpoint_files.write(self.directory, position.total, arrays, manifest, self._keep)

    def load(self, trainer: Any) -> Position | None:
        """Restores the newest checkpoint; returns its position, or None if there is none.

        The model and the optimizer must be built.
        """
        found = self._newest()
        return None if found is None else self._restore(trainer, *found)

    # Called by `fit` ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Handles SIGTERM inside the block: the next step saves a checkpoint and exits."""
        self._stop_requested.clear()
        self._saved = 0
        if job().is_first:  # fails now if it cannot be made, not after an epoch
            self.directory.mkdir(parents=True, exist_ok=True)
        # Python allows signal handlers in the main thread only.
        engine_handles_it = job().count > 1 and _engines.current().handles_sigterm
        is_main = threading.current_thread() is threading.main_thread()
        handles_sigterm = is_main and not engine_handles_it
        before: Any = None
        if handles_sigterm:
            before = signal.signal(signal.SIGTERM, lambda *_: self._stop_requested.set())
        try:
            yield
        finally:
            if handles_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if self._stop_requested.is_set():  # after the last step; the epoch is saved already
            raise SystemExit(128 + signal.SIGTERM)

    def found(self) -> tuple[Position, Callable[[Any], None]] | None:
        """Returns the position to resume from, and a function that restores a built trainer."""
        found = self._newest()
        if found is None:
            return None
        position = _read_position(*found)
        np.random.set_state(position.order)
        self._saved = position.total

        def restore(trainer: Any) -> None:
            # A layer that is unfrozen in this epoch has slots now, and had none at the last save.
            places = found[0]["known"]
            new = slots_beyond(trainer.optimizer, trainer.model, places)
            self._restore(trainer, *found, without=new)

        return position, restore

    def stepped(self, trainer: Any, position: Position) -> None:
        """Saves after a step if a checkpoint is due; after SIGTERM, also ends the process."""
        asked = self._stop_requested.is_set()
        stops = asked if job().count == 1 else _engines.current().preempted(position.total, asked)
        due = self._every is not None and position.total - self._saved >= self._every
        if stops or due:
            self.save(trainer, position)
        if stops:
            raise SystemExit(128 + signal.SIGTERM)

    def ended(self, trainer: Any, position: Position) -> None:
        """Saves after an epoch."""
        self.save(trainer, position)

    def _newest(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Reads in the first process and broadcasts: the others may not see its directory."""
        found = checkpoint_files.newest(self.directory) if job().is_first else None
        return found if job().count == 1 else _engines.current().broadcast(found)

    def _restore(
        self,
        trainer: Any,
        manifest: dict[str, Any],
        arrays: dict[str, Any],
        without: Sequence[Any] = (),
    ) -> Position:
        left_out = set(map(id, without))
        variables = [v for v in state_of(trainer) if id(v) not in left_out]
        names = [name for name in arrays if name not in (_ORDER, _START, _RNG_STATE)]
        expected = [(_name(i, v), tuple(v.shape)) for i, v in enumerate(variables)]
        found = [(name, arrays[name].shape) for name in sorted(names)]
        if [shape for _, shape in expected] != [shape for _, shape in found]:
            raise _mismatch_error(self.directory, expected, found)
        # Slots of another optimizer may have the same shapes, so its name is compared too.
        optimizer = _optimizer_name(trainer)
        if manifest["optimizer"] != optimizer:
            raise _other_trainer_error(self.directory, optimizer, manifest["optimizer"])
        values = [arrays[name] for name, _ in found]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(keras.ops.convert_to_tensor(value, variable.dtype))
        if _RNG_STATE in arrays and manifest["engine"] == keras.backend.backend():
            _engines.current().set_rng_state(arrays[_RNG_STATE])
        return _read_position(manifest, arrays)


def state_of(trainer: Any) -> list[Any]:
    """Returns the variables of a trainer's state, always in the same order."""
    recipe = trainer._recipe
    metrics = [v for metric in trainer.metrics for v in metric.variables]
    own = [recipe.clip_norm, *keras.tree.flatten(recipe.loss_weights or [])]
    # The train steps also write variables that no object here owns, such as Keras's global seeds.
    others = trainer._functions.written_variables()
    found = [*trainer.model.variables, *recipe.optimizer.variables, *metrics, *own, *others]
    return list({id(v): v for v in found if v is not None}.values())


def _name(place: int, variable: Any) -> str:
    return f"{place:05d} {variable.path}"


def _optimizer_name(trainer: Any) -> str:
    return type(innermost(trainer.optimizer)).__name__


def _read_position(manifest: dict[str, Any], arrays: dict[str, Any]) -> Position:
    (kind, *rest), (start_kind, *start_rest) = manifest["order"], manifest["start"]
    return Position(
        manifest["epoch"],
        manifest["epoch_step"],
        manifest["step"],
        order=(kind, arrays[_ORDER], *rest),
        start=(start_kind, arrays[_START], *start_rest),
    )


def _mismatch_error(directory: Path, expected: list[Any], found: list[Any]) -> CheckpointError:
    pairs = zip([*expected, None], [*found, None], strict=False)
    one, other = next(pair for pair in pairs if (pair[0] or ("", 0))[1] != (pair[1] or ("", 1))[1])
    return _other_trainer_error(directory, _describe(one), _describe(other))


def _other_trainer_error(directory: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint in {str(directory)!r} does not match this trainer.\n"
        f"  expected: {expected}\n"
        f"  got:      {got}\n"
        "  to fix:   use the model, the optimizer and the metrics of the run that saved it, or "
        "choose another directory"
    )


def _describe(variable: tuple[str, tuple[int, ...]] | None) -> str:
    return "no more variables" if variable is None else f"{variable[0]} of shape {variable[1]}"
