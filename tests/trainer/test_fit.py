"""`Trainer.fit`, `evaluate` and `predict` do what Keras's do, for every source of data.

Tolerance: both sides run the same operations, fused by different compilers; a few epochs of SGD
differ by a few float32 roundings (6e-8). An epoch's metric is a mean over batches, summed in the
same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import trainstep as ts
from tests.helpers import assert_same, host, normal
from tests.twins import assert_logs, assert_twins, lone, mlp, regression, twins

EXACT = 5e-6
X, Y = normal(24, 6, seed=1), normal(24, 2, seed=2)  # six batches of four
WEIGHT = np.abs(normal(24, seed=3))
VALIDATION = normal(8, 6, seed=4), normal(8, 2, seed=5)
LABELS = np.random.default_rng(6).integers(0, 3, (24,)).astype("int32")


def random_layers() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.Dropout(0.4, seed=7),
            layers.BatchNormalization(momentum=0.9),
            layers.Dense(2),
        ]
    )


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])


def classification() -> dict[str, Any]:
    return {
        "optimizer": "sgd",
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "weighted_metrics": ["sparse_categorical_crossentropy"],
    }


def weighted() -> dict[str, Any]:
    return {**regression(), "weighted_metrics": ["mse"]}


def assert_history(got: Any, wanted: Any) -> None:
    """The same epochs, names and numbers."""
    assert isinstance(got, keras.callbacks.History)
    assert got.epoch == wanted.epoch
    assert set(got.history) == set(wanted.history)
    for name, values in wanted.history.items():
        assert all(type(value) is float for value in got.history[name]), name
        np.testing.assert_allclose(got.history[name], values, EXACT, EXACT, err_msg=name)


def assert_fits(theirs: keras.Model, trainer: ts.Trainer, *data: Any, **options: Any) -> None:
    """Fits both, then compares histories, states, an evaluation and predictions.

    Data that can be read once only is given as a function that makes it.
    """
    made = [[make() if callable(make) else make for make in data] for _ in range(2)]
    options = {"shuffle": False, "epochs": 3, **options}
    wanted = theirs.fit(*made[0], verbose=0, **options)
    assert_history(trainer.fit(*made[1], progress=False, **options), wanted)
    assert_twins(trainer, theirs, EXACT)
    ours = [v for metric in trainer.metrics for v in metric.variables]
    assert_same(ours, [v for metric in theirs.metrics for v in metric.variables], EXACT, EXACT)


Options = dict[str, Any]
ARRAYS: dict[str, Options] = {
    "plain": {"batch_size": 4},
    "a short last batch": {"batch_size": 9, "validation_data": VALIDATION},
    "validation data": {"batch_size": 4, "validation_data": VALIDATION},
    "weighted validation data": {
        "batch_size": 4,
        "validation_data": (*VALIDATION, np.abs(normal(8, seed=7))),
        "validation_batch_size": 3,
    },
    "validation split": {"batch_size": 4, "validation_split": 0.25, "sample_weight": WEIGHT},
    "every other validation": {
        "batch_size": 4,
        "validation_data": VALIDATION,
        "validation_freq": 2,
        "validation_steps": 2,
    },
    "named validations": {
        "batch_size": 4,
        "validation_data": VALIDATION,
        "validation_freq": [1, 3],
    },
    "sample weights": {"batch_size": 4, "sample_weight": WEIGHT},
    "some steps": {"batch_size": 4, "steps_per_epoch": 2},
    "later epochs": {"batch_size": 4, "initial_epoch": 2, "epochs": 4},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    theirs, trainer = twins(mlp, weighted)
    assert_fits(theirs, trainer, X, Y, **ARRAYS[name])


@pytest.mark.slow
def test_random_layers() -> None:
    """Dropout draws the same numbers, and the batch-norm's statistics agree."""
    theirs, trainer = twins(random_layers, regression)
    assert_fits(theirs, trainer, X, Y, batch_size=4, validation_data=VALIDATION)


