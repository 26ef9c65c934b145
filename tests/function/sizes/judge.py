"""The judge: one case, run at exact shapes and at sizes that vary, and the two compared.

    case -> built -> one step, compiled twice over the same variables
         -> for each size, and each filling of the padding: both run from the same state
         -> the worst difference, and what the ledger says of refusals -> Verdict

Gradients are compared, never weights that an optimizer moved: Adam makes a full step of a gradient
that is zero but for rounding. What a run changes (statistics, metrics, seeds) is put back before
the next, so that both draw the same numbers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

import trainstep as ts
from trainstep import testing

from .zoo import Built, Case

Size = tuple[int, int]

# Float32 sums of a few hundred numbers in another order differ by about 1e-6 of the largest.
TOLERANCE = 1e-5
# Gradients are relative to the largest; below this, all of them are taken for rounding of zero.
SMALLEST_GRADIENT = 1e-3
GRID = (16,)
FILLINGS = ("nan", "garbage")


@dataclass(frozen=True)
class Verdict:
    """What the judge found.

    Attributes:
        outcome: "exact", "refused" (exact too, but not by one program), "wrong" or "error".
        worst: The largest difference, relative as `difference` says.
        why: The reason of a refusal, where it is wrong, or the error.
        programs: How many programs were compiled for the sizes that vary.
        traces: How often the step's Python ran for them.
        entries: How many entries of each kind the ledger has.
    """

    outcome: str
    worst: float = 0.0
    why: str = ""
    programs: int = 0
    traces: int = 0
    entries: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


@dataclass(frozen=True)
class Results:
    """What one run computed, on the host."""

    loss: np.ndarray
    gradients: dict[str, np.ndarray]
    states: dict[str, np.ndarray]


class Bench:
    """A built case with its variables, ready to run again and again from the same state."""

    def __init__(self, case: Case) -> None:
        keras.utils.set_random_seed(17)
        self.case = case
        self.built: Built = case.build()
        models = self.built.models
        by_gradient = [v for model in models for v in model.trainable_variables]
        every = [v for model in models for v in model.variables]
        every += [v for metric in self.built.metrics for v in metric.variables]
        every += self.built.others
        self.trained = list({id(v): v for v in by_gradient}.values())
        # With the trained ones: a layer may write its own weights (spectral normalisation does).
        self.states = list({id(v): v for v in every}.values())
        self._start = [_host(v.value) for v in self.states]

    def data(self, n: int, t: int) -> dict[str, np.ndarray]:
        """The same arrays whenever the sizes are the same."""
        return self.built.data(n, t, np.random.default_rng(1000 * n + t))

    def step(self, batch: dict[str, Any]) -> Any:
        """The step that is compiled: loss, gradients, and what it left in the variables."""
        loss, gradients = ts.value_and_grad(self.built.loss_of, self.trained)(batch)
        return loss, gradients, [v.value for v in self.states]

    def run(self, compiled: Callable[[dict[str, np.ndarray]], Any], size: Size) -> Results:
        """One run from the start's state, which is there again afterwards."""
        try:
            loss, gradients, states = compiled(self.data(*size))
            # Copied to the host first: on torch, what came out may be the variable's own memory.
            return Results(
                _host(loss),
                {
                    f"{i} {v.path}": _host(g)
                    for i, (v, g) in enumerate(zip(self.trained, gradients, strict=True))
                },
                {
                    f"{i} {v.path}": _host(s)
                    for i, (v, s) in enumerate(zip(self.states, states, strict=True))
                },
            )
        finally:
            for variable, value in zip(self.states, self._start, strict=True):
                variable.assign(value)


def judge(case: Case, sizes: Sequence[Size]) -> Verdict:
    """Runs the case at each of the sizes that it takes, exactly and varying, and compares."""
    varying = None
    try:
        bench = Bench(case)
        varying = _varying(bench)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a refusal warns of is in the ledger, too
            worst, where = _compared(bench, varying, case.sized(sizes))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        if len(text) > 600:  # TensorFlow says where first, and what last
            text = f"{text[:200]} ... {text[-400:]}"
        return Verdict("error", float("inf"), text, **_counts(varying))
    refusals = [event for event in varying.ledger if event.kind == "refused"]
    why = "; ".join(dict.fromkeys("; ".join(event.changes) for event in refusals))
    if worst > TOLERANCE:
        return Verdict(
            "wrong", worst, f"{where}{' after: ' if why else ''}{why}", **_counts(varying)
        )
    return Verdict("refused" if refusals else "exact", worst, why, **_counts(varying))


