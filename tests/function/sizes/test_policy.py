"""Sizes that vary, through `trainstep.function`: what each policy costs, with the exact numbers.

Tolerance: another size of the same program sums in another order, by a few float32 roundings.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import trainstep as ts
from tests.helpers import assert_same, host, normal
from tests.streams import Student, Witness, batch, kinds, ones
from trainstep.testing import assert_traces, filling, wait_for_compilation

EXACT = 1e-5
SIZES = (8, 5, 13, 1, 8, 5, 1, 13)

pytestmark = pytest.mark.filterwarnings("error::trainstep.SizesWarning")


def on_jax() -> bool:
    return keras.backend.backend() == "jax"


@pytest.fixture(scope="module")
def exact() -> Student:
    """What every other policy has to equal: a program for each shape of `SIZES`."""
    student = Student(shapes="exact")
    student.losses = student.run(SIZES)
    return student


# What a policy costs.


@pytest.mark.slow
def test_exact_makes_a_program_for_every_shape(exact: Student) -> None:
    different = len(set(SIZES))
    assert exact.step.trace_count == exact.witness.runs == different
    assert exact.step.program_count == different
    assert kinds(exact.step.ledger) == {"trace": different}


def test_bucket_traces_once_and_compiles_a_few() -> None:
    student = Student(shapes=ts.Shapes("bucket", background=False))
    student.run(SIZES)
    assert student.step.trace_count == student.witness.runs == 1 + ones()
    assert student.step.program_count <= (3 if on_jax() else 1 + ones())
    found = kinds(student.step.ledger)
    assert found["trace"] == 1 + ones()
    assert found["bucket"] == student.step.program_count - ones()
    assert set(found) == {"trace", "bucket"}


@pytest.mark.slow
def test_a_grid_says_which_buckets() -> None:
    if not on_jax():
        pytest.skip("one program takes all sizes here")
    student = Student(shapes=ts.Shapes("bucket", grid=(10, 16), background=False, patience=1))
    student.run(SIZES)
    made = [e.signature for e in student.step.ledger if e.kind == "bucket"]
    sizes = {int(re.search(r"(\d+)$", text).group()) for text in made}  # type: ignore[union-attr]
    assert sizes == {10, 16}
    assert student.step.trace_count == student.witness.runs == 1


def test_a_size_beyond_the_grid_is_computed_all_the_same() -> None:
    total = ts.function(lambda x: ops.sum(x), shapes=ts.Shapes("bucket", grid=(4, 8)))
    for n in (3, 8, 9, 20, 4):
        assert float(total(np.ones((n, 2)))) == 2 * n
    assert total.trace_count <= 3


def test_a_grid_by_the_name_of_the_size() -> None:
    if not on_jax():
        pytest.skip("one program takes all sizes here")
    shapes = ts.Shapes("bucket", grid={"time": (6, 12)}, background=False)
    total = ts.function(ops.sum, shapes=shapes, signature=[ts.Spec(("batch", "time"))])
    for n, time in ((3, 5), (2, 6), (4, 7), (1, 12)):
        assert float(total(np.ones((n, time)))) == n * time
    made = " ".join(e.signature for e in total.ledger if e.kind == "bucket")
    assert set(re.findall(r"time up to (\d+)", made)) <= {"6", "12"}, made
    assert "time up to 12" in made


def test_dynamic_is_one_program(backend: str) -> None:
    if backend == "jax":
        pytest.skip("not on JAX, see below")
    student = Student(shapes="dynamic")
    student.run(SIZES)
    assert student.step.trace_count == student.witness.runs == 1 + ones()
    assert student.step.program_count == 1 + ones()


def test_dynamic_on_jax_says_what_to_pass_instead(backend: str) -> None:
    if backend != "jax":
        pytest.skip("a policy of the other engines")
    for make in (
        lambda: ts.function(lambda x: x, shapes="dynamic"),
        lambda: ts.function(lambda x: x, shapes=ts.Shapes("dynamic")),
        lambda: ts.Trainer(Student().model, "sgd", "mse", shapes="dynamic"),
    ):
        with pytest.raises(ts.ArgumentError, match=r"(?s)shapes.*dynamic.*'bucket'"):
            make()


def test_auto_is_exact_at_first_and_traces_once_more_for_all_others() -> None:
    student = Student()
    for i in range(3):
        student.step(*batch(8, i))
    assert student.step.trace_count == student.witness.runs == student.step.program_count == 1
    assert "batch" not in student.step.ledger[0].signature
    student.run((5, 3, 8, 1, 7, 2, 6, 4))
    assert student.step.trace_count == student.witness.runs == 2 + ones()
    assert student.step.program_count == 2 + ones()
    assert student.step.ledger[1].signature.startswith("x: float32[batch,4]")
    wait_for_compilation()


def test_auto_is_the_default() -> None:
    assert ts.Shapes() == ts.Shapes("auto")
    assert ts.Shapes().policy == "auto"


@pytest.mark.slow
def test_a_counting_layer_agrees_with_the_ledger_over_two_hundred_batches() -> None:
    student = Student(shapes=ts.Shapes(patience=20))
    sizes = np.random.default_rng(0).integers(1, 65, 200)
    student.run(sizes)
    wait_for_compilation()
    found = kinds(student.step.ledger)
    assert student.witness.runs == student.step.trace_count == found["trace"] == 2 + ones()
    assert student.step.program_count <= (9 if on_jax() else 2 + ones())
    assert sum(e.runs_python for e in student.step.ledger) == 2 + ones()


# The numbers.


@pytest.mark.parametrize(
    ("policy", "filler"), [("auto", "nothing"), ("bucket", "nan"), ("auto", "garbage")]
)
def test_numbers_are_those_of_exact_shapes(exact: Student, policy: str, filler: str) -> None:
    """Losses of every step; weights, and so gradients; statistics; and the metric."""
    if not on_jax() and filler != "nothing":
        pytest.skip("nothing is padded here")
    student = Student(shapes=ts.Shapes(policy, background=False, patience=2))
    if filler == "nothing":
        losses = student.run(SIZES)
    else:
        with filling(filler):
            losses = student.run(SIZES)
    np.testing.assert_allclose(losses, exact.losses, rtol=EXACT)
    assert_same(student.state, exact.state, EXACT, EXACT)


def test_numbers_of_dynamic_are_those_of_exact_shapes(exact: Student, backend: str) -> None:
    if backend == "jax":
        pytest.skip("not on JAX")
    student = Student(shapes="dynamic")
    np.testing.assert_allclose(student.run(SIZES), exact.losses, rtol=EXACT)
    assert_same(student.state, exact.state, EXACT, EXACT)


@pytest.mark.parametrize("policy", ["exact", "bucket", "auto"])
def test_outputs_are_cut_to_their_true_size_and_of_the_engine(policy: str) -> None:
    @ts.function(shapes=policy)
    def step(x: Any) -> Any:
        return {"rows": 2 * x, "turned": ops.transpose(x), "sum": ops.sum(x), "pair": (x[:, 0], 1)}

    kind = type(ops.convert_to_tensor(np.ones(1, "float32")))
    for n in (8, 5, 12, 1):
        x = normal(n, 3, seed=n)
        found = step(x)
        assert all(type(found[k]) is kind for k in ("rows", "turned", "sum"))
        assert tuple(found["rows"].shape) == (n, 3)
        assert tuple(found["turned"].shape) == (3, n)
        assert tuple(found["pair"][0].shape) == (n,)
        np.testing.assert_allclose(host(found["rows"]), 2 * x)
        np.testing.assert_allclose(host(found["turned"]), x.T)
        np.testing.assert_allclose(float(found["sum"]), x.sum(), rtol=1e-5, atol=1e-6)


def test_sizes_computed_from_others_are_cut_too() -> None:
    """Outputs of twice the batch, one more, and the batch times the time."""

    @ts.function(shapes=ts.Shapes("bucket", background=False), dynamic={"x": 1})
    def step(x: Any) -> Any:
        rows, time = ops.shape(x)[:2]
        return (
            ops.concatenate([x, -x], axis=0),
            ops.concatenate([x[:1], x], axis=0),
            ops.reshape(x, (rows * time, 3)),
            x[1:],
            ops.flip(x, axis=0),
        )

    for n, time in ((4, 6), (3, 5), (9, 2), (5, 5)):
        x = normal(n, time, 3, seed=n)
        wanted = (
            np.concatenate([x, -x]),
            np.concatenate([x[:1], x]),
            x.reshape(-1, 3),
            x[1:],
            x[::-1],
        )
        assert_same(step(x), wanted, 0, 0)


def test_a_random_stream_has_the_exact_statistics_of_batch_norm() -> None:
    """The moving variance, by the definition: a row too many would show at once."""
    norm = layers.BatchNormalization(momentum=0.5, epsilon=1e-5)
    norm.build((None, 3))
    step = ts.function(lambda x: norm(x, training=True), shapes=ts.Shapes(background=False))
    mean, variance = np.zeros(3), np.ones(3)
    for i, n in enumerate(np.random.default_rng(3).integers(1, 40, 25)):
        x = 3 + normal(int(n), 3, seed=i)
        found = host(step(x))
        np.testing.assert_allclose(
            found, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), rtol=1e-3, atol=1e-3
        )
        mean, variance = 0.5 * mean + 0.5 * x.mean(0), 0.5 * variance + 0.5 * x.var(0)
    np.testing.assert_allclose(host(norm.moving_mean), mean, rtol=1e-5)
    np.testing.assert_allclose(host(norm.moving_variance), variance, rtol=1e-4)
    assert step.trace_count == 2


@pytest.mark.parametrize("n", [1, 2, 7])
def test_things_that_mix_rows_see_only_true_rows(n: int) -> None:
    """Every reduction, sort and comparison along the batch, against NumPy.

    Keras's own softmax asks whether a size is one, in Python, and may be warned of for that.
    """

    @ts.function(shapes=ts.Shapes("bucket", grid=(16,), background=False))
    def step(x: Any) -> Any:
        return (
            ops.max(x, axis=0),
            ops.min(x),
            ops.prod(x, axis=0),
            ops.mean(x),
            ops.argmax(x, axis=0),
            ops.cumsum(x, axis=0),
            ops.softmax(x, axis=0),
            ops.logsumexp(x, axis=0),
            ops.matmul(ops.transpose(x), x),
            ops.matmul(x, ops.transpose(x)),
        )

    x = normal(n, 3, seed=n)
    e = np.exp(x - x.max(0))
    wanted = (
        x.max(0),
        x.min(),
        x.prod(0),
        x.mean(),
        x.argmax(0),
        x.cumsum(0),
        e / e.sum(0),
        np.log(np.exp(x).sum(0)),
        x.T @ x,
        x @ x.T,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.SizesWarning)
        got = step(x)
    for found, value in zip(got, wanted, strict=True):
        np.testing.assert_allclose(host(found), value, rtol=2e-5, atol=1e-6)


def test_dropout_draws_what_it_draws_at_the_exact_shape() -> None:
    def make(shapes: Any) -> Any:
        drop = layers.Dropout(0.5, seed=3)
        drop.build((None, 4))
        return ts.function(lambda x: drop(x, training=True), shapes=shapes)

    ours, exactly = make(ts.Shapes("bucket", background=False)), make("exact")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.SizesWarning)  # it may be refused, but never wrong
        for n in (5, 3, 5, 8):
            x = np.ones((n, 4), "float32")
            np.testing.assert_array_equal(host(ours(x)), host(exactly(x)))


# Lengths.


class Sentences:
    """Pooled words to one number, trained; the axis of time varies and the batch does not."""

    def __init__(self, **options: Any) -> None:
        keras.utils.set_random_seed(7)
        self.witness = Witness()
        self.model = keras.Sequential(
            [
                keras.Input((None, 4)),
                layers.Dense(3, "tanh"),
                self.witness,
                layers.GlobalAveragePooling1D(),
                layers.Dense(1),
            ]
        )
        self.witness.runs = 0
        self.optimizer = keras.optimizers.SGD(0.1)

        @ts.function(**options)
        def step(x: Any, y: Any) -> Any:
            variables = self.model.trainable_variables
            loss, gradients = ts.value_and_grad(
                lambda: ops.mean((self.model(x, training=True) - y) ** 2), variables
            )()
            self.optimizer.apply(gradients, variables)
            return loss

        self.step = step

    def run(self, lengths: Any, rows: int = 2) -> list[float]:
        found = []
        for i, length in enumerate(lengths):
            x, y = normal(rows, int(length), 4, seed=i), normal(rows, 1, seed=999 + i)
            found.append(float(self.step(x, y)))
        return found


TIME = {
    "dynamic": {"dynamic": {"x": 1}},
    "none": {"signature": [ts.Spec((None, None, 4)), ts.Spec((None, 1))]},
    "names": {"signature": [ts.Spec(("batch", "time", 4)), ts.Spec(("batch", 1))]},
}


def test_149_lengths_cost_nine_programs_and_two_traces() -> None:
    sentences = Sentences(dynamic={"x": 1}, shapes=ts.Shapes(patience=20))
    lengths = np.random.default_rng(1).permutation(np.arange(1, 150))
    sentences.run(lengths)
    wait_for_compilation()
    assert sentences.witness.runs == sentences.step.trace_count <= 2 + ones()
    assert sentences.step.program_count <= (9 if on_jax() else 2 + ones())
    found = kinds(sentences.step.ledger)
    assert found["refused"] == found["evicted"] == 0
    before = len(sentences.step.ledger)
    with assert_traces(sentences.step, 0):
        sentences.run(lengths[:40])
    wait_for_compilation()
    assert len(sentences.step.ledger) - before <= 9 - sentences.step.program_count or not on_jax()


LENGTHS = (6, 3, 11, 1, 6)


@pytest.fixture(scope="module")
def exact_sentences() -> Sentences:
    sentences = Sentences(shapes="exact")
    sentences.losses = sentences.run(LENGTHS)
    assert sentences.step.trace_count == sentences.witness.runs == 4
    return sentences


@pytest.mark.parametrize("said", TIME)
def test_time_varies_where_it_is_said_to(exact_sentences: Sentences, said: str) -> None:
    sentences = Sentences(shapes=ts.Shapes(background=False), **TIME[said])
    np.testing.assert_allclose(sentences.run(LENGTHS), exact_sentences.losses, rtol=EXACT)
    assert_same(sentences.model.weights, exact_sentences.model.weights, EXACT, EXACT)
    assert sentences.step.trace_count == sentences.witness.runs == 2 + ones()


def test_batch_and_time_vary_at_once() -> None:
    sentences, exactly = Sentences(dynamic={"x": 1}), Sentences(shapes="exact")
    for rows, length in ((2, 6), (3, 4), (1, 9)):
        found = sentences.run((length,), rows)
        np.testing.assert_allclose(found, exactly.run((length,), rows), rtol=EXACT)
    assert sentences.step.trace_count == 2 + ones()
    assert_same(sentences.model.weights, exactly.model.weights, EXACT, EXACT)
    wait_for_compilation()


@pytest.mark.parametrize("policy", ["bucket", "auto"])
def test_batch_and_time_that_tie_by_chance_are_not_one(policy: str) -> None:
    step = ts.function(
        lambda x: (ops.mean(x, axis=1), ops.sum(x, axis=0), ops.mean(x)),
        dynamic={"x": 1},
        shapes=policy,
    )
    for shape in ((5, 5), (5, 3), (2, 7), (7, 7), (3, 4), (4, 2)):
        x = normal(*shape, seed=sum(shape))
        mean, total, all_ = step(x)
        np.testing.assert_allclose(host(mean), x.mean(1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(host(total), x.sum(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(float(all_), x.mean(), rtol=1e-5, atol=1e-6)
    assert step.trace_count <= 3
    wait_for_compilation()


def test_a_fixed_axis_as_long_as_the_batch_is_not_the_batch() -> None:
    step = ts.function(lambda x: (ops.mean(x, axis=1), ops.mean(x, axis=0)))
    for n in (4, 3, 4, 6):
        x = normal(n, 4, seed=n)
        for found, wanted in zip(step(x), (x.mean(1), x.mean(0)), strict=True):
            np.testing.assert_allclose(host(found), wanted, rtol=1e-5, atol=1e-6)
    assert step.trace_count == 2


@pytest.mark.parametrize("policy", ["bucket", "auto"])
def test_an_array_that_is_as_long_by_chance_may_differ_later(policy: str) -> None:
    """A table of five rows next to a batch of five: later batches have other sizes."""
    step = ts.function(lambda x, table: (ops.sum(x), ops.mean(table)), shapes=policy)
    table = normal(5, 2, seed=9)
    for n in (5, 3, 8, 5, 6):
        x = normal(n, 2, seed=n)
        total, mean = step(x, table)
        np.testing.assert_allclose(float(total), x.sum(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(float(mean), table.mean(), rtol=1e-5, atol=1e-6)
    assert step.trace_count <= 4
    wait_for_compilation()


def test_a_size_that_was_not_declared_is_exact() -> None:
    step = ts.function(lambda x: ops.mean(x, axis=1))
    for shape in ((4, 3), (5, 3), (6, 3), (6, 2), (5, 2), (4, 2)):
        x = normal(*shape, seed=sum(shape))
        np.testing.assert_allclose(host(step(x)), x.mean(1), rtol=1e-5, atol=1e-6)
    assert step.trace_count <= 4  # two for each width
    assert "[6,3]" in str(step.ledger[-1].changes) or "batch" in str(step.ledger[-1].changes)


def test_axes_inside_structures_are_declared_by_dicts() -> None:
    witness = Witness()

    @ts.function(dynamic={"batch": {"ids": 1, "deep": {"mask": 1}}})
    def step(batch: Any) -> Any:
        ids, mask = batch["ids"], batch["deep"]["mask"]
        return ops.sum(witness(ids) * mask, axis=1) / ops.sum(mask, axis=1)

    for n, time in ((3, 5), (2, 4), (4, 9), (1, 1)):
        ids, mask = normal(n, time, seed=n), np.ones((n, time), "float32")
        found = step({"ids": ids, "deep": {"mask": mask}})
        np.testing.assert_allclose(host(found), ids.mean(1), rtol=1e-5, atol=1e-6)
    assert step.trace_count == witness.runs == 2 + ones()


def test_axes_of_several_parameters() -> None:
    """Two times that are not the same: a question and its answer."""

    @ts.function(dynamic={"q": 1, "a": 1})
    def step(q: Any, a: Any) -> Any:
        return ops.einsum("bqd,bad->bqa", q, a)

    for n, q, a in ((2, 3, 5), (2, 4, 4), (3, 6, 2), (1, 5, 5), (2, 1, 7)):
        left, right = normal(n, q, 2, seed=q), normal(n, a, 2, seed=a)
        wanted = np.einsum("bqd,bad->bqa", left, right)
        np.testing.assert_allclose(host(step(left, right)), wanted, rtol=1e-5, atol=1e-6)
    assert step.trace_count <= 4


def test_one_name_for_two_sizes_is_an_error_or_exact() -> None:
    @ts.function(signature=[ts.Spec(("n", 2)), ts.Spec(("n", 2))])
    def step(x: Any, y: Any) -> Any:
        return ops.sum(x), ops.mean(y), ops.sum(x, axis=0) - ops.sum(y, axis=0)

    for n, m in ((3, 3), (4, 4), (3, 4), (6, 5), (4, 9), (5, 5)):
        x, y = normal(n, 2, seed=n), normal(m, 2, seed=10 + m)
        try:
            found = step(x, y)
        except ts.ArgumentError:
            assert n != m
        else:
            assert_same(found, (x.sum(), y.mean(), x.sum(0) - y.sum(0)), 1e-5, 1e-5)
    assert step.trace_count <= 5


def test_two_unnamed_sizes_are_two_sizes() -> None:
    step = ts.function(
        lambda x, y: (ops.sum(x), ops.mean(y)),
        signature=[ts.Spec((None, 2)), ts.Spec((None, 2))],
    )
    for n, m in ((3, 3), (3, 4), (5, 2), (4, 4)):
        x, y = normal(n, 2, seed=n), normal(m, 2, seed=10 + m)
        total, mean = step(x, y)
        np.testing.assert_allclose(float(total), x.sum(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(float(mean), y.mean(), rtol=1e-5, atol=1e-6)


# What may be passed.


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_no_rows_and_one_row(n: int, first: bool) -> None:
    step = ts.function(lambda x: (ops.sum(x, axis=0), 3 * x, ops.sum(x * x)))
    sizes = (n, 4, 6, n) if first else (4, 6, n, 5, n)
    for size in sizes:
        x = normal(size, 2, seed=5)
        total, rows, squares = step(x)
        assert tuple(rows.shape) == (size, 2)
        np.testing.assert_allclose(host(total), x.sum(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(host(rows), 3 * x)
        np.testing.assert_allclose(float(squares), (x * x).sum(), rtol=1e-5)
    wait_for_compilation()


def test_the_mean_of_no_rows_is_nan_as_at_the_exact_shape() -> None:
    step = ts.function(lambda x: ops.mean(x), shapes="bucket")
    exactly = ts.function(lambda x: ops.mean(x), shapes="exact")
    for n in (3, 0, 2):
        x = np.ones((n, 2), "float32")
        np.testing.assert_array_equal(host(step(x)), host(exactly(x)))


@pytest.mark.parametrize("dtype", ["float64", "int64", "int32", "uint8", "bool", "float16"])
def test_dtypes_of_arrays(dtype: str) -> None:
    step = ts.function(lambda x: ops.sum(ops.cast(x, "float32"), axis=0))
    for n in (3, 5, 2, 9):
        x = (np.arange(2 * n).reshape(n, 2) % 2).astype(dtype)
        np.testing.assert_allclose(host(step(x)), x.astype("float32").sum(0))
    assert step.trace_count == 2


def test_tensors_of_the_engine_and_numpy_share_programs() -> None:
    step = ts.function(lambda x: ops.sum(x, axis=0), shapes="bucket")
    for n in (3, 5):
        x = normal(n, 2, seed=n)
        for value in (x, ops.convert_to_tensor(x), x.astype("float64")):
            np.testing.assert_allclose(host(step(value)), x.sum(0), rtol=1e-5)
    assert step.trace_count == 1


def test_a_tensor_that_is_passed_stays_as_it_was() -> None:
    step = ts.function(lambda x: 2 * x, shapes="bucket")
    x = ops.convert_to_tensor(np.ones((5, 2), "float32"))
    step(np.ones((8, 2), "float32"))
    step(x)
    step(x)
    assert tuple(x.shape) == (5, 2)
    np.testing.assert_array_equal(host(x), np.ones((5, 2)))


def test_an_array_that_is_not_contiguous() -> None:
    step = ts.function(lambda x: ops.sum(x, axis=0), shapes="bucket")
    whole = normal(20, 6, seed=1)
    for x in (whole[::3, ::2], whole[::-2, 3:], whole[4:9].T[:, :3], np.asfortranarray(whole)):
        np.testing.assert_allclose(host(step(x)), x.sum(0), rtol=1e-5, atol=1e-6)


def test_lists_of_numbers() -> None:
    step = ts.function(lambda x: ops.sum(ops.convert_to_tensor(x)))
    for n in (3, 4, 2):
        assert float(step([float(i) for i in range(n)])) == sum(range(n))


def test_keyword_arguments_and_numbers_beside_arrays() -> None:
    @ts.function
    def step(x: Any, *, scale: float, y: Any, mode: str = "a") -> Any:
        return scale * (ops.sum(x) + ops.sum(y)) * (1 if mode == "a" else -1)

    for i, n in enumerate((3, 5, 2, 7)):
        x = np.ones((n, 2), "float32")
        assert float(step(x, scale=float(i), y=x)) == i * 4 * n
        assert float(step(y=x, x=x, scale=float(i), mode="b")) == -i * 4 * n
    assert step.trace_count == 4


def test_an_argument_that_is_none_and_then_an_array() -> None:
    @ts.function
    def step(x: Any, weight: Any = None) -> Any:
        if weight is None:
            return ops.mean(x)
        return ops.sum(x[:, 0] * weight) / ops.sum(weight)

    for n in (4, 3, 6, 2):
        x, weight = normal(n, 2, seed=n), np.arange(1.0, n + 1).astype("float32")
        assert float(step(x)) == pytest.approx(x.mean(), rel=1e-5, abs=1e-6)
        wanted = (x[:, 0] * weight).sum() / weight.sum()
        assert float(step(x, weight)) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert float(step(x, None)) == pytest.approx(x.mean(), rel=1e-5, abs=1e-6)
    assert step.trace_count <= 4


def test_arguments_in_lists_that_grow() -> None:
    step = ts.function(lambda xs: sum(ops.sum(x) for x in xs))
    for count, n in ((2, 3), (3, 4), (2, 5), (3, 2)):
        assert float(step([np.ones((n, 2), "float32")] * count)) == 2 * n * count
    assert step.trace_count <= 4


# Messages.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"policy": "padded"}, "policy"),
        ({"policy": None}, "policy"),
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": 0.5}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"grid": ()}, "grid"),
        ({"grid": (0, 4)}, "grid"),
        ({"grid": (-2,)}, "grid"),
        ({"grid": (2.5,)}, "grid"),
        ({"grid": "8"}, "grid"),
        ({"grid": {"batch": ()}}, "grid"),
        ({"multiple": 0}, "multiple"),
        ({"multiple": -8}, "multiple"),
        ({"multiple": 1.5}, "multiple"),
        ({"patience": -1}, "patience"),
        ({"buckets": 0}, "buckets"),
        ({"max_programs": 0}, "max_programs"),
        ({"max_programs": "many"}, "max_programs"),
    ],
    ids=str,
)
def test_each_argument_of_shapes_is_checked(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ts.ArgumentError, match=f"(?s)`{named}`.*expected.*got.*to fix"):
        ts.Shapes(**arguments)


@pytest.mark.parametrize("shapes", ["buckets", 3, None, ts.Spec((2,))], ids=str)
def test_shapes_that_are_none_of_ours(shapes: Any) -> None:
    with pytest.raises(ts.ArgumentError, match=r"(?s)expected.*exact.*got.*to fix"):
        ts.function(lambda x: x, shapes=shapes)
    with pytest.raises(ts.ArgumentError, match=r"(?s)expected.*exact.*got.*to fix"):
        ts.Trainer(Student().model, "sgd", "mse", shapes=shapes)


@pytest.mark.parametrize(
    "dynamic",
    [{"z": 1}, {"x": "time"}, {"x": 1.5}, {"x": (0, "b")}, {"x": None}, "x", 1, ["x"]],
    ids=str,
)
def test_nonsense_in_dynamic_is_named(dynamic: Any) -> None:
    def step(x: Any, y: Any) -> Any:
        return ops.sum(x)

    with pytest.raises(ts.ArgumentError, match=r"(?s)`dynamic`.*expected.*got.*to fix") as caught:
        ts.function(step, dynamic=dynamic)
    if dynamic == {"z": 1}:
        assert "z" in str(caught.value)
        assert "x" in str(caught.value)


@pytest.mark.parametrize(
    ("dynamic", "value"),
    [({"x": 2}, np.ones((3, 2))), ({"x": {"a": 1}}, np.ones((3, 2))), ({"x": 5}, np.ones(3))],
    ids=str,
)
def test_an_axis_that_the_array_has_not(dynamic: Any, value: Any) -> None:
    step = ts.function(lambda x: ops.sum(x), dynamic=dynamic)
    with pytest.raises(ts.ArgumentError, match=r"(?s)`dynamic`.*expected.*`x`.*got.*to fix"):
        step(value)


def test_a_negative_axis_is_counted_from_the_end_or_refused() -> None:
    try:
        step = ts.function(lambda x: ops.mean(x, axis=1), dynamic={"x": -1})
    except ts.ArgumentError:
        return
    for shape in ((2, 3), (2, 4), (3, 5)):
        x = normal(*shape, seed=3)
        np.testing.assert_allclose(host(step(x)), x.mean(1), rtol=1e-5, atol=1e-6)
    assert step.trace_count == 2


def test_shapes_cannot_be_changed_afterwards() -> None:
    shapes = ts.Shapes("bucket", ratio=3.0)
    with pytest.raises(AttributeError):
        shapes.ratio = 2.0  # type: ignore[misc]
    assert shapes == ts.Shapes("bucket", ratio=3.0)
    assert "ratio=3.0" in repr(shapes)
