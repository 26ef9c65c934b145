"""What `fit` shows: lines in a log file, a bar on a terminal, and the last retrace."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts


def trainer() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return ts.Trainer(model, "sgd", "mse")


X, Y = np.ones((10, 2), "float32"), np.ones((10, 1), "float32")


def test_a_log_file_gets_a_line_per_epoch_with_the_last_retrace(capsys: Any) -> None:
    trainer().fit(X, Y, batch_size=4, epochs=2)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 1/2  3/3")
    assert "/step" in first
    assert "loss" in first
    assert "x: float32[4,2] -> float32[2,2]" in first  # the short last batch
    assert second.startswith("epoch 2/2")


def test_a_terminal_gets_a_bar(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("trainstep._trainer.progress._INTERVAL", 0.0)
    trainer().fit(X, Y, batch_size=5, epochs=1)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown  # drawn over and over
    assert "2/2" in shown


def test_progress_may_be_off_and_is_checked(capsys: Any) -> None:
    trainer().fit(X, Y, batch_size=5, progress=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(ts.ArgumentError, match="`progress`"):
        trainer().fit(X, Y, progress="loud")
