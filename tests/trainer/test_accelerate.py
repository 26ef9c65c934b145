"""`accelerate`, `restore` and the command line: a Keras model's own methods through trainstep."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import trainstep as ts

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 40)
METHODS = ("train_on_batch", "test_on_batch", "predict_on_batch", "fit", "evaluate", "predict")


def compiled(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def story(model: Any) -> list[Any]:
    """What every method returns, one after the other."""
    history = model.fit(
        X, Y, 8, epochs=2, verbose=0, shuffle=False, validation_split=0.2, class_weight={0: 2.0}
    )
    return [
        {name: history.history[name] for name in sorted(history.history)},
        model.train_on_batch(X[:8], Y[:8]),
        model.train_on_batch(X[:8], Y[:8], return_dict=True),
        model.test_on_batch(X[:8], Y[:8]),
        model.evaluate(X, Y, verbose=0),
        model.evaluate(X, Y, verbose=0, return_dict=True),
        model.predict(X, verbose=0),
        model.predict_on_batch(X[:3]),
    ]


@pytest.mark.slow
def test_every_method_returns_what_keras_returns() -> None:
    expected, found = story(compiled()), story(ts.accelerate(compiled()))
    for a, b in zip(expected, found, strict=True):
        assert type(a) is type(b)
        if isinstance(a, dict):
            assert set(a) == set(b)
            a, b = [a[k] for k in sorted(a)], [b[k] for k in sorted(b)]
        # The same operations in other programs: a few roundings of float32.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_may_be_compiled_afterwards_and_again() -> None:
    model = ts.accelerate(compiled())
    model.fit(X, Y, verbose=0)
    model.compile("sgd", "mse", metrics=["mae"])
    one_hot = np.eye(3, dtype="float32")[Y]
    history = model.fit(X, one_hot, verbose=0)
    assert list(history.history) == ["loss", "mae"]
    assert len(model.train_on_batch(X[:8], one_hot[:8])) == 2


def test_restore_gives_the_methods_of_keras_back() -> None:
    model = compiled()
    ts.accelerate(ts.accelerate(model))
    assert all(name in vars(model) for name in METHODS)
    ts.restore(model)
    assert not any(name in vars(model) for name in METHODS)
    assert ts.restore(model) is model  # and once more does no harm
    model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_an_accelerated_model_is_saved_and_copied_as_ever(tmp_path: Path) -> None:
    model = ts.accelerate(compiled())
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    # Two compilers of one softmax: a rounding or two.
    got, wanted = model.predict(X, verbose=0), loaded.predict(X, verbose=0)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)
    assert copy.deepcopy(model).count_params() == model.count_params()


def test_a_model_with_its_own_step_is_left_to_keras() -> None:
    class Own(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            return super().train_step(*args)

    model = Own([keras.layers.Dense(1)])
    with pytest.warns(UserWarning, match="not accelerated.*train_step"):
        ts.accelerate(model)
    assert not any(name in vars(model) for name in METHODS)


def test_a_model_that_runs_eagerly_stays_with_keras() -> None:
    seen: list[Any] = []

    class Eager(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            seen.append(x)
            return self.dense(x)

    model = ts.accelerate(Eager())
    model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(3):
        model.train_on_batch(X[:4], np.ones((4, 1)))
    assert len(seen) >= 3


SCRIPT = """
import sys
import keras, numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(np.ones((16, 4)), np.ones((16, 1)), epochs=2, verbose=0, shuffle=False)
print("accelerated" if "fit" in vars(model) else "plain", sys.argv[1:], __name__)
print(f"{history.history['loss'][-1]:.6f}")
"""


@pytest.mark.slow
def test_the_command_line_accelerates_every_model_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend()}

    def run(*command: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        return done.stdout.splitlines()

    plain = run(str(script), "a", "--b")
    ours = run("-m", "trainstep", "run", "--ledger", str(script), "a", "--b")
    assert plain[0] == "plain ['a', '--b'] __main__"
    assert ours[0] == "accelerated ['a', '--b'] __main__"
    assert ours[1] == plain[1]
    assert any("sequential.train" in line for line in ours[2:])


def test_the_command_line_names_a_missing_file(capsys: Any) -> None:
    from trainstep.__main__ import main

    with pytest.raises(SystemExit):
        main(["run", "no_such_file.py"])
    assert "there is no file no_such_file.py" in capsys.readouterr().err