def _compared(bench: Bench, varying: Any, sizes: Sequence[Size]) -> tuple[float, str]:
    """The worst difference over all sizes and fillings, and where it was."""
    exact = ts.function(bench.step, shapes="exact")
    worst, where = 0.0, ""
    for n, t in sizes:
        wanted = bench.run(exact, (n, t))
        for filling in FILLINGS if _pads() else ("",):
            with testing.filling(filling) if filling else contextlib.nullcontext():
                got = bench.run(varying, (n, t))
            off, name = difference(wanted, got)
            if off > worst:
                worst, where = off, f"{name} at n={n}, t={t} {filling}".strip()
    return worst, where


def sound(case: Case, sizes: Sequence[Size]) -> list[Results]:
    """Runs the case at exact shapes only; fails unless every loss and gradient is finite."""
    bench = Bench(case)
    exact = ts.function(bench.step)
    results = []
    for size in case.sized(sizes):
        result = bench.run(exact, size)
        again = bench.run(exact, size)
        assert np.isfinite(result.loss).all(), f"{case.name}: the loss is {result.loss} at {size}"
        for name, gradient in result.gradients.items():
            assert np.isfinite(gradient).all(), f"{case.name}: {name} is not finite at {size}"
        largest = max(np.abs(g).max() for g in result.gradients.values())
        assert largest > SMALLEST_GRADIENT, f"{case.name}: gradients are at most {largest}"
        off, name = difference(result, again)
        assert off <= TOLERANCE, f"{case.name}: {name} differs by {off} in a second run"
        results.append(result)
    return results


def difference(wanted: Results, got: Results) -> tuple[float, str]:
    """The largest difference of two runs, and the name of what differs.

    Gradients are relative to the largest element of all, losses and floating states to the largest
    of their own, or to 1. Integers, and the places of what is not finite, have to be the same.
    """
    largest = max((_size(g) for g in wanted.gradients.values()), default=0.0)
    found = {"loss": _off(wanted.loss, got.loss, max(1.0, _size(wanted.loss)))}
    for name, gradient in wanted.gradients.items():
        scale = max(SMALLEST_GRADIENT, largest)
        found[f"gradient {name}"] = _off(gradient, got.gradients[name], scale)
    for name, state in wanted.states.items():
        found[f"state {name}"] = _off(state, got.states[name], max(1.0, _size(state)))
    name = max(found, key=found.__getitem__)
    return found[name], name


def _varying(bench: Bench) -> Any:
    timed = {"batch": dict.fromkeys(bench.case.timed, 1)} if bench.case.timed else None
    shapes: Any = "dynamic"
    if _pads():
        shapes = ts.Shapes("bucket", grid=GRID, background=False)
    return ts.function(bench.step, shapes=shapes, dynamic=timed)


def _pads() -> bool:
    return keras.backend.backend() == "jax"


def _counts(varying: Any) -> dict[str, Any]:
    if varying is None:
        return {}
    entries = Counter(event.kind for event in varying.ledger)
    programs = sum(event.compile_seconds > 0 for event in varying.ledger)
    return {"programs": programs, "traces": entries["trace"], "entries": dict(entries)}


def _host(value: Any) -> np.ndarray:
    return np.array(ops.convert_to_numpy(value), copy=True)


def _size(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _off(wanted: np.ndarray, got: np.ndarray, scale: float) -> float:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return float("inf")
    if not np.issubdtype(wanted.dtype, np.floating):
        return 0.0 if np.array_equal(wanted, got) else float("inf")
    finite = np.isfinite(wanted)
    if not np.array_equal(wanted[~finite], got[~finite], equal_nan=True):
        return float("inf")
    apart = np.abs(wanted[finite].astype("float64") - got[finite])
    apart = np.where(np.isfinite(apart), apart, np.inf)
    return float(apart.max()) / scale if apart.size else 0.0
