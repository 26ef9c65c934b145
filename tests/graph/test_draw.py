"""`draw`: the text and the picture of what a set of fetches would compute, and of no more."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, values_of
from trainstep import graph

pytestmark = pytest.mark.plain


class Program:
    """A model whose every part has a name that stands in no other's."""

    def __init__(self) -> None:
        self.x = graph.placeholder("float32", [None, 3], name="rows")
        self.y = graph.placeholder("float32", [None, 2], name="targets")
        self.hidden = layers.Dense(4, activation="tanh", name="hidden_layer")(self.x)
        self.scale = graph.Variable(2.0, name="scale_of_all")
        self.out = layers.Dense(2, name="output_layer")(self.hidden) * self.scale
        self.loss = graph.identity(ops.mean(ops.square(self.out - self.y)), name="error")
        self.train = graph.train.minimize(keras.optimizers.Adam(), self.loss, name="training")
        self.aside = layers.Dense(1, name="aside_layer")(self.x)


FORWARD = ["rows", "hidden_layer", "scale_of_all", "output_layer"]


def assert_shows(text: str, shown: list[str], hidden: list[str]) -> None:
    for name in shown:
        assert name in text, f"{name!r} is not in:\n{text}"
    for name in hidden:
        assert name not in text, f"{name!r} is in:\n{text}"


def test_a_prediction_shows_no_label_and_no_training() -> None:
    p = Program()

    assert_shows(graph.draw(p.out), FORWARD, ["targets", "error", "training", "aside_layer"])


def test_an_intermediate_shows_what_it_is_made_from_alone() -> None:
    p = Program()

    text = graph.draw(p.hidden)

    assert_shows(text, ["rows", "hidden_layer"], ["output_layer", "scale_of_all", "targets"])


def test_a_loss_shows_the_label_and_no_training() -> None:
    p = Program()

    assert_shows(graph.draw(p.loss), [*FORWARD, "targets", "error"], ["training", "aside_layer"])


def test_a_training_operation_shows_all_that_it_needs() -> None:
    p = Program()

    assert_shows(graph.draw([p.train, p.loss]), [*FORWARD, "targets", "training"], ["aside_layer"])
    assert "radient" in graph.draw(p.train)  # that there is a backward pass
    assert "radient" not in graph.draw(p.loss)


def test_shapes_and_dtypes_are_shown() -> None:
    x = graph.placeholder("int32", [None, 7], name="words")

    text = graph.draw(x)

    assert "int32" in text
    assert "7" in text


def test_names_and_structures_are_drawn_as_they_are_fetched() -> None:
    p = Program()

    text = graph.draw({"a": ["error", (p.aside,)]})

    assert_shows(text, [*FORWARD, "targets", "error", "aside_layer"], ["training"])


def test_assignments_and_their_order_are_drawn() -> None:
    v, w = graph.Variable(1.0, name="first_one"), graph.Variable(1.0, name="second_one")
    with graph.control_dependencies([graph.assign(v, 2.0, name="earlier")]):
        later = graph.assign(w, 3.0, name="later")

    assert_shows(graph.draw(later), ["earlier", "later", "first_one", "second_one"], [])


def test_the_parts_of_a_trainer_are_drawn() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="only_layer")])
    parts = graph.of(ts.Trainer(model, "sgd", "mse"))

    assert_shows(graph.draw(parts.outputs), [parts.x.name.split(":")[0]], [])
    assert graph.draw(parts.train)


def test_drawing_computes_and_changes_nothing() -> None:
    p = Program()
    state = [v.variable for v in graph.global_variables()]
    before = values_of(state)
    events = len(ts.ledger())

    assert graph.draw([p.train, p.out]) == graph.draw([p.train, p.out])

    assert len(ts.ledger()) == events
    assert_same(state, before, rtol=0, atol=0)


# The picture


def picture(path: Any, fetches: Any) -> tuple[ElementTree.Element, str]:
    """Draws, reads the file again, and gives its root and all of its text."""
    said = graph.draw(fetches, file=path)
    assert said == graph.draw(fetches)
    root = ElementTree.fromstring(Path(path).read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return root, " ".join(t for t in root.itertext() if t.strip())


@pytest.mark.parametrize("kind", [str, Path])
def test_a_picture_is_well_formed_and_shows_what_the_text_does(tmp_path: Path, kind: Any) -> None:
    p = Program()

    root, said = picture(kind(tmp_path / "out.svg"), p.out)

    assert_shows(said, FORWARD, ["targets", "error", "training", "aside_layer"])
    size = root.get("viewBox") or f"{root.get('width')} {root.get('height')}"
    assert all(float(n) >= 0 for n in re.findall(r"[-\d.]+", size)), size
    _, said = picture(kind(tmp_path / "all.svg"), [p.train, p.loss])
    assert_shows(said, [*FORWARD, "targets", "training"], ["aside_layer"])


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "a<b>&\"c'"
    x = graph.placeholder("float32", [], name=name)
    out = graph.identity(x * 2.0, name="]]><script>")

    _, said = picture(tmp_path / "names.svg", out)

    assert x.name.split(":")[0] in said
    assert "<script>" in said
    assert "<script>" not in (tmp_path / "names.svg").read_text(encoding="utf-8")
    assert name in graph.draw(out)


def test_names_of_other_alphabets_are_kept(tmp_path: Path) -> None:
    x = graph.placeholder("float32", [], name="größe_世界")

    _, said = picture(tmp_path / "names.svg", x + 1.0)

    assert "größe_世界" in said


def test_no_two_boxes_lie_on_each_other(tmp_path: Path) -> None:
    p = Program()
    root, _ = picture(tmp_path / "all.svg", [p.train, p.loss, p.aside])
    boxes = []
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if all(k in rect.attrib for k in ("x", "y")) and "%" not in rect.get("width", "%"):
            boxes.append([float(rect.get(k, 0)) for k in ("x", "y", "width", "height")])
    width = float(re.findall(r"[\d.]+", root.get("viewBox") or root.get("width") or "")[-2:][0])
    nodes = [b for b in boxes if b[2] < 0.95 * width]  # not the background

    for i, (x, y, w, h) in enumerate(nodes):
        for a, b, c, d in nodes[i + 1 :]:
            apart = x + w <= a or a + c <= x or y + h <= b or b + d <= y
            assert apart, ((x, y, w, h), (a, b, c, d))


def test_a_fetch_that_is_no_tensor_is_refused_and_no_file_written(tmp_path: Path) -> None:
    with pytest.raises(ts.ArgumentError, match="fetch"):
        graph.draw([np.ones(2)], file=tmp_path / "none.svg")

    assert not (tmp_path / "none.svg").exists()


def test_no_fetches_are_an_empty_drawing(tmp_path: Path) -> None:
    assert graph.draw([], tmp_path / "nothing.svg") == ""
    assert ElementTree.parse(tmp_path / "nothing.svg").getroot().tag.endswith("svg")