def test_evaluate_and_predict() -> None:
    theirs, trainer = twins(random_layers, weighted)
    for options in ({"batch_size": 4}, {"batch_size": 9, "sample_weight": WEIGHT}):
        wanted = theirs.evaluate(X, Y, verbose=0, return_dict=True, **options)
        got = trainer.evaluate(X, Y, **options)
        assert type(got) is dict
        assert all(type(value) is float for value in got.values())
        assert_logs(got, wanted, EXACT)
    wanted = theirs.evaluate(X, Y, batch_size=4, steps=2, verbose=0, return_dict=True)
    assert_logs(trainer.evaluate(X, Y, batch_size=4, steps=2), wanted, EXACT)
    assert_logs(trainer.evaluate((X, Y), batch_size=4, steps=2), wanted, EXACT)
    predicted = trainer.predict(X, batch_size=4)
    assert type(predicted) is np.ndarray
    assert_same([predicted], [theirs.predict(X, batch_size=4, verbose=0)], EXACT, EXACT)
    assert_same([trainer.predict(X, batch_size=4, steps=2)], [predicted[:8]], EXACT, EXACT)
    assert_twins(trainer, theirs, 0, slots=False)


@pytest.mark.slow
def test_structures() -> None:
    """Dicts of arrays in and out, through fit, evaluate and predict.

    All batches are of one size: on TensorFlow, Keras's own means of the outputs' losses do not
    weigh a short one less.
    """

    def build() -> keras.Model:
        a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
        h = layers.Concatenate()([layers.Dense(4, activation="tanh")(a), b])
        return keras.Model(
            {"a": a, "b": b},
            {"p": layers.Dense(2, name="p")(h), "q": layers.Dense(1, name="q")(h)},
        )

    def arguments() -> dict[str, Any]:
        return {"optimizer": "sgd", "loss": {"p": "mse", "q": "mae"}, "metrics": {"q": ["mse"]}}

    x, y = {"a": X[:16, :4], "b": X[:16, 4:]}, {"p": Y[:16], "q": Y[:16, :1]}
    theirs, trainer = twins(build, arguments)
    assert_fits(theirs, trainer, x, y, batch_size=4, validation_split=0.25)
    wanted = theirs.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    assert_logs(trainer.evaluate(x, y, batch_size=4), wanted, EXACT)
    got, wanted = trainer.predict(x, batch_size=4), theirs.predict(x, batch_size=4, verbose=0)
    assert got.keys() == wanted.keys()
    assert_same([got["p"], got["q"]], [wanted["p"], wanted["q"]], EXACT, EXACT)


@pytest.mark.slow
def test_class_weight() -> None:
    theirs, trainer = twins(classifier, classification)
    weights = {0: 0.5, 1: 2.0, 2: 3.0}
    data = X, LABELS
    assert_fits(theirs, trainer, *data, batch_size=4, class_weight=weights, validation_data=data)


def batches(size: int = 4) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(X), size):
        yield X[start : start + size], Y[start : start + size]


def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from batches()


