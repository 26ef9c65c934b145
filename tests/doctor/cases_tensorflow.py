"""What doctor has to say on TensorFlow: bare tf.function, tf.data, and Keras on it."""

from __future__ import annotations

from .case import Again, Case, Found, effects, retraced, times

BARE = [
    Case(
        "tensorflow_shape",
        **retraced(
            "step",
            Again(
                "call",
                "shape",
                ("x: float32[10,5] -> float32[20,5]", "y: float32[10,1] -> float32[20,1]"),
            ),
            Again("call", "shape", ("x: float32[", "-> float32[7,5]", "-> float32[7,1]")),
        ),
        engine="tensorflow",
    ),
    Case(
        "tensorflow_dtype",
        **retraced(
            "total",
            Again("double", "dtype", ("batch: float32[4,3] -> float64[4,3]",)),
            Again("int", "dtype", ("batch: ", "-> int32[4,3]")),
        ),
    ),
    Case("tensorflow_number", **retraced("descend", *times(3, Again("call", "number", ("rate",))))),
    Case(
        "tensorflow_static",
        **retraced(
            "forward",
            Again("flag", "static", ("training", "True", "False")),
            Again("name", "static", ("activation", "relu", "tanh")),
        ),
    ),
    Case(
        "tensorflow_object", **retraced("scaled", *times(3, Again("call", "object", ("settings",))))
    ),
    Case("tensorflow_structure", **retraced("joined", Again("tuple", "structure", ("parts",)))),
    Case(
        "tensorflow_optional",
        **retraced("loss_of", Again("weighted", "structure", ("sample_weight",))),
    ),
    Case("tensorflow_function_in_loop", **retraced("step", *times(3, Again("call", "function")))),
    Case("tensorflow_lambda_in_loop", **retraced("<lambda>", *times(2, Again("call", "function")))),
    Case(
        "tensorflow_new_object",
        **retraced("apply", *times(3, Again("call", "instance", ("Scaler",)))),
    ),
    Case("tensorflow_variables", **retraced("apply", Again("call", "variables"))),
    Case("tensorflow_variables_keras", **retraced("step", Again("call", "variables"))),
    Case("tensorflow_relaxed", **retraced("mean", Again("call", "shape", ("batch",)))),
    Case("tensorflow_context", **retraced("double", Again("scope", "context"))),
    Case(
        "tensorflow_hidden_xla",
        traces={"step": 1},
        compilations={"step": 2},
        again={
            "step": (
                Again("call", "hidden", ("[8,4]", "[6,4]"), what="compile"),
                Again("call", "hidden", ("[3,4]",), what="compile"),
            )
        },
        found=(Found("compilations", cause="hidden", says=("step",)),),
    ),
    Case("tensorflow_eager", found=(Found("eager", "gradient", count=5),)),
    Case("tensorflow_data_map", prints={"distinct": 1}, found=effects("draw")),
    Case(
        "tensorflow_side_random",
        traces={"noisy": 1},
        found=effects("random", "imported", "numpy", "time"),
    ),
    Case(
        "tensorflow_side_print",
        traces={"step": 1},
        prints={"lines": 1},
        found=effects("print", "tensor", "open"),
    ),
    Case(
        "tensorflow_side_writes",
        traces={"step": 1},
        prints={"counted": [1, 1, 1]},
        found=effects("global", "attribute", "entry"),
    ),
    Case(
        "tensorflow_side_nested",
        traces={"step": 1},
        prints={"distinct": 1},
        found=effects("draw"),
    ),
    Case(
        "tensorflow_leak",
        traces={"step": 1},
        prints={"length": 1},
        found=(Found("leaks", "leak", says=("losses",)),),
    ),
    Case(
        "tensorflow_leak_attribute",
        traces={"forward": 1},
        prints={"kept": "SymbolicTensor"},
        found=(Found("leaks", "leak", says=("hidden",)),),
    ),
    Case(
        "tensorflow_stale_global",
        traces={"soften": 1},
        prints={"value": 1.0},
        found=(
            Found(
                "stale",
                "read|def soften",
                says=("temperature",),
                before="1.0",
                now="4.0",
                noticed="noticed",
            ),
        ),
    ),
    Case(
        "tensorflow_stale_closure",
        traces={"scaled": 1},
        prints={"value": 0.5},
        found=(
            Found(
                "stale",
                "read|def scaled",
                says=("rate",),
                before="0.5",
                now="8.0",
                noticed="noticed",
            ),
        ),
    ),
    Case(
        "tensorflow_stale_attribute",
        traces={"of": 1},
        prints={"value": 1.0},
        found=(
            Found(
                "stale",
                "margin|def of",
                says=("margin",),
                before="0.5",
                now="2.0",
                noticed="noticed",
            ),
            Found(
                "stale",
                "weight|def of",
                says=("weight",),
                before="1.0",
                now="3.0",
                noticed="noticed",
            ),
        ),
    ),
    Case(
        "tensorflow_stale_entry",
        traces={"scaled": 1},
        prints={"value": 0.5},
        found=(Found("stale", "read|def scaled", says=("config", "rate"), noticed="noticed"),),
    ),
    Case(
        "tensorflow_stale_array",
        traces={"looked_up": 1},
        prints={"value": 3.0},
        found=(Found("stale", "read|def looked_up", says=("table",), noticed="noticed"),),
    ),
    Case(
        "tensorflow_stale_default",
        traces={"step": 1},
        prints={"value": 2.0},
        found=(
            Found(
                "stale",
                "read|element|default|def step|def weighted",
                says=("weights",),
                noticed="noticed",
            ),
        ),
    ),
    Case(
        "tensorflow_metrics_cold",
        traces={"step": 1},
        prints={"wrong": True},
        found=(Found("metrics", "batch|call|def step"),),
    ),
]

