"""TensorFlow's part in a job of many processes, as far as one process shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainstep as ts
from trainstep._engines.shared import authkey
from trainstep._engines.tensorflow import processes


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_on_a_network_without_a_key_is_refused_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(authkey.KEY, raising=False)
    monkeypatch.delenv(authkey.FILE, raising=False)
    with pytest.raises(ts.StrategyError, match=r"192\.0\.2\.1 needs a key[\s\S]*to fix:"):
        ts.initialize("192.0.2.1:29500", 2, index)
    assert processes._servers == []
    assert list(tmp_path.iterdir()) == []
