"""The table of the zoo: every case on every engine, exact or refused and why.

    KERAS_BACKEND=jax python -m tests.function.sizes.table judge jax.json
    python -m tests.function.sizes.table show jax.json tensorflow.json torch.json

`judge` runs all cases, or those whose names contain one of the words after the file, on the engine
that Keras runs on; `show` prints Markdown. `sound` runs all cases at exact shapes only.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from .judge import Verdict, judge, sound
from .zoo import CASES, ENGINES, Case

SIZES = ((5, 7), (11, 12), (16, 16), (1, 4))
_HEAD = """# The zoo of steps whose sizes vary

Written by `make docs` from what `tests/function/sizes` found; see [sizes.md](sizes.md). "exact": loss, gradients,
statistics and metrics agree with those of the exact shapes to 1e-5 of the largest, at four sizes; on
JAX with NaN and with large noise in the padding. "refused": it runs at its exact shapes, and says why.
"""


def chosen(words: Sequence[str], engine: str) -> list[Case]:
    """The cases for an engine whose names contain one of the words; all without words."""
    named = [c for c in CASES.values() if not words or any(word in c.name for word in words)]
    return [case for case in named if engine in case.engines]


def write(path: Path, words: Sequence[str] = ()) -> None:
    """Judges the cases on the current engine, one line each, and writes the verdicts."""
    engine = keras.backend.backend()
    cases: dict[str, Any] = {}
    for case in chosen(words, engine):
        started = time.perf_counter()
        verdict = judge(case, SIZES)
        seconds = time.perf_counter() - started
        cases[case.name] = verdict.as_json() | {"seconds": round(seconds, 2)}
        flag = "" if verdict.outcome == case.expects(engine) else " <- unexpected"
        words = f"{verdict.outcome} {verdict.worst:.1e} {seconds:.1f} s {verdict.why[:200]}{flag}"
        print(f"{case.name}: {words}", flush=True)
        path.write_text(json.dumps({"engine": engine, "cases": cases}, indent=1))
    print(dict(Counter(each["outcome"] for each in cases.values())))


def show(paths: Sequence[Path]) -> str:
    """Markdown of what several engines found."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        content = json.loads(path.read_text())
        found[content["engine"]] = content["cases"]
    lines = ["| case | group | JAX | TensorFlow | torch |", "|---|---|---|---|---|"]
    for case in CASES.values():
        cells = [_cell(case, engine, found.get(engine, {})) for engine in ENGINES]
        lines.append(f"| {case.name} | {case.group} | {' | '.join(cells)} |")
    return "\n".join([_HEAD, *_totals(found), "", *lines])


_REFUSED = "cannot be recorded with dynamic sizes: "


def _cell(case: Case, engine: str, verdicts: dict[str, Any]) -> str:
    if engine in case.unfit:
        return f"cannot run: {case.unfit[engine]}"
    verdict = verdicts.get(case.name)
    if verdict is None:
        return "not run"
    known = {name: verdict[name] for name in Verdict.__dataclass_fields__}
    judged = Verdict(**known)
    words = (
        f"{judged.outcome} ({judged.worst:.0e})" if judged.outcome == "wrong" else judged.outcome
    )
    why = " ".join(judged.why.split()).removeprefix(_REFUSED)[:160].replace("|", "\\|")
    return f"{words}: {why}" if why else words


def _totals(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for engine, verdicts in found.items():
        counts = Counter(verdict["outcome"] for verdict in verdicts.values())
        parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        worst = max((v["worst"] for v in verdicts.values() if v["outcome"] == "exact"), default=0)
        lines.append(f"* {engine}: {parts}; the worst of the exact ones is {worst:.1e}")
    return lines


def check(words: Sequence[str]) -> int:
    """Runs cases at exact shapes; prints those that fail, and returns how many."""
    failed = 0
    for case in chosen(words, keras.backend.backend()):
        started = time.perf_counter()
        try:
            losses = [float(result.loss) for result in sound(case, ((5, 7), (16, 16)))]
            print(f"{case.name}: {losses} {time.perf_counter() - started:.1f} s", flush=True)
        except Exception as error:
            failed += 1
            print(f"{case.name}: FAILED {type(error).__name__}: {str(error)[:400]}", flush=True)
    return failed


def main(arguments: Sequence[str]) -> int:
    """The command."""
    what, *rest = arguments or ("",)
    if what == "judge" and rest:
        write(Path(rest[0]), rest[1:])
    elif what == "show" and rest:
        print(show([Path(path) for path in rest]))
    elif what == "sound":
        return min(1, check(rest))
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
