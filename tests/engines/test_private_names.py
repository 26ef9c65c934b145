"""Private names of Keras and the engines: looked up in one place each, and not needed if missing."""

from __future__ import annotations

import ast
import importlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import trainstep as ts
from trainstep._common.private_names import VARIABLE, consequences, find, need

SOURCE = Path(ts.__file__).parent
ENGINE = keras.backend.backend()
PRIVATE = re.compile(r"(jax|torch)\._[a-zA-Z]|jaxlib\.|keras\.src|tensorflow\.python")
TRAINING = """
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stdout)
import keras, numpy as np, trainstep as ts

rng = np.random.default_rng(0)
x, y = rng.normal(size=(20, 8, 3)).astype("float32"), rng.normal(size=(20, 1)).astype("float32")

def built():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Conv1D(4, 3, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )

trainer, reference = ts.Trainer(built(), optimizer="sgd", loss="mse"), built()
reference.compile(optimizer="sgd", loss="mse")
for rows in (20, 20, 7, 12, 7, 3):
    got = float(trainer.train_on_batch(x[:rows], y[:rows])["loss"])
    np.testing.assert_allclose(got, reference.train_on_batch(x[:rows], y[:rows]), rtol=1e-4)
for got, wanted in zip(trainer.model.get_weights(), reference.get_weights(), strict=True):
    # Six steps in float32, whose sums over rows may be in another order.
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
print("trained as Keras does")
"""


def names() -> list[str]:
    """The private names that the engine of this process can do without."""
    private = importlib.import_module(f"trainstep._engines.{ENGINE}.private")
    if ENGINE == "torch":  # looks some of them up when they are first needed
        private.symbols()
    return sorted(name for name in consequences if name.startswith(f"{ENGINE}."))


def trained_without(hidden: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", TRAINING],
        env={**os.environ, VARIABLE: hidden},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "trained as Keras does" in found.stdout
    return found.stdout


def test_a_step_trains_without_any_of_them() -> None:
    assert len(names()) > 3

    text = trained_without("off")

    assert any(f"has no `{name}`: {consequences[name]}" in text for name in names())


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_step_trains_without_one_of_them(name: str) -> None:
    trained_without(name)


def test_the_documentation_lists_them() -> None:
    text = (SOURCE.parents[1] / "docs" / "versions.md").read_text()

    listed = [f"| `{name}` | {consequences[name]} |" for name in names()]

    assert [line for line in listed if line not in text] == []


@pytest.mark.plain
def test_they_are_imported_in_one_file_for_each_library_and_in_tricks() -> None:
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                modules = [ast.unparse(node)]
            else:
                continue
            if any(map(PRIVATE.match, modules)):
                found.add(file.relative_to(SOURCE).as_posix())

    # Doctor's hooks wait for the script to import a library, and each looks for what it replaces.
    assert not [name for name in found if "/tricks/" not in name and "_doctor/" not in name]


@pytest.mark.plain
def test_what_is_missing_is_none_and_the_log_says_what_follows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with caplog.at_level(logging.INFO, "trainstep"):
        assert find("json", "dumps", "decoder.JSONDecoder", without="nothing") is not None
        assert not caplog.messages

        assert find("json", "dumps", "nowhere", without="texts are plain") is None
        assert find("json.nowhere", without="there are no texts") is None

    assert caplog.messages == [
        "json has no `json.nowhere`: texts are plain",
        "json has no `json.nowhere`: there are no texts",
    ]


@pytest.mark.plain
def test_what_is_hidden_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "json.loads, json.dumps")
    assert find("json", "dumps", without="") is None
    assert find("json", "dump", without="") is not None
    monkeypatch.setenv(VARIABLE, "off")
    assert find("json", "dump", without="") is None


@pytest.mark.plain
@pytest.mark.parametrize(
    "part", ["keras.src.nowhere.gone", f"keras {keras.__version__}", "to fix:"]
)
def test_a_name_that_is_needed_is_named_with_the_version(part: str) -> None:
    with pytest.raises(ImportError, match=part):
        need("keras.src.nowhere", "gone")
