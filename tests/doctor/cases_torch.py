"""What doctor has to say of torch.compile, and of Keras on torch.

Dynamo watches globals and closures and replays Python's effects, so nothing here goes stale. A
graph that breaks is compiled in parts; the parts count as the function that they belong to, how
many traces they are is left open, and only what was made again is counted.

Keras on torch compiles nothing unless it is told to. Whether that is worth a finding is a matter
of taste; that its layers are free to draw and to change is not.
"""

from __future__ import annotations

from .case import Again, Case, Found, retraced

EAGER = frozenset({"eager"})

BARE = [
    Case(
        "torch_shape",
        **retraced("mean", Again("call", "shape", ("batch", "8", "6"))),
        engine="torch",
    ),
    Case(
        "torch_dtype",
        **retraced(
            "total",
            Again("double", "dtype", ("batch", "float64")),
            Again("int", "dtype", ("batch", "int32")),
        ),
    ),
    Case("torch_number", **retraced("shifted", Again("call", "number", ("offset", "3", "4")))),
    Case("torch_float", **retraced("scaled", Again("call", "number", ("rate", "0.5", "0.25")))),
    Case(
        "torch_static",
        traces={"forward": 3},
        again={
            "forward": (
                Again("flag", "static|flag", ("noisy",)),
                Again("name", "static", ("activation",)),
            )
        },
        found=(Found("retraces", says=("forward",)),),
    ),
    Case("torch_global", **retraced("reduced", Again("changed", "capture", ("mode",)))),
    Case("torch_attribute", **retraced("clipped", Again("changed", "capture", ("clip",)))),
    Case(
        "torch_structure",
        **retraced(
            "joined",
            Again("tuple", "structure", ("parts",)),
            Again("longer", "structure", ("parts",)),
            Again("extra", "structure", ("extra",)),
        ),
    ),
    Case(
        "torch_item",
        prints={"graphs": 3},
        again={"step": (Again("call", "item"),)},
        found=(Found("graph-breaks", "item"), Found("retraces", cause="item", says=("step",))),
    ),
    Case("torch_print", prints={"graphs": 2}, found=(Found("graph-breaks", "break"),)),
    Case("torch_break", prints={"graphs": 2}, found=(Found("graph-breaks", "break"),)),
    Case(
        "torch_limit",
        traces={"named": 8},
        prints={"limit": 8},
        again={"named": (Again("call", "static", ("name",)),) * 7},
        found=(Found("recompile-limit", says=("named",)),),
        may=frozenset({"retraces"}),
    ),
    Case("torch_eager", found=(Found("eager", "gradient", count=5),)),
]

KERAS = [
    Case("keras_short_batch", may=EAGER),
    Case("keras_fit_then_batch", may=EAGER),
    Case("keras_compile_again", may=EAGER),
    Case("keras_predict_sizes"),
    Case("keras_frozen", prints={"outcome": "stayed"}, may=EAGER),
    Case("keras_side_layer", may=EAGER),
    Case("keras_stale_callback", may=EAGER),
    Case(
        "trainstep_static",
        **retraced("step", Again("mean", "static", ("reduction", "sum", "mean"))),
        engine="trainstep",
    ),
]

CLEAN = [
    Case("torch_clean", traces={"loss_of": 1}, prints={"finite": True}),
    Case("torch_clean_modes", traces={"forward": 2}),
    Case("torch_clean_autocast", traces={"product": 2}),
    Case("torch_clean_no_grad", traces={"forward": 2}),
    Case("torch_clean_two", traces={"forward": 2}),
    Case("torch_clean_remade", traces={"shifted": 1, "forward": 1}),
    Case("torch_clean_effects", traces={"step": 1}, prints={"length": 1, "steps": 4.0}),
    Case("torch_clean_threads", traces={"work": 1}, prints={"drew": True}),
    Case("keras_clean", prints={"steps": 6}, may=EAGER),
]

CASES = [*BARE, *KERAS, *CLEAN]
