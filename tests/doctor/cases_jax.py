"""What doctor has to say on JAX, bare and under Keras.

JAX's compiled calls run no Python, so a value that went stale is noticed at the next trace or at
exit, and not on the line of a call.
"""

from __future__ import annotations

from .case import Again, Case, Found, effects, retraced, times


def stale(script: str, function: str, value: float, *says: str, **more: str) -> Case:
    """A script whose function keeps the value of its trace."""
    finding = Found("stale", f"read|def {function}", says=says, **more)
    return Case(script, traces={function: 1}, prints={"value": value}, found=(finding,))


BARE = [
    Case(
        "jax_shape",
        **retraced(
            "step",
            Again(
                "call",
                "shape",
                ("x: float32[8,5] -> float32[12,5]", "y: float32[8,1] -> float32[12,1]"),
            ),
            Again("call", "shape", ("x: float32[", "-> float32[5,5]", "-> float32[5,1]")),
        ),
        engine="jax",
    ),
    Case(
        "jax_dtype",
        **retraced("total", Again("int", "dtype", ("batch: float32[4,3] -> int32[4,3]",))),
    ),
    Case("jax_weak", **retraced("scaled", Again("array", "weak", ("rate",)))),
    Case("jax_number", **retraced("scaled", Again("call", "number|dtype", ("rate",)))),
    Case("jax_static", **retraced("raised", *times(2, Again("call", "static", ("power",))))),
    Case(
        "jax_structure",
        **retraced(
            "forward",
            Again("bias", "structure", ("params", "bias")),
            Again("mask", "structure", ("mask",)),
        ),
    ),
    # Of the nearest earlier one; that it is 2 again in the end makes nothing stale.
    Case("jax_node", **retraced("apply", Again("call", "structure", ("2", "3")))),
    Case(
        "jax_two_objects",
        traces={"apply": 3},
        again={"apply": (Again("call", "shape", ("x: float32[2] -> float32[3]",)),)},
        found=(Found("retraces", cause="shape"),),
    ),
    Case("jax_lambda_in_loop", **retraced("<lambda>", *times(3, Again("call", "function")))),
    Case("jax_partial_in_loop", **retraced("scaled", *times(2, Again("call", "function")))),
    # The object is the same one all the time, so it is the function that is new.
    Case("jax_method_in_loop", **retraced("apply", *times(3, Again("call", "function")))),
    Case("jax_new_object", **retraced("apply", *times(3, Again("call", "instance", ("Scaler",))))),
    Case("jax_context", **retraced("product", Again("precision", "context"))),
    Case(
        "jax_sharding",
        traces={"double": 1},
        prints={"programs": 2},
        compilations={"double": 1},
        again={"double": (Again("second", "sharding", ("x",), what="compile"),)},
        found=(Found("compilations", cause="sharding", says=("double",)),),
    ),
    Case("jax_eager", found=(Found("eager", "gradient", count=5),)),
    Case("jax_eager_value", found=(Found("eager", "gradient", count=4),)),
    Case(
        "jax_side_effects",
        traces={"noisy": 1},
        prints={"distinct": 1, "steps": [1, 1]},
        found=effects("global", "append", "print", "random", "numpy", "time"),
    ),
    Case(
        "jax_leak",
        traces={"step": 1},
        prints={"outcome": "raised", "length": 1},
        found=(Found("leaks", "leak", says=("losses",)),),
    ),
    Case(
        "jax_leak_attribute",
        traces={"forward": 1},
        prints={"tracer": True},
        found=(Found("leaks", "leak", says=("hidden",)),),
    ),
    stale("jax_stale_global", "soften", 1.0, "temperature", before="1.0", now="4.0"),
    stale("jax_stale_closure", "scaled", 0.5, "rate", before="0.5", now="8.0"),
    stale("jax_stale_attribute", "of", 1.0, "margin", before="0.5", now="2.0"),
    stale("jax_stale_entry", "scaled", 0.5, "config", "rate"),
    stale("jax_stale_array", "looked_up", 3.0, "table"),
    Case("jax_small", small="small", may=frozenset({"compilations"})),
]

KERAS = [
    Case(
        "keras_short_batch",
        **retraced("train of net", Again("fit", "shape", ("[4,4]", "[2,4]"), via="fit")),
        engine="jax",
    ),
    Case(
        "keras_fit_then_batch",
        **retraced("train of net", Again("batch", "structure", via="train_on_batch")),
    ),
    Case(
        "keras_validation",
        traces={"train of net": 1, "test of net": 2},
        again={
            "test of net": (Again("fit", "shape", ("[4,4]", "[2,4]"), via="validation inside fit"),)
        },
        found=(Found("retraces", cause="shape", says=("net",)),),
    ),
    Case(
        "keras_predict_sizes",
        **retraced(
            "predict of net",
            Again("predict", "shape", ("[5,4]", "[6,4]"), via="predict"),
            Again("predict", "shape", ("[7,4]",), via="predict"),
        ),
    ),
    Case(
        "keras_compile_again",
        **retraced("train of net", *times(2, Again("fit", "compile", via="fit"))),
    ),
    # Keras on JAX stops at the next step. Whether the trace that stops counts is left open.
    Case(
        "keras_frozen",
        traces={"train of net": 1},
        prints={"outcome": "raised"},
        found=(Found("frozen", says=("base",)),),
        may=frozenset({"retraces"}),
        loose=True,
    ),
    Case("keras_side_layer", traces={"train of net": 1}, found=effects("numpy", "random")),
    Case(
        "keras_leak_layer",
        traces={"train of net": 1},
        prints={"numbers": 0},
        found=(Found("leaks", "leak", says=("kept",)),),
    ),
    Case(
        "keras_stale_callback",
        traces={"train of net": 1},
        found=(Found("stale", "read|def call", says=("temperature",), before="1.0"),),
    ),
    Case(
        "jax_keras_train_step",
        traces={"train of net": 1},
        prints={"printed": 1},
        found=effects("count", "print", "draw"),
    ),
    Case(
        "trainstep_static",
        **retraced("step", Again("mean", "static", ("reduction", "sum", "mean"))),
        engine="trainstep",
    ),
]

CLEAN = [
    Case("jax_clean", traces={"step": 1}, prints={"steps": 5, "seen": 5}),
    Case("jax_clean_nested", traces={"outer": 1}),
    Case("jax_clean_instances", traces={"forward": 2}),
    Case("jax_clean_rejit", traces={"double": 1, "apply": 1}),
    Case("jax_clean_threads", traces={"work": 1}, prints={"drew": True}),
    Case("keras_variables", traces={"train of net": 1}),
    Case(
        "keras_clean",
        traces={"train of net": 1, "test of net": 1, "predict of net": 1},
        prints={"steps": 6},
    ),
    Case(
        "keras_clean_gan",
        traces={"train of generator": 1, "train of critic": 1, "predict of generator": 1},
    ),
    Case("keras_clean_frozen_early", traces={"train of net": 1}, prints={"moved": False}),
]

CASES = [*BARE, *KERAS, *CLEAN]
