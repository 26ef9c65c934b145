"""Progress display: a bar in a terminal or notebook, a line per epoch in a log file.

The bar is redrawn at most ten times a second, and values are read from the device only then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainstep._common.errors import ArgumentError

_INTERVAL = 0.1  # seconds between two redraws


class Progress:
    """The interface of a progress display; this one shows nothing.

    Attributes:
        shows_steps: Whether the loop must call `step`.
        model: The model.
    """

    shows_steps = False

    def __init__(self, model: Any) -> None:
        self.model = model

    def start_epoch(self, epoch: int, steps: int | None) -> None:
        """Starts the display of an epoch."""

    def step(self, step: int, logs: Callable[[], dict[str, Any]]) -> None:
        """Reports the number of steps that are done in this epoch."""

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Ends the display of an epoch with its values."""

    def note(self, text: str) -> None:
        """Prints a remark for the user."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None: ...


class Bar(Progress):
    """Shows a bar, or a line per epoch where there is no terminal.

    Args:
        model: The model.
        epochs: The total number of epochs; 1 for an evaluation.
        retraces: Returns the number of retraces so far and the reason of the last one.
        lines: Whether to print lines even on a terminal.
    """

    shows_steps = True

    def __init__(
        self,
        model: Any,
        epochs: int,
        retraces: Callable[[], tuple[int, str]],
        *,
        lines: bool = False,
    ) -> None:
        from rich.console import Console  # imported late: a run without a display does not need it

        super().__init__(model)
        self._console = Console()
        self._has_bar = (self._console.is_terminal or self._console.is_jupyter) and not lines
        self._epochs = epochs
        self._retraces = retraces
        self._before = retraces()[0]
        self._bar: Any = None
        self._next = 0.0

    def start_epoch(self, epoch: int, steps: int | None) -> None:
        self._epoch, self._steps = epoch + 1, steps
        self._started, self._done = time.perf_counter(), 0
        self._next = self._started + _INTERVAL
        if self._has_bar:
            self._open()

    def _open(self) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            transient=True,
            auto_refresh=False,
        )
        self._bar.start()
        name = f"{self._epoch}/{self._epochs}"
        self._task = self._bar.add_task("", total=self._steps, epoch=name, state="")

    def step(self, step: int, logs: Callable[[], dict[str, Any]]) -> None:
        self._done = step
        now = time.perf_counter()
        if now < self._next:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, state=self._state(logs()))
            self._bar.refresh()
        self._next = time.perf_counter() + _INTERVAL

    def _state(self, logs: dict[str, Any]) -> str:
        elapsed = time.perf_counter() - self._started
        parts = [
            f"{self._done}/{self._steps or '?'}",
            _format_duration(elapsed / max(self._done, 1)),
        ]
        parts += [f"{name} {_format_number(value)}" for name, value in logs.items()]
        count, reason = self._retraces()
        return "  ".join([*parts, reason] if count > self._before else parts)

    def end_epoch(self, logs: dict[str, Any]) -> None:
        self._close()
        text = f"epoch {self._epoch}/{self._epochs}  {self._state(logs)}"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._close()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *exception: object) -> None:
        self._close()


def make_progress(
    progress: bool | str, model: Any, epochs: int, retraces: Callable[[], tuple[int, str]]
) -> Progress:
    """Returns the display that the user chose."""
    if progress not in (True, False, "lines"):
        raise ArgumentError(
            "Trainer", "progress", "True, False or 'lines'", repr(progress), "pass one of them"
        )
    if not progress:
        return Progress(model)
    return Bar(model, epochs, retraces, lines=progress == "lines")


def _format_number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value).replace("\n", "")
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"


def _format_duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}/step"
    return f"{seconds * 1e6:.0f} us/step"