KERAS = [
    Case("keras_short_batch", traces={"train of net": 1}),
    Case(
        "keras_fit_then_batch",
        **retraced("train of net", Again("batch", "structure", via="train_on_batch")),
        engine="tensorflow",
    ),
    Case("keras_validation", traces={"train of net": 1, "test of net": 1}),
    Case(
        "keras_predict_sizes",
        **retraced("predict of net", Again("predict", "shape", ("5", "6"), via="predict")),
    ),
    Case(
        "keras_compile_again",
        **retraced("train of net", *times(2, Again("fit", "compile", via="fit"))),
    ),
    Case(
        "keras_frozen",
        traces={"train of net": 1},
        prints={"outcome": "moved"},
        found=(Found("frozen", says=("base",)),),
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
    Case("keras_variables", **retraced("train of net", Again("fit", "variables", via="fit"))),
    Case(
        "tensorflow_keras_xla",
        traces={"train of net": 1},
        compilations={"train of net": 1},
        again={"train of net": (Again("fit", "hidden", via="fit", what="compile"),)},
        found=(Found("compilations", cause="hidden", says=("net",)),),
        options=("--xla",),
    ),
    Case(
        "tensorflow_keras_train_step",
        traces={"train of net": 1},
        prints={"batches": 1},
        found=effects("count", "print", "draw"),
    ),
    Case(
        "trainstep_static",
        **retraced("step", Again("mean", "static", ("reduction", "sum", "mean"))),
        engine="trainstep",
    ),
]

CLEAN = [
    Case("tensorflow_clean", traces={"train_step": 1}, prints={"finite": True}),
    Case("tensorflow_clean_instances", traces={"apply": 2}),
    Case("tensorflow_clean_nested", traces={"outer": 1, "inner": 1}),
    Case("tensorflow_clean_data", traces={"mean": 1}),
    Case("tensorflow_clean_threads", traces={"work": 1}, prints={"drew": True}),
    Case("tensorflow_clean_lookalikes", traces={"step": 1}),
    Case("tensorflow_clean_print", traces={"step": 1}),
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