class Rows(keras.utils.PyDataset):
    """Batches by number; writes down what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.asked.append(i)
        rows = slice(4 * i, 4 * i + 4)
        return X[rows], Y[rows], WEIGHT[rows]

    def on_epoch_begin(self) -> None:
        self.asked.append("begin")

    def on_epoch_end(self) -> None:
        self.asked.append("end")


def needs(engine: str) -> Any:
    """The engine's module, which other engines' runs need not import."""
    if keras.backend.backend() != engine:
        pytest.skip(f"a source of {engine}'s")
    return pytest.importorskip(engine)


def tf_dataset() -> Any:
    tf = needs("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y, WEIGHT)).batch(4)


def data_loader() -> Any:
    torch = needs("torch")
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(rows, batch_size=4)


SOURCES: dict[str, tuple[Callable[[], Any], Options]] = {
    "generator": (endless, {"steps_per_epoch": 4}),
    "generator past its end": (endless, {"steps_per_epoch": 7}),
    "py_dataset": (Rows, {}),
    "py_dataset in part": (Rows, {"steps_per_epoch": 3}),
    "tf_dataset": (tf_dataset, {}),
    "tf_dataset in part": (tf_dataset, {"steps_per_epoch": 4}),
    "data_loader": (data_loader, {}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SOURCES)
def test_sources(name: str) -> None:
    make, options = SOURCES[name]
    theirs, trainer = twins(mlp, weighted)
    assert_fits(theirs, trainer, make, validation_data=VALIDATION, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [batches, Rows, tf_dataset, data_loader])
def test_evaluate_and_predict_sources(make: Callable[[], Any]) -> None:
    theirs, trainer = twins(mlp, weighted)
    wanted = theirs.evaluate(make(), verbose=0, return_dict=True)
    assert_logs(trainer.evaluate(make()), wanted, EXACT)
    wanted = theirs.predict(make(), verbose=0)
    assert_same([trainer.predict(make())], [wanted], EXACT, EXACT)
    wanted = theirs.fit(X, Y, validation_data=make(), shuffle=False, verbose=0)
    got = trainer.fit(X, Y, validation_data=make(), shuffle=False, progress=False)
    assert_history(got, wanted)


@pytest.mark.parametrize(
    "make", [batches, lambda: iter(list(batches())), lambda: map(tuple, batches())]
)
def test_iterator_of_unknown_length(make: Callable[[], Any]) -> None:
    """It lasts for an epoch; Keras takes no iterators that are no generators."""
    theirs, trainer = twins(mlp, regression)
    wanted = theirs.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert_history(trainer.fit(make(), progress=False), wanted)
    assert_twins(trainer, theirs, EXACT)


def test_py_dataset_is_asked_in_order() -> None:
    """Once for each batch, and told of each epoch; Keras asks for the first batch once more."""
    data, trainer = Rows(), lone(mlp, weighted)
    trainer.fit(data, epochs=2, shuffle=False, progress=False)
    assert data.asked == ["begin", 0, 1, 2, 3, 4, 5, "end"] * 2
    data.asked.clear()
    trainer.fit(data, epochs=2, shuffle=True, progress=False)
    epochs = data.asked[1:7], data.asked[9:15]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(6))


def test_no_epoch_left() -> None:
    trainer = lone(mlp, regression)
    before = trainer.model.get_weights()
    history = trainer.fit(X, Y, initial_epoch=3, epochs=3, progress=False)
    assert history.history == {}
    assert history.epoch == []
    assert_same(trainer.model.weights, before, 0, 0)


def test_function_makes_each_epoch() -> None:
    """A function that returns a generator is called once for each epoch."""
    calls: list[int] = []

    def make() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        calls.append(len(calls))
        return batches()

    theirs, trainer = twins(mlp, regression)
    wanted = theirs.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    got = trainer.fit(make, epochs=3, progress=False)
    assert_history(got, wanted)
    assert_twins(trainer, theirs, EXACT)
    assert len(calls) == 3


@pytest.mark.slow
def test_tuples_of_arrays() -> None:
    """`fit((x, y))` and `fit((x, y, weight))` are `fit(x, y)` with or without weights."""
    for weight in ((), (WEIGHT,)):
        theirs, trainer = twins(mlp, weighted)
        options = {"batch_size": 4, "epochs": 2, "shuffle": False}
        wanted = theirs.fit(X, Y, sample_weight=weight[0] if weight else None, verbose=0, **options)
        assert_history(trainer.fit((X, Y, *weight), progress=False, **options), wanted)
        assert_twins(trainer, theirs, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "make"), [(2, mlp), (4, random_layers), (50, mlp)])
def test_several_steps_per_call(steps: int, make: Callable[[], keras.Model]) -> None:
    """The same numbers, whether or not the steps divide the six batches, of which one is short."""
    seen: dict[int, list[tuple[int, dict[str, float]]]] = {1: [], steps: []}
    histories, trainers = [], []
    for k, heard in seen.items():
        record = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda i, logs, heard=heard: heard.append((i, dict(logs)))
        )
        trainer = lone(make, regression)
        history = trainer.fit(
            X[:22], Y[:22], batch_size=4, epochs=2, shuffle=False, validation_data=VALIDATION,
            callbacks=[record], steps_per_call=k, progress=False,
        )  # fmt: skip
        histories.append(history)
        trainers.append(trainer)
    assert_history(histories[1], histories[0])
    assert_twins(trainers[1], trainers[0].model, EXACT)
    assert [i for i, _ in seen[steps]] == [i for i, _ in seen[1]] == [0, 1, 2, 3, 4, 5] * 2
    for (_, got), (_, wanted) in zip(seen[steps], seen[1], strict=True):
        assert_logs(got, wanted, EXACT)


class Seen(keras.metrics.Metric):
    """Writes down the first number of each row, in the order of the rows."""

    def __init__(self, size: int) -> None:
        super().__init__(name="seen")
        self.rows = self.add_variable((size,), initializer="zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        new = keras.ops.reshape(keras.ops.cast(y_true, "float32"), (-1,))
        kept = self.rows.value[new.shape[0] :]
        self.rows.assign(keras.ops.concatenate([kept, new]))

    def result(self) -> Any:
        return keras.ops.sum(self.rows.value)

    def reset_state(self) -> None:
        """Keeps the rows: what leaves them is older than the epoch."""


def orders(seed: int, shuffle: bool, epochs: int = 3) -> list[list[int]]:
    """In which order the rows of each epoch came."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    metric = Seen(10)
    trainer = ts.Trainer(model, "sgd", "mse", metrics=[metric])
    found: list[list[int]] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: found.append(host(metric.rows).astype(int).tolist())
    )
    rows = np.arange(10, dtype="float32")[:, None]
    np.random.seed(seed)
    trainer.fit(
        0 * rows, rows, batch_size=4, epochs=epochs, shuffle=shuffle, callbacks=[note],
        progress=False,
    )  # fmt: skip
    return found


