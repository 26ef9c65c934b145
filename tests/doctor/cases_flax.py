"""What doctor has to say on Flax: linen, whose modules JAX never sees, and nnx, which hands it
something else than the user's objects.

trainstep does not need Flax: it is installed with the tools for tests.
"""

from __future__ import annotations

from .case import Again, Case, Found, effects, retraced, times

LINEN = [
    Case(
        "flax_short_batch",
        **retraced(
            "step",
            Again(
                "call",
                "shape",
                ("x: float32[8,4] -> float32[4,4]", "y: float32[8,1] -> float32[4,1]"),
            ),
        ),
        engine="jax",
    ),
    Case(
        "flax_apply",
        traces={"apply": 3},
        again={"apply": (Again("call", "shape", ("x: float32[8,4] -> float32[4,4]",)),)},
        found=(
            Found("retraces", cause="shape", says=("apply of Net",)),
            Found("stale", "read", says=("factor",), before="1.0", now="2.0"),
        ),
    ),
    Case(
        "flax_inside_module",
        traces={"step": 1},
        prints={"calls": 1},
        found=(
            *effects("count", "draw"),
            Found("stale", "read", says=("temperature",), before="1.0", now="4.0"),
        ),
    ),
    Case(
        "flax_stale_state",
        traces={"step": 1},
        found=(
            Found("stale", "slope", says=("slope",), before="0.0", now="0.2"),
            Found("stale", "scale", says=("config", "scale"), before="1.0", now="3.0"),
        ),
    ),
]

NNX = [
    Case(
        "flax_gradient",
        **retraced("loss", Again("call", "shape", ("x: float32[8,4] -> float32[3,4]",))),
    ),
    Case(
        "flax_attribute",
        **retraced(
            "step",
            Again("call", "static", ("model.scale: 1.0 -> 2.0",)),
            Again("call", "static", ("model.scale: 2.0 -> 3.0",)),
        ),
        engine="jax",
    ),
    Case(
        "flax_structure",
        traces={"forward": 3},
        again={
            "forward": (
                Again("more", "structure", ("model.shift: absent -> float32[4]",)),
                Again("larger", "shape", ("model.shift: float32[4] -> float32[8,4]",)),
            )
        },
        found=(Found("retraces", cause="structure"), Found("retraces", cause="shape")),
    ),
    Case("flax_jit_in_loop", **retraced("step", *times(2, Again("call", "function")))),
    Case(
        "flax_stale_nnx",
        traces={"forward": 1},
        prints={"value": 4.0},
        found=(Found("stale", "read", says=("temperature",), before="1.0", now="4.0"),),
    ),
    Case("flax_eager", found=(Found("eager", "gradient", count=5),)),
]

CLEAN = [
    Case("flax_clean_linen", traces={"step": 1, "evaluate": 1}, prints={"steps": 5}),
    Case("flax_clean_nnx", traces={"step": 1, "evaluate": 1}, prints={"steps": 5}),
    Case("flax_clean_variable", traces={"step": 1}, prints={"scale": 3.0}),
]

CASES = [*LINEN, *NNX, *CLEAN]
