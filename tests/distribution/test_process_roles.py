"""Who a process is, and whether the others live, without any other process."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

import trainstep as ts
from trainstep._distribution import processes
from trainstep._engines.shared.heartbeat import Pulse

pytestmark = pytest.mark.plain

NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "TF_CONFIG")


class Engine:
    """Notes what it was told to start."""

    name = "null"

    def __init__(self) -> None:
        self.told: list[Any] = []

    def launched(self) -> Any:
        return None

    def connect(self, *who: Any, **how: Any) -> Any:
        self.told.append((who, how))
        return Memory()


class Memory(dict[str, str]):
    """A store in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def all(self, prefix: str) -> dict[str, str]:
        return {key: value for key, value in self.items() if key.startswith(prefix)}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(processes._engines, "current", lambda: made)
    monkeypatch.setattr(processes, "_job", processes.Processes())
    monkeypatch.setattr(Pulse, "start", lambda self: None)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return made


def test_nothing_set_is_one_process(engine: Engine) -> None:
    assert ts.initialize() == ts.Processes(0, 1, "")
    assert ts.initialize().is_first
    assert engine.told == []


def test_torchrun(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port next to torchrun's own, and another one for each attempt."""
    for name, value in zip(NAMES, ("10.0.0.1", "29500", "8", "3"), strict=False):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    me = ts.initialize(heartbeat=3.0, timeout=60.0)
    assert (me.index, me.count, me.address, me.is_first) == (3, 8, "10.0.0.1:29503", False)
    assert engine.told == [(("10.0.0.1:29503", 8, 3), {"heartbeat": 3.0, "timeout": 60.0})]


def test_tf_config(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert ts.initialize() == ts.Processes(1, 2, "a:1")


@pytest.mark.parametrize(
    "config", ["{", "{}", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}']
)
def test_a_tf_config_that_cannot_be_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ts.StrategyError, match=r"`TF_CONFIG` cannot be read[\s\S]*to fix:"):
        ts.initialize()


def test_by_hand(engine: Engine) -> None:
    assert ts.initialize("a:1", 2, 1).index == 1
    with pytest.raises(ts.StrategyError, match=r"already a member of a job[\s\S]*call it once"):
        ts.initialize("a:1", 2, 1)


def test_wrong_arguments(engine: Engine) -> None:
    with pytest.raises(ts.ArgumentError, match=r"`address, count, index`[\s\S]*all three, or none"):
        ts.initialize("a:1")
    with pytest.raises(ts.ArgumentError, match=r"argument `index`[\s\S]*from 0 to 1"):
        ts.initialize("a:1", 2, 2)


class Group:
    """Pulses of several processes in one, which end by saying so."""

    def __init__(self, count: int) -> None:
        self.store = Memory()
        self.ended: dict[int, str] = {}
        self.all_ended = threading.Event()
        self.pulses = [
            Pulse(self.store, index, count, 0.4, lambda text, i=index: self._end(i, text))  # type: ignore[misc]
            for index in range(count)
        ]

    def _end(self, index: int, text: str) -> None:
        self.ended[index] = text
        self.pulses[index].stop()
        if len(self.ended) == len(self.pulses) - 1:
            self.all_ended.set()


def test_a_silent_process_ends_all_others() -> None:
    """The first notices, and tells the rest."""
    group = Group(3)
    for pulse in group.pulses[:2]:
        pulse.start()
    assert group.all_ended.wait(20)
    assert sorted(group.ended) == [0, 1]
    for text in group.ended.values():
        assert "process 2 of 3 sent no heartbeat for 0.4 s" in text
        assert "newest checkpoint" in text


def test_a_silent_first_process_ends_all_others() -> None:
    group = Group(3)
    for pulse in group.pulses[1:]:
        pulse.start()
    assert group.all_ended.wait(20)
    assert all("process 0 of 3" in text for text in group.ended.values())


def test_a_store_that_does_not_answer_is_the_first_process() -> None:
    ended: list[str] = []
    asked = threading.Event()

    class Silent(Memory):
        def set(self, key: str, value: str) -> None:
            asked.wait(20)

    pulse = Pulse(Silent(), 1, 2, 0.4, ended.append)
    pulse.start()
    limit = time.monotonic() + 20
    while not ended and time.monotonic() < limit:
        time.sleep(0.05)
    pulse._stopped.set()
    asked.set()
    assert len(ended) == 1
    assert "process 0 of 2" in ended[0]


def test_a_process_that_is_done_is_not_missed() -> None:
    group = Group(2)
    for pulse in group.pulses:
        pulse.start()
    group.pulses[1].stop()
    time.sleep(1.5)
    group.pulses[0].stop()
    assert group.ended == {}
