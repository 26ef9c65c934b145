"""NumPy arguments on their way to JAX: nobody's later batch is read in place of theirs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("how arguments get to JAX", allow_module_level=True)

import jax.numpy as jnp
from keras import ops

import trainstep as ts
from trainstep._engines.jax.tricks import input_buffers
from trainstep._engines.jax.tricks.input_buffers import InputBuffer, InputBuffers
from trainstep._engines.jax.tricks.row_buffers import RowTaker, is_row_buffer
from trainstep._engines.shared.padding import aligned

KINDS = [
    ("float32", "float32"),
    ("float32", "int32"),
    ("int32", "uint32", "float32"),
    ("float16", "float32"),
    ("bool", "uint8", "float32"),
]


def filled(number: int, dtype: str, rows: int = 6) -> np.ndarray:
    return np.full((rows, 3), number % 7, dtype)


def total(arrays: Any) -> Any:
    return sum(ops.sum(ops.cast(x, "float32")) for x in arrays)


def slow_step() -> Callable[..., Any]:
    """Adds its arguments up, but not before it has waited for the last call, which takes long."""
    state = keras.Variable(np.zeros(2, "float32"))

    @ts.function(shapes="exact")
    def step(*arrays):
        wave = ops.eye(150) * 0.5 + ops.sum(state.value)
        for _ in range(8):
            wave = ops.tanh(wave @ wave)
        state.assign(state * 0.0 + ops.sum(wave) * 0.0)
        return total(arrays) + ops.sum(state.value)

    return step


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_call_that_waits_reads_its_own_batch(kinds: tuple[str, ...]) -> None:
    step, batch = slow_step(), [filled(0, kind) for kind in kinds]
    results = []

    for number in range(60):
        for array in batch:  # the caller's memory is the same each time
            array[...] = number % 7
        results.append(step(*batch))

    ones = [float(filled(1, kind).astype("float32").sum()) for kind in kinds]
    for number, result in enumerate(results):
        wanted = sum(
            n * (bool(number % 7) if k == "bool" else number % 7)
            for n, k in zip(ones, kinds, strict=True)
        )
        assert float(result) == wanted, number


def test_the_first_calls_of_a_program_read_their_own_batches() -> None:
    """Those take another way through JAX, which holds a view of what it was handed."""
    for _ in range(3):
        step = slow_step()
        results = [step(filled(n, "float32"), filled(n, "int32")) for n in range(5)]
        assert [float(r) for r in results] == [36.0 * n for n in range(5)]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("on_device", [(), (0,), (1,), (0, 1)], ids=str)
def test_arrays_of_jax_may_come_in_the_place_of_numpys(
    kinds: tuple[str, ...], on_device: tuple[int, ...]
) -> None:
    step = ts.function(lambda *arrays: [x * 2 if x.dtype != bool else x for x in arrays])
    rng = np.random.default_rng(0)
    for turn in range(4):
        batch = [(rng.normal(size=(6, 3)) * 9).astype(kind) for kind in kinds]
        batch = [np.abs(x) if x.dtype.kind == "u" else x for x in batch]
        mixed = [
            jnp.asarray(x) if turn and place in on_device else x for place, x in enumerate(batch)
        ]
        for got, x in zip(step(*mixed), batch, strict=True):
            np.testing.assert_array_equal(got, x if x.dtype == bool else x * x.dtype.type(2))
            assert got.dtype == x.dtype
    assert step.trace_count == 1


def test_bits_of_numbers_are_kept_when_kinds_share_an_input() -> None:
    step = ts.function(lambda floats, ints: (floats, ints))
    bits = np.array([0x7FC00001, 0x7F800001, 1, 0x80000000, 0xFF800000, 0x3F800000], np.uint32)

    for _ in range(3):
        floats, ints = step(bits.view("float32"), bits.view("int32"))

    np.testing.assert_array_equal(np.asarray(ints), bits.view("int32"))
    np.testing.assert_array_equal(np.asarray(floats).view("uint32"), bits)


def test_an_argument_that_is_returned_stays_as_it_is() -> None:
    step = ts.function(lambda x, y: (x, y))
    kept = [step(filled(n, "float32"), filled(n, "float32")) for n in range(6)]

    for number, pair in enumerate(kept):
        for each in pair:
            np.testing.assert_array_equal(each, filled(number, "float32"))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 0)], ids=str)
def test_arrays_of_any_shape(shape: tuple[int, ...]) -> None:
    step = ts.function(lambda x, y: (x + 1, ops.sum(y)), shapes="exact")
    for number in range(4):
        x, y = np.full(shape, number, "float32"), filled(number, "float32")
        first, second = step(x, y)
        np.testing.assert_array_equal(first, x + 1)
        assert float(second) == y.sum()


def test_arrays_that_are_not_contiguous() -> None:
    step = ts.function(lambda x, y: (x * 1, y * 1))
    x, y = np.arange(24.0, dtype="float32").reshape(4, 6), np.arange(8.0, dtype="float32")[::2]
    for _ in range(3):
        first, second = step(x.T, y)
        np.testing.assert_array_equal(first, x.T)
        np.testing.assert_array_equal(second, y)


def test_memory_is_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(input_buffers, "aligned", lambda *how: made.append(1) or aligned(*how))
    quick = ts.function(lambda x, y: ops.sum(x) + ops.sum(y))
    for number in range(300):
        float(quick(filled(number, "float32"), filled(number, "float32")))
    assert len(made) < 30

    step = slow_step()
    kept = [step(filled(n, "float32")) for n in range(150)]
    assert float(kept[-1]) == filled(149, "float32").sum()
    (buffer,) = inputs_of(step)._buffers
    assert len(buffer._blocks) <= 34


def test_there_is_memory_for_each_call_that_waits_unless_it_is_much() -> None:
    blocks = {
        size: input_buffers._depth(size) for size in (0, 4, 1 << 17, 1 << 20, 1 << 22, 1 << 23)
    }

    assert blocks == {0: 0, 4: 34, 1 << 17: 34, 1 << 20: 8, 1 << 22: 4, 1 << 23: 0}


def test_large_batches_are_not_kept() -> None:
    buffer = InputBuffer([0], [np.zeros((1 << 22, 2), "float32")])
    made = buffer([np.ones((1 << 22, 2), "float32")])

    assert made.all()
    assert not buffer._blocks


@pytest.mark.slow
def test_many_arguments_that_are_large_together() -> None:
    step = ts.function(lambda *arrays: total(arrays))
    for number in range(3):
        arrays = [np.full(8192, number + place, "float32") for place in range(140)]
        assert float(step(*arrays)) == sum(8192.0 * (number + place) for place in range(140))


def test_only_small_numbers_of_one_word_share_an_input() -> None:
    arrays = [np.zeros(n, d) for n, d in [(4, "f4"), (4, "i4"), (9000, "f4"), (4, "i2"), (4, "?")]]

    def sizes(of_numpy: list[bool]) -> list[tuple[int, ...]]:
        return [each.shape for each in InputBuffers(arrays, of_numpy).inputs]

    assert sizes([True] * 5) == [(8,), (9000,), (4,), (4,)]
    assert sizes([False, True, True, True, True]) == [(4,), (4,), (9000,), (4,), (4,)]
    assert sizes([]) == [(4,), (4,), (9000,), (4,), (4,)]


def test_a_step_that_runs_in_the_middle_of_itself_spoils_nothing() -> None:
    """A handler of a signal runs the step, between any two instructions of another call of it."""
    step, wrong, runs = ts.function(lambda x, y: ops.sum(x) + ops.sum(y)), [], []

    def run(number: int) -> None:
        result = float(step(filled(number, "float32"), filled(number, "float32")))
        if result != 36.0 * (number % 7):
            wrong.append((number, result))

    run(1)
    run(1)
    before = signal.signal(signal.SIGALRM, lambda *_: (runs.append(1), run(len(runs))))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for number in range(2000):
            run(number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert runs
    assert not wrong


def inputs_of(step: Any) -> InputBuffers:
    (program,) = step._programs.all()
    found: InputBuffers = program.executable._inputs
    return found


LARGE = (64, 33, 300)  # 64 batches, each too large to share an input


def batches_of(taker: RowTaker, order: np.ndarray) -> np.ndarray:
    return taker(order).reshape(-1, *LARGE[1:])


def test_rows_are_fetched_into_memory_that_is_aligned() -> None:
    array = np.arange(20 * 16, dtype="float32").reshape(20, 16)
    taker, order = RowTaker(array), np.random.default_rng(0).permutation(20)
    rows = taker(order)
    np.testing.assert_array_equal(rows, array[order])
    assert type(rows) is np.ndarray
    assert rows.ctypes.data % 64 == 0
    assert all(map(is_row_buffer, (rows[4:], rows.reshape(4, 5, 16)[1])))
    assert not is_row_buffer(array[4:])


def test_fetched_memory_is_used_again_only_when_all_parts_are_gone() -> None:
    array = np.arange(20 * 16, dtype="float32").reshape(20, 16)
    taker, order = RowTaker(array), np.arange(20)
    part = taker(order)[3:5]
    held = part.ctypes.data - part[0].nbytes * 3
    addresses = {taker(order[::-1]).ctypes.data for _ in range(20)}
    assert held not in addresses
    assert len(addresses) < 9
    np.testing.assert_array_equal(part, array[3:5])
    assert len(taker(order[:7])) == 7
    np.testing.assert_array_equal(taker(np.append(order, order)), np.append(array, array, 0))


def test_a_fetched_batch_goes_to_the_program_as_it_is() -> None:
    array = np.arange(np.prod(LARGE), dtype="float32").reshape(-1, LARGE[2]) % 11
    step, order = ts.function(lambda x: ops.sum(x)), np.random.default_rng(0).permutation
    given = batches_of(RowTaker(array), order(len(array)))
    step(given[0].copy()), step(given[0].copy())  # the first finds the program, the second the way
    names = step._programs.hit.__globals__
    blocks = names["fed0_blocks"]
    before = [block[0].copy() for block in blocks]
    np.testing.assert_array_equal([float(step(x)) for x in given], given.sum((1, 2)))
    for block, copy in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(block[0], copy)
    step(given[1].copy())
    assert any((block[0] == given[1]).all() for block in blocks)


def test_fetched_batches_that_wait_are_not_overwritten() -> None:
    step, results, expected = slow_step(), [], []
    array = np.ones((6 * LARGE[1], LARGE[2]), "float32") * np.arange(6 * LARGE[1])[:, None]
    array = array.astype("float32")
    taker, random = RowTaker(array), np.random.default_rng(1)
    for _ in range(12):
        order = random.permutation(len(array))
        results += [step(batch) for batch in batches_of(taker, order)]
        expected += list(array[order].reshape(-1, *LARGE[1:]).sum((1, 2)))
    np.testing.assert_allclose([float(x) for x in results], expected, rtol=1e-6)
