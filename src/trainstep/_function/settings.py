"""The settings of one step: checked once, then passed on as one object.

The keyword arguments of `function` and `Trainer` become one `StepSettings`, which every stage of a
call gets whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep import _engines
from trainstep._engines import Engine, Options
from trainstep._function.policies import Policies
from trainstep._function.sizes.policy import Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How a step is traced, compiled and run.

    Attributes:
        name: The step's name in messages and in the ledger; "" for that of the Python function.
        signature: The declared signature, if any.
        max_traces: The largest number of traces; None: no limit.
        shapes: The policy for dynamic sizes.
        dynamic: The axes that are dynamic besides the first, by parameter.
        options: Options of the compiler.
        policies: The policies for side effects, captured values and values that are not finite.
        engine: The engine.
        inlined: The function that a call inside another step runs instead, if any.
        check: Checks the values of a call before it is traced.
        is_trainer_step: Whether it is the step of a `Trainer`, whose code is not the user's.
        uses: Returns objects that the step uses but its code does not mention.
    """

    name: str = ""
    signature: Sequence[Any] | None = None
    max_traces: int | None = None
    shapes: Shapes = field(default_factory=Shapes)
    dynamic: Mapping[str, Any] | None = None
    options: Options = field(default_factory=Options)
    policies: Policies = field(default_factory=Policies)
    engine: Engine = field(default_factory=_engines.current)
    inlined: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    is_trainer_step: bool = False
    uses: Callable[[], Sequence[Any]] = list

    @property
    def is_shared(self) -> bool:
        """Whether several processes run the step together."""
        return self.options.layout is not None and self.options.layout.processes > 1
