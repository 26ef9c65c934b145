"""`TRAINSTEP_TRICKS`: which tricks are on, and that every switchboard asks for what is listed."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import trainstep as ts
from trainstep._engines.shared.switches import TRICKS, VARIABLE, is_on

ENGINES = Path(ts.__file__).parent / "_engines"


@pytest.mark.plain
def test_all_tricks_are_on_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    assert all(is_on(name) for names in TRICKS.values() for name in names)


@pytest.mark.plain
def test_off_turns_all_of_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")

    assert not any(is_on(name) for names in TRICKS.values() for name in names)


@pytest.mark.plain
def test_a_list_of_names_leaves_those_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rewrites, packed_variables")

    assert not is_on("rewrites")
    assert not is_on("packed_variables")
    assert is_on("donation")


@pytest.mark.plain
@pytest.mark.parametrize("part", [VARIABLE, "speed", "packed_variables", "to fix:"])
def test_a_name_that_no_trick_has_is_an_error(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "speed")

    with pytest.raises(ts.ArgumentError, match=part):
        is_on("rewrites")


@pytest.mark.plain
@pytest.mark.parametrize("engine", TRICKS)
def test_a_switchboard_asks_for_the_tricks_of_its_engine(engine: str) -> None:
    source = (ENGINES / engine / "tricks" / "__init__.py").read_text()

    assert set(re.findall(r'is_on\("(\w+)"', source)) == set(TRICKS[engine])


def test_a_step_trains_alike_with_and_without_tricks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 6, 6, 3)).astype("float32")
    y = rng.normal(size=(16, 1)).astype("float32")

    def trained() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.layers.Input((6, 6, 3)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.MaxPooling2D(2),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        trainer = ts.Trainer(model, optimizer="adam", loss="mse", metrics=["mae"])
        trainer.fit(x, y, batch_size=4, epochs=2, shuffle=False, progress=False)
        return model.get_weights()

    fast = trained()
    monkeypatch.setenv(VARIABLE, "off")
    for got, expected in zip(fast, trained(), strict=True):
        # Eight steps of Adam, whose sums are in another order without the rewritten pooling.
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
