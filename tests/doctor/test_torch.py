"""doctor on PyTorch: counts against a backend that counts, causes, modes, breaks, gradients."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("KERAS_BACKEND") != "torch":
    pytest.skip("for PyTorch", allow_module_level=True)

import torch
from torch._dynamo import convert_frame
from torch._dynamo.callback import callback_handler
from torch._dynamo.testing import CompileCounter

import trainstep
from trainstep._doctor import Doctor
from trainstep._doctor.records import Incident, Trace, read

scale = 2.0


class Config:
    step = 1


config = Config()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def witness() -> CompileCounter:
    """A backend that counts the graphs that it is given."""
    return CompileCounter()


def traces(found: Doctor) -> list[Trace]:
    return [each for each in found.log.records if isinstance(each, Trace)]


def happened(found: Doctor, kind: str) -> list[Incident]:
    records = found.log.records
    return [each for each in records if isinstance(each, Incident) and each.kind == kind]


def causes(found: Doctor) -> list[list[tuple[str, str]]]:
    return [[tuple(cause) for cause in each.causes] for each in traces(found)]


def notes(found: Doctor) -> list[str]:
    return [note.text for note in found.report.notes]


def line_of(fn: Callable[..., Any], text: str) -> int:
    """The line of a function that has a text in it."""
    lines, first = inspect.getsourcelines(fn)
    return next(first + i for i, line in enumerate(lines) if text in line)


# Causes -----------------------------------------------------------------------------------------


def test_a_size_costs_one_more_program_and_then_varies(witness: CompileCounter) -> None:
    @torch.compile(backend=witness)
    def step(x: Any, y: Any) -> Any:
        return x * 2 + y.sum()

    with trainstep.doctor() as found:
        for n in (10, 20, 30, 20):
            step(torch.ones(n), torch.ones(n, 2))

    assert len(traces(found)) == witness.frame_count == 2
    first, second = traces(found)
    assert first.causes == []
    assert causes(found)[1] == [
        ("shape", "x: float32[10] -> float32[20]"),
        ("shape", "y: float32[10,2] -> float32[20,2]"),
    ]
    assert second.nearest == first.number
    assert "treats size 0 of x as dynamic" in second.note
    assert found.report.retraces == 1
    assert notes(found) == []


def test_a_trace_tells_where_and_what_it_cost() -> None:
    def step(x: Any) -> Any:
        return x * 2

    compiled = torch.compile(step, backend="eager")
    with trainstep.doctor() as found:
        compiled(torch.ones(3))

    (trace,) = traces(found)
    assert trace.engine == "torch"
    assert trace.function.endswith("step")
    assert trace.defined.line == step.__code__.co_firstlineno
    assert trace.called.file == __file__
    assert trace.called.text == "compiled(torch.ones(3))"
    assert trace.signature == "x: float32[3]"
    assert 0 < trace.seconds["trace"] < 60


def test_without_dynamic_sizes_each_size_is_a_program(witness: CompileCounter) -> None:
    step = torch.compile(lambda x: x * 2, backend=witness, dynamic=False)

    with trainstep.doctor() as found:
        for n in (3, 4, 5):
            step(torch.ones(n))

    assert len(traces(found)) == witness.frame_count == 3
    assert all("vary" not in each.note for each in traces(found))


def change_global(value: Any) -> None:
    globals()["scale"] = value


def of_global(x: Any) -> Any:
    return x * scale


def of_attribute(x: Any) -> Any:
    return x * config.step


def picky(x: Any, flag: Any) -> Any:
    return x * 2 if flag else x + 1


CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]], str, str]] = {
    "dtype": (
        lambda x: x * 2,
        [(torch.ones(3),), (torch.ones(3).double(),)],
        "dtype",
        "x: float32[3] -> float64[3]",
    ),
    "rank": (
        lambda x: x * 2,
        [(torch.ones(3),), (torch.ones(3, 3),)],
        "shape",
        "x: float32[3] -> float32[3,3]",
    ),
    "dict": (
        lambda batch: batch["x"] * 2,
        [({"x": torch.ones(3)},), ({"x": torch.ones(4)},)],
        "shape",
        "batch['x']: float32[3] -> float32[4]",
    ),
    "number": (lambda x, n: x * n, [(torch.ones(3), 2), (torch.ones(3), 3)], "number", "n: 2 -> 3"),
    "bool": (
        picky,
        [(torch.ones(3), True), (torch.ones(3), False)],
        "static",
        "flag: True -> False",
    ),
    "string": (
        lambda x, name: x * len(name) * 2,
        [(torch.ones(3), "a"), (torch.ones(3), "bb")],
        "static",
        "name: 'a' -> 'bb'",
    ),
    "none": (
        lambda x, y=None: x * 2 if y is None else x * y,
        [(torch.ones(3),), (torch.ones(3), torch.ones(3))],
        "structure",
        "y: None -> float32[3]",
    ),
    "length": (
        lambda xs: sum(xs) * 2,
        [([torch.ones(3)] * 2,), ([torch.ones(3)] * 3,)],
        "structure",
        "xs: length 2 -> 3",
    ),
    "flag": (
        lambda x: x * 2,
        [(torch.ones(3),), (torch.ones(3, requires_grad=True),)],
        "flag",
        "x: requires_grad False -> True",
    ),
    "function": (
        lambda x, fn: fn(x),
        [(torch.ones(3), lambda x: x * 2), (torch.ones(3), lambda x: x * 3)],
        "function",
        "fn: another function",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_told_in_words_of_the_user(name: str, witness: CompileCounter) -> None:
    fn, calls, kind, text = CASES[name]
    step = torch.compile(fn, backend=witness)

    with trainstep.doctor() as found:
        for args in (*calls, *calls):
            step(*args)

    assert len(traces(found)) == witness.frame_count == 2
    assert causes(found) == [[], [(kind, text)]]


def test_a_global_that_changes_is_named(witness: CompileCounter) -> None:
    change_global(2.0)
    step = torch.compile(of_global, backend=witness)

    with trainstep.doctor() as found:
        for value in (2.0, 3.0, 2.0):
            change_global(value)
            step(torch.ones(3))

    assert len(traces(found)) == witness.frame_count
    assert causes(found)[1] == [("capture", "global scale: 2.0 -> 3.0")]


def test_an_attribute_that_changes_is_named(witness: CompileCounter) -> None:
    config.step = 2
    step = torch.compile(of_attribute, backend=witness)

    with trainstep.doctor() as found:
        step(torch.ones(3))
        config.step = 3
        step(torch.ones(3))

    assert len(traces(found)) == witness.frame_count == 2
    assert causes(found)[1] == [("capture", "global config.step: 2 -> 3")]


def test_an_attribute_of_a_module_is_named_and_does_not_come_to_vary(
    witness: CompileCounter,
) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = 1

        def forward(self, x: Any) -> Any:
            return x * self.k * 2

    net = Net()
    step = torch.compile(net, backend=witness)
    with trainstep.doctor() as found:
        for net.k in (1, 2, 3):
            step(torch.ones(3))

    assert len(traces(found)) == witness.frame_count == 3
    assert causes(found)[1:] == [[("capture", "self.k: 1 -> 2")], [("capture", "self.k: 2 -> 3")]]
    assert traces(found)[1].note == ""


def test_a_function_that_is_made_in_a_loop_is_told(witness: CompileCounter) -> None:
    def make(name: str) -> Any:
        return lambda x: x * len(name) * 2

    with trainstep.doctor() as found:
        for name in ("a", "bb", "ccc"):
            torch.compile(make(name), backend=witness)(torch.ones(3))

    assert len(traces(found)) == witness.frame_count == 3
    assert [[kind for kind, _ in each] for each in causes(found)] == [
        [],
        ["function"],
        ["function"],
    ]
    assert "name: 'a' -> 'bb'" in causes(found)[1][0][1]
    assert len(found.report.functions) == 1


def test_two_models_of_one_class_are_two_functions(witness: CompileCounter) -> None:
    class Net(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, size)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    nets = [Net(4), Net(5)]
    with trainstep.doctor() as found:
        for net in nets:
            torch.compile(net, backend=witness)(torch.ones(2, 3))

    assert len(traces(found)) == witness.frame_count == 2
    assert found.report.retraces == 0
    assert len(found.report.functions) == 2


def test_dropping_all_programs_is_told(witness: CompileCounter) -> None:
    step = torch.compile(lambda x: x * 2, backend=witness)

    with trainstep.doctor() as found:
        step(torch.ones(3))
        torch._dynamo.reset()
        step(torch.ones(3))
        step(torch.ones(4))

    assert len(traces(found)) == witness.frame_count == 3
    assert "torch._dynamo.reset()" in causes(found)[1][0][1]
    assert causes(found)[2] == [("shape", "x: float32[3] -> float32[4]")]


# Cures ------------------------------------------------------------------------------------------


def dynamic_size(witness: CompileCounter) -> None:
    step = torch.compile(lambda x: x * 2, backend=witness, dynamic=True)
    for n in (3, 4, 5):
        step(torch.ones(n))


def marked_size(witness: CompileCounter) -> None:
    step = torch.compile(lambda x: x * 2, backend=witness)
    for n in (3, 4, 5):
        x = torch.ones(n)
        torch._dynamo.mark_dynamic(x, 0)
        step(x)


def tensor_for_a_number(witness: CompileCounter) -> None:
    step = torch.compile(lambda x, n: x * n, backend=witness)
    for n in (2, 3, 4):
        step(torch.ones(3), torch.tensor(n))


def tensor_for_a_global(witness: CompileCounter) -> None:
    step = torch.compile(of_global, backend=witness)
    for value in (2.0, 3.0, 4.0):
        change_global(torch.tensor(value))
        step(torch.ones(3))


def buffer_for_an_attribute(witness: CompileCounter) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.tensor(1))

        def forward(self, x: Any) -> Any:
            return x * self.k

    net = Net()
    step = torch.compile(net, backend=witness)
    for net.k in map(torch.tensor, (1, 2, 3)):
        step(torch.ones(3))


def tensor_for_an_item(witness: CompileCounter) -> None:
    def step(x: Any) -> Any:
        n = x.sum()
        return torch.where(n > 2, x * n, x + n)

    compiled = torch.compile(step, backend=witness)
    for value in (0.1, 0.3, 3.0):
        compiled(torch.full((3,), value))


def function_made_once(witness: CompileCounter) -> None:
    step = torch.compile(lambda x, n: x * n, backend=witness)
    for n in (2, 3, 4):
        step(torch.ones(3), torch.tensor(n))


CURED = [
    dynamic_size,
    marked_size,
    tensor_for_a_number,
    tensor_for_a_global,
    buffer_for_an_attribute,
    tensor_for_an_item,
    function_made_once,
]


@pytest.mark.parametrize("cured", CURED)
def test_the_cure_leaves_one_program(cured: Any, witness: CompileCounter) -> None:
    with trainstep.doctor() as found:
        cured(witness)

    assert witness.frame_count == len(traces(found)) == 1
    assert found.report.findings == []


# Modes ------------------------------------------------------------------------------------------


def test_the_first_one_without_gradients_is_needed(witness: CompileCounter) -> None:
    step = torch.compile(lambda x: x * 2, backend=witness)

    with trainstep.doctor() as found:
        step(torch.ones(3))
        with torch.no_grad():
            step(torch.ones(3))
            step(torch.ones(4))
        step(torch.ones(3))

    assert len(traces(found)) == witness.frame_count == 3
    assert [each.mode for each in traces(found)] == ["", "no grad", "no grad"]
    assert [cause[0][0] if cause else "" for cause in causes(found)] == ["", "mode", "shape"]
    assert found.report.retraces == 1


def test_the_first_one_in_eval_mode_is_needed(witness: CompileCounter) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    step = torch.compile(net, backend=witness)

    with trainstep.doctor() as found:
        step(torch.ones(2, 3))
        net.eval()
        step(torch.ones(2, 3))
        net.train()
        step(torch.ones(2, 3))
        step(torch.ones(4, 3))

    assert len(traces(found)) == witness.frame_count == 3
    assert [each.mode for each in traces(found)] == ["", "eval", ""]
    assert {each.function for each in traces(found)} == {"Sequential.forward"}
    assert causes(found)[2] == [("shape", "input 0: float32[2,3] -> float32[4,3]")]
    assert found.report.retraces == 1


def test_the_first_step_of_an_optimizer_is_another_program() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    update = torch.compile(optimizer.step, backend="eager")

    with trainstep.doctor() as found:
        for _ in range(4):
            (weight * 2).sum().backward()
            update()
            optimizer.zero_grad()

    assert found.report.retraces == 0


# Graph breaks -----------------------------------------------------------------------------------


def printing(x: Any) -> Any:
    y = x * 2
    print("between")
    return y + 1


def taking(x: Any) -> Any:
    n = x.sum().item()
    if n > 2:
        return x * n
    return x + n


def branching(x: Any) -> Any:
    y = x * 2
    if y.sum() > 0:
        return y + 1
    return y - 1


def outer(x: Any) -> Any:
    return printing(x) * 3


def looping(x: Any) -> Any:
    for _ in range(2):
        x = x + 1
        print("in a loop")
    return x


def test_a_break_is_at_its_line_and_its_parts_are_of_the_function(witness: CompileCounter) -> None:
    step = torch.compile(printing, backend=witness)

    with trainstep.doctor() as found:
        step(torch.ones(3))
        step(torch.ones(3))

    line = line_of(printing, "print(")
    (broke,) = happened(found, "graph-breaks")
    assert (broke.site.file, broke.site.line) == (__file__, line)
    assert broke.function == "printing"
    assert broke.what == "graph break: `print` is called"
    assert len(traces(found)) == witness.frame_count == 2
    assert [each.mode for each in traces(found)] == ["", f"after line {line}"]
    assert traces(found)[1].called.text == "step(torch.ones(3))"
    assert len(found.report.functions) == 1
    assert found.report.retraces == 0


def test_a_number_out_of_a_tensor_is_told_twice_over(witness: CompileCounter) -> None:
    step = torch.compile(taking, backend=witness)

    with trainstep.doctor() as found:
        for value in (0.1, 0.2, 0.3, 3.0):
            step(torch.full((3,), value))

    broke = happened(found, "graph-breaks")
    assert {each.site.line for each in broke} == {line_of(taking, ".item()")}
    assert "a tensor becomes a Python number" in broke[0].what
    assert len(traces(found)) == witness.frame_count
    assert "item" in {kind for each in causes(found) for kind, _ in each}


def test_both_sides_of_a_branch_are_needed(witness: CompileCounter) -> None:
    step = torch.compile(branching, backend=witness)

    with trainstep.doctor() as found:
        step(torch.ones(3))
        step(-torch.ones(3))

    (broke,) = happened(found, "graph-breaks")
    assert broke.site.line == line_of(branching, "if y.sum()")
    assert "branches on the value of a tensor" in broke.what
    assert len(traces(found)) == witness.frame_count == 3
    assert found.report.retraces == 0


def test_a_break_in_a_function_that_is_called_is_one_finding() -> None:
    step = torch.compile(outer, backend="eager")

    with trainstep.doctor() as found:
        step(torch.ones(3))

    (finding,) = [each for each in found.report.findings if each.kind == "graph-breaks"]
    assert (finding.function, finding.count) == ("printing", 2)
    assert {each.name for each in found.report.functions} == {"outer", "printing"}


def test_a_break_in_a_loop_leaves_the_function_uncompiled(witness: CompileCounter) -> None:
    step = torch.compile(looping, backend=witness)

    with trainstep.doctor() as found:
        step(torch.ones(3))
        step(torch.ones(3))

    (broke,) = happened(found, "graph-breaks")
    assert broke.site.line == line_of(looping, "print(")
    assert "the whole function runs uncompiled" in broke.what
    assert witness.frame_count == 0
    assert [each.failed for each in traces(found)] == ["Unsupported"]


def test_an_error_of_the_users_is_raised_as_without_doctor() -> None:
    @torch.compile(backend="eager")
    def wrong(x: Any) -> Any:
        raise ValueError("of the user's")

    with trainstep.doctor() as found, pytest.raises(ValueError, match="of the user's"):
        wrong(torch.ones(3))

    assert traces(found) == []
    assert notes(found) == []


def test_a_break_where_none_may_be_is_an_error_and_no_finding() -> None:
    step = torch.compile(printing, backend="eager", fullgraph=True)

    with trainstep.doctor() as found, pytest.raises(torch._dynamo.exc.Unsupported):
        step(torch.ones(3))

    assert [each.failed for each in traces(found)] == ["Unsupported"]
    assert happened(found, "graph-breaks") == []


# The limit --------------------------------------------------------------------------------------


def test_the_limit_is_told_when_it_is_reached(witness: CompileCounter) -> None:
    step = torch.compile(lambda x, name: x * len(name) * 2, backend=witness)
    limit = torch._dynamo.config.recompile_limit

    with trainstep.doctor() as found:
        for n in range(limit + 3):
            step(torch.ones(3), "a" * n)
            if n == limit:
                assert len(happened(found, "recompile-limit")) == 1

    assert len(traces(found)) == witness.frame_count == limit
    (reached,) = happened(found, "recompile-limit")
    assert f"recompile_limit` = {limit}" in reached.what
    assert reached.site.text == 'step(torch.ones(3), "a" * n)'
    assert "name: " in reached.value
    assert found.report.findings[0].kind == "recompile-limit"


# Gradients --------------------------------------------------------------------------------------


def weight() -> Any:
    return torch.nn.Parameter(torch.ones(3))


def eager(found: Doctor) -> list[tuple[str, int]]:
    return [(each.site.text, each.count) for each in found.report.findings if each.kind == "eager"]


def test_gradients_in_python_are_counted_by_line() -> None:
    w = weight()

    with trainstep.doctor() as found:
        for _ in range(5):
            (w * 2).sum().backward()
        for _ in range(4):
            torch.autograd.grad((w * 2).sum(), [w])
        for _ in range(3):
            torch.autograd.grad((w * 3).sum(), [w])  # too few for a loop

    assert sorted(eager(found)) == [
        ("(w * 2).sum().backward()", 5),
        ("torch.autograd.grad((w * 2).sum(), [w])", 4),
    ]


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_gradient_of_a_compiled_loss_is_not_in_python(backend: str) -> None:
    w = weight()
    loss = torch.compile(lambda: (w * 2).sum(), backend=backend)

    with trainstep.doctor() as found:
        for _ in range(5):
            (loss() + 1).backward()

    assert found.report.findings == []
    assert len(traces(found)) == 1


def test_a_loop_in_python_after_a_compiled_one_is_counted() -> None:
    w = weight()
    loss = torch.compile(lambda: (w * 2).sum(), backend="aot_eager")

    with trainstep.doctor() as found:
        for _ in range(100):
            loss().backward()
        for _ in range(5):
            (w * 3).sum().backward()

    assert eager(found) == [("(w * 3).sum().backward()", 5)]
    assert "at least" not in str(found)


def test_a_line_that_was_compiled_before_is_told_with_what_is_known() -> None:
    w = weight()
    compiled = torch.compile(lambda: (w * 2).sum(), backend="aot_eager")

    def train(loss: Callable[[], Any], steps: int) -> None:
        for _ in range(steps):
            loss().backward()

    with trainstep.doctor() as found:
        train(compiled, 1000)
        train(lambda: (w * 2).sum(), 400)

    ((line, count),) = eager(found)
    assert line == "loss().backward()"
    assert 400 - 256 <= count <= 400  # how soon it is noticed
    assert "the count is a lower bound" in " ".join(str(found).split())


def test_gradients_that_a_library_takes_are_counted_by_the_users_line() -> None:
    w, library = weight(), {"__name__": "library"}
    code = "def inner(loss):\n    loss.backward()\ndef take(loss):\n    inner(loss)\n"
    exec(compile(code, "/usr/lib/site-packages/library.py", "exec"), library)
    take: Any = library["take"]
    compiled = torch.compile(lambda: (w * 2).sum(), backend="aot_eager")

    with trainstep.doctor() as found:
        for _ in range(7):
            take((w * 2).sum())
            take((w * 3).sum())
            take(compiled())
        for _ in range(9):
            (w * 4).sum().backward()

    assert sorted(eager(found)) == [
        ("(w * 4).sum().backward()", 9),
        ("take((w * 2).sum())", 7),
        ("take((w * 3).sum())", 7),
    ]


def test_a_gradient_asks_its_log_as_before(caplog: pytest.LogCaptureFixture) -> None:
    log, w = torch.autograd.graph.log, weight()

    with trainstep.doctor() as found:
        quiet = log.getEffectiveLevel()
        for level in (logging.WARNING, logging.DEBUG, logging.WARNING):
            with caplog.at_level(level, log.name):
                (w * 2).sum().backward()
                assert log.getEffectiveLevel() == level
        assert log.getEffectiveLevel() == quiet

    assert {each.levelno for each in caplog.records} == {logging.DEBUG}
    assert notes(found) == []


def test_no_frame_of_doctors_is_below_a_gradient() -> None:
    w, files = weight(), set()

    def look(gradient: Any) -> None:
        frame = sys._getframe()
        while frame is not None:
            files.add(frame.f_code.co_filename)
            frame = frame.f_back

    w.register_hook(look)
    with trainstep.doctor():
        (w * 2).sum().backward()

    assert __file__ in files
    assert not [each for each in files if "_doctor" in each]


def test_a_gradient_inside_of_one_is_not_counted() -> None:
    from torch.utils.checkpoint import checkpoint

    w = weight()
    with trainstep.doctor() as found:
        for _ in range(5):
            checkpoint(lambda x: (x * 2).sum(), w, use_reentrant=True).backward()

    assert [count for _, count in eager(found)] == [5]


def test_what_doctor_runs_at_a_gradient_is_not_compiled() -> None:
    def graphs() -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        w, witness = weight(), CompileCounter()

        @torch.compile(backend=witness)
        def step(x: Any) -> Any:
            loss = (w * x).sum()
            loss.backward()
            return loss * 2

        for _ in range(5):
            step(torch.ones(3))
        return witness.frame_count, torch._dynamo.utils.counters["frames"]["total"]

    without = graphs()
    with trainstep.doctor() as found:
        assert graphs() == without

    assert eager(found) == []
    assert happened(found, "graph-breaks")[0].what == "graph break: `backward()` is called"


def test_fit_in_python_is_told_at_the_line_of_fit() -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((32, 3), "float32")
    with trainstep.doctor() as found:
        model.fit(x, x[:, :1], batch_size=8, verbose=0)

    assert eager(found) == [("model.fit(x, x[:, :1], batch_size=8, verbose=0)", 4)]


def test_a_backward_program_belongs_to_its_function() -> None:
    from torch._dynamo.callback import CallbackTrigger

    step = torch.compile(lambda x: x * 2, backend="eager")
    with trainstep.doctor() as found:
        step(torch.ones(3))
        before = dict(traces(found)[0].seconds)
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"):
            pass

    (trace,) = traces(found)
    assert trace.seconds["compile"] > before.get("compile", 0.0)


@pytest.mark.slow
def test_a_model_of_keras_that_is_compiled_is_one_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keras
    import numpy as np

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn: real(fn, backend="eager"))
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    x = np.ones((6, 3), "float32")
    model(x)
    with trainstep.doctor() as found:
        model.predict(x, batch_size=4, verbose=0)

    (function,) = found.report.functions
    assert function.keras
    assert function.name == f"predict function of model {model.name!r}"
    assert {each.called.text for each in traces(found)} == {
        "model.predict(x, batch_size=4, verbose=0)"
    }
    assert function.retraces == 1
    assert causes(found)[-1][0][0] == "shape"


# Leaving things as they are ---------------------------------------------------------------------


def test_a_clean_script_has_no_findings() -> None:
    w = weight()
    step = torch.compile(lambda x: (x * w).sum(), backend="aot_eager")

    with trainstep.doctor() as found:
        for _ in range(4):
            step(torch.ones(3)).backward()

    assert found.report.findings == []
    assert found.report.retraces == 0
    assert notes(found) == []


def test_a_model_dies_as_without_doctor() -> None:
    gc.disable()
    try:
        net = torch.nn.Linear(3, 3)
        step = torch.compile(net, backend="aot_eager")
        with trainstep.doctor() as found:
            step(torch.ones(2, 3)).sum().backward()
            step(torch.ones(4, 3)).sum().backward()
            dead = weakref.ref(net), weakref.ref(net.weight)
            del net, step
            torch._dynamo.reset()
            alive = [each() is not None for each in dead]
    finally:
        gc.enable()

    assert len(traces(found)) == 2
    assert alive == [False, False]


def test_all_is_put_back() -> None:
    names = ("_compile", "get_and_maybe_log_recompilation_reasons", "exceeds_recompile_limit")
    before = [getattr(convert_frame, name) for name in names]
    log, callbacks = torch.autograd.graph.log, list(callback_handler.start_callbacks)

    with trainstep.doctor():
        assert "getEffectiveLevel" in vars(log)
        assert convert_frame._compile is not before[0]
        torch._dynamo.reset()

    assert [getattr(convert_frame, name) for name in names] == before
    assert "getEffectiveLevel" not in vars(log)
    assert "clear" not in vars(callback_handler)
    assert callback_handler.start_callbacks == callback_handler.end_callbacks == callbacks


def test_a_version_that_lacks_something_is_watched_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, witness: CompileCounter
) -> None:
    told = "get_and_maybe_log_recompilation_reasons"
    real = getattr(convert_frame, told)
    found = Doctor()
    with monkeypatch.context() as gone:
        gone.delattr(convert_frame, told)
        found.start()
    assert getattr(convert_frame, told) is real
    step = torch.compile(lambda x: x * 2, backend=witness)
    for n in (3, 4):
        step(torch.ones(n))
    found.stop()

    assert len(notes(found)) == 1
    assert told in notes(found)[0]
    assert causes(found) == [[], [("shape", "x: float32[3] -> float32[4]")]]


def test_a_version_whose_gradients_do_not_ask_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", lambda *args: None)

    with trainstep.doctor() as found:
        pass

    assert "does not read the level" in notes(found)[0]


def test_what_has_happened_is_written_at_once(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    step = torch.compile(lambda x: x * 2, backend="eager")

    with Doctor(path=str(file)):
        step(torch.ones(3))
        step(torch.ones(4))
        written = read(file.read_text().splitlines())

    kept = [each for each in written if isinstance(each, Trace)]
    assert [len(each.causes) for each in kept] == [0, 1]
    assert all(each.seconds for each in kept)


def test_threads_are_told_apart(witness: CompileCounter) -> None:
    def work(name: str) -> None:
        step = torch.compile(lambda x: x * len(name) * 2, backend=witness)
        step(torch.ones(3))

    with trainstep.doctor() as found:
        threads = [threading.Thread(target=work, args=("a" * n,)) for n in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(traces(found)) == witness.frame_count == 3
    assert all(not each.inside for each in traces(found))
    assert notes(found) == []


def test_our_own_functions_are_told_of_once() -> None:
    import keras

    step = trainstep.function(lambda x: keras.ops.sum(x * 2))
    with trainstep.doctor() as found:
        step(torch.ones(3))

    assert [trace.engine for trace in traces(found)] == ["trainstep"]
