"""`Checkpoints`: a run that goes on where it was, after a stop, a crash or a kill."""

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

_ORDER, _START, _DRAWS = "data/order", "data/start", "engine/draws"


@dataclass
class Position:
    """Where a run is in its data: so many steps of an epoch are done.

    Attributes:
        epoch: The number of the epoch.
        step: The steps of it that are done.
        total: The steps of all epochs.
        order: The state of NumPy's generator when the epoch began, which orders its rows.
        start: The same when the run began.
    """

    epoch: int = 0
    step: int = 0
    total: int = 0
    order: Any = field(default_factory=np.random.get_state)
    start: Any = field(default_factory=np.random.get_state)


class Checkpoints:
    """Saves all that a training step reads and changes, and where the data was.

    Given to `Trainer.fit`, a run that finds a checkpoint in the directory goes on from it, and ends
    with the same weights, to the bit, as one that was never stopped, on the same engine. SIGTERM
    saves one more, and ends the process. Of many processes, the first writes.

    Args:
        directory: Where checkpoints are.
        every: Save after every so many steps; by default at the end of each epoch only.
        keep: How many are kept.

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
        self._saved = 0  # steps at the last one
        self._asked = threading.Event()  # to save and to stop

    # By hand ----------------------------------------------------------------------------------

    def save(self, trainer: Any, position: Position | None = None) -> None:
        """Saves the state of a trainer as it is now."""
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
            "optimizer": _kind(trainer),
            "known": known(trainer.optimizer, trainer.model),
            "order": [kind, *rest],
            "start": [start_kind, *start_rest],
        }
        draws = _engines.current().draws()
        if draws is not None:
            arrays[_DRAWS] = draws
        checkpoint_files.write(self.directory, position.total, arrays, manifest, self._keep)

    def load(self, trainer: Any) -> Position | None:
        """Gives a trainer the state of the newest checkpoint; None if there is none.

        The model and the optimizer have to be built.
        """
        found = self._newest()
        return None if found is None else self._restore(trainer, *found)

    # In a run ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A block in which SIGTERM asks for a checkpoint."""
        self._asked.clear()
        self._saved = 0
        if job().is_first:  # a place that cannot be written to is better known before the training
            self.directory.mkdir(parents=True, exist_ok=True)
        engine_hears = job().count > 1 and _engines.current().hears_signals
        here = threading.current_thread() is threading.main_thread() and not engine_hears
        before: Any = None
        if here:
            before = signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        try:
            yield
        finally:
            if here:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if self._asked.is_set():  # after the last step; the end of the epoch was saved
            raise SystemExit(128 + signal.SIGTERM)

    def found(self) -> tuple[Position, Callable[[Any], None]] | None:
        """Where to go on, and what gives a trainer its state once it is built."""
        found = self._newest()
        if found is None:
            return None
        position = _position(*found)
        np.random.set_state(position.order)
        self._saved = position.total

        def restore(trainer: Any) -> None:
            # A layer that is thawed in this epoch has slots, and had none at the end of the last.
            places = found[0]["known"]
            new = slots_beyond(trainer.optimizer, trainer.model, places)
            self._restore(trainer, *found, without=new)

        return position, restore

    def stepped(self, trainer: Any, position: Position) -> None:
        """After a step: saves if it is time, and ends the process if that was asked for."""
        asked = self._asked.is_set()
        stops = asked if job().count == 1 else _engines.current().preempted(position.total, asked)
        due = self._every is not None and position.total - self._saved >= self._every
        if stops or due:
            self.save(trainer, position)
        if stops:
            raise SystemExit(128 + signal.SIGTERM)

    def ended(self, trainer: Any, position: Position) -> None:
        """After an epoch."""
        self.save(trainer, position)

    def _newest(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What the first process finds: its directory need not be the others'."""
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
        names = [name for name in arrays if name not in (_ORDER, _START, _DRAWS)]
        expected = [(_name(i, v), tuple(v.shape)) for i, v in enumerate(variables)]
        found = [(name, arrays[name].shape) for name in sorted(names)]
        if [shape for _, shape in expected] != [shape for _, shape in found]:
            raise _differs(self.directory, expected, found)
        if manifest["optimizer"] != _kind(trainer):  # their slots may have the same shapes
            raise _not_of(self.directory, _kind(trainer), manifest["optimizer"])
        values = [arrays[name] for name, _ in found]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(keras.ops.convert_to_tensor(value, variable.dtype))
        if _DRAWS in arrays and manifest["engine"] == keras.backend.backend():
            _engines.current().set_draws(arrays[_DRAWS])
        return _position(manifest, arrays)


def state_of(trainer: Any) -> list[Any]:
    """The variables that make up the state of a trainer, in an order that does not change."""
    recipe = trainer._recipe
    metrics = [v for metric in trainer.metrics for v in metric.variables]
    own = [recipe.clip_norm, *keras.tree.flatten(recipe.loss_weights or [])]
    others = trainer._functions.written()  # seeds of Keras's own, variables of a loss
    found = [*trainer.model.variables, *recipe.optimizer.variables, *metrics, *own, *others]
    return list({id(v): v for v in found if v is not None}.values())


def _name(place: int, variable: Any) -> str:
    return f"{place:05d} {variable.path}"


def _kind(trainer: Any) -> str:
    return type(innermost(trainer.optimizer)).__name__


def _position(manifest: dict[str, Any], arrays: dict[str, Any]) -> Position:
    (kind, *rest), (start_kind, *start_rest) = manifest["order"], manifest["start"]
    return Position(
        manifest["epoch"],
        manifest["epoch_step"],
        manifest["step"],
        order=(kind, arrays[_ORDER], *rest),
        start=(start_kind, arrays[_START], *start_rest),
    )


def _differs(directory: Path, expected: list[Any], found: list[Any]) -> CheckpointError:
    pairs = zip([*expected, None], [*found, None], strict=False)
    one, other = next(pair for pair in pairs if (pair[0] or ("", 0))[1] != (pair[1] or ("", 1))[1])
    return _not_of(directory, _told(one), _told(other))


def _not_of(directory: Path, expected: str, came: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint in {str(directory)!r} is not of this trainer.\n"
        f"  expected: {expected}\n"
        f"  came:     {came}\n"
        "  to fix:   make the model, the optimizer and the metrics as they were when it was saved, "
        "or choose another directory"
    )


def _told(variable: tuple[str, tuple[int, ...]] | None) -> str:
    return "no more variables" if variable is None else f"{variable[0]} of shape {variable[1]}"