@pytest.mark.slow
def test_shuffle() -> None:
    found = orders(3, shuffle=True)
    assert all(sorted(order) == list(range(10)) for order in found)
    assert len({tuple(order) for order in found}) == 3  # by chance: once in 10!
    assert orders(3, shuffle=True) == found
    assert orders(4, shuffle=True) != found
    assert orders(3, shuffle=False) == [list(range(10))] * 3


@pytest.mark.parametrize("steps", [None, 3])
def test_rows_that_another_thread_takes_are_the_same(
    monkeypatch: pytest.MonkeyPatch, steps: int | None
) -> None:
    """Also if the epoch is over before it has taken them all; and the thread ends with it."""

    def fitted() -> list[Any]:
        trainer = lone(mlp, regression)
        np.random.seed(3)
        trainer.fit(X, Y, batch_size=4, epochs=2, steps_per_epoch=steps, progress=False)
        return trainer.model.get_weights()

    expected = fitted()
    monkeypatch.setattr("trainstep._data.arrays._CHUNK_BYTES", 1)
    monkeypatch.setattr("trainstep._data.arrays._PREFETCH_CHUNKS", 1)
    assert_same(fitted(), expected, rtol=0, atol=0)


def test_shuffle_is_the_default_for_arrays_only() -> None:
    """A stream of batches keeps its order; `shuffle` leaves x, y and weights together."""
    trainer, other = lone(mlp, weighted), lone(mlp, weighted)
    trainer.fit(batches, progress=False)
    other.fit(X, Y, batch_size=4, shuffle=False, progress=False)
    assert_same(trainer.model.weights, other.model.weights, EXACT, EXACT)
    tied = lone(mlp, regression)
    tied.model.set_weights([np.zeros(w.shape) for w in tied.model.weights])
    tied.optimizer.learning_rate = 0.0
    rows = np.arange(24, dtype="float32")
    y = np.stack([rows, rows], axis=1)
    history = tied.fit(X, y, sample_weight=1.0 / (1 + rows**2), batch_size=4, progress=False)
    wanted = float(np.mean(rows**2 / (1 + rows**2)))  # of pairs that stayed together
    np.testing.assert_allclose(history.history["loss"], [wanted], rtol=1e-5)


def test_arrays_are_left_alone() -> None:
    trainer = lone(mlp, regression)
    x, y = X.copy(), Y.copy()
    trainer.fit(x, y, batch_size=4, epochs=2, progress=False)
    trainer.fit(x, y, batch_size=4, validation_split=0.5, progress=False)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
