"""The examples run, and do what they say."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import trainstep as ts

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_are_learned_in_two_traces(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy, trainer = load("digits").main()

    assert accuracy > 0.94
    assert [event.function for event in trainer.ledger] == ["digits.train", "digits.test"]
    printed = capsys.readouterr().out
    assert "val_accuracy" in printed
    assert "ledger of" in printed


def test_five_lines_train(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = load("five_lines").main()

    assert before > 0.9
    assert after < 0.65
    assert "mean squared error" in capsys.readouterr().out


@pytest.mark.slow
def test_an_accelerated_script_gives_the_weights_of_keras(
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_weight, by_loss = load("accelerate_script").main()

    assert by_weight < 2e-5
    assert by_loss < 2e-5
    assert "largest difference" in capsys.readouterr().out


@pytest.mark.slow
def test_gan_approaches_its_data_in_one_trace(capsys: pytest.CaptureFixture[str]) -> None:
    real, made, traces = load("gan").main()

    assert abs(made.mean() - real.mean()) < 0.5
    assert abs(made.std() - real.std()) < 0.4
    assert 0.25 < np.mean(made < 0.5) < 0.75  # both of the Gaussians
    assert traces == 1
    assert "the data's mean" in capsys.readouterr().out


@pytest.mark.parametrize("trained", ["generator", "discriminator"])
def test_each_update_of_the_gan_changes_its_own_network_and_no_other(trained: str) -> None:
    example = load("gan")
    numbers = np.random.default_rng(0)
    real, noise = example.data(numbers, 8), example.noise(numbers, 8)
    gan = example.make()
    networks = {"generator": gan.generator, "discriminator": gan.discriminator}
    before = {name: network.get_weights() for name, network in networks.items()}
    update = getattr(gan, f"train_{trained}")

    ts.function(update)(*((noise,) if trained == "generator" else (real, noise)))

    for name, network in networks.items():
        pairs = zip(before[name], network.get_weights(), strict=True)
        assert all((old != new).any() == (name == trained) for old, new in pairs), name


def test_dqn_walks_out_of_the_corridor(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("dqn")

    before, after, traces = example.main()

    shortest = 1.0 - example.COST * (example.CELLS - 1)
    assert before < 0
    assert after == pytest.approx(shortest)
    assert traces == {"values": 1, "update": 1, "sync": 1}
    assert "return before" in capsys.readouterr().out


def test_the_layer_where_a_bad_batch_goes_wrong_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = load("bad_batch")

    trainer, found, bad = example.main()

    assert bad == [example.BAD_ROW // example.BATCH]
    assert "layer 'log'" in found.first_bad
    assert "1 NaN" in found.first_bad
    assert all(np.isfinite(weight).all() for weight in trainer.model.get_weights())
    assert "the first number that is not finite" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_no_example_imports_an_engine(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]

    assert not {name.split(".")[0] for name in names} & {"jax", "tensorflow", "torch"}


def test_the_graph_trains_and_draws_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy, longest = load("session").main(tmp_path / "step.svg")

    assert accuracy > 0.94
    assert longest > 0.5  # so that something was clipped
    printed = capsys.readouterr().out
    assert "sets weights, bias" in printed
    assert "run(train, loss, " in printed
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
