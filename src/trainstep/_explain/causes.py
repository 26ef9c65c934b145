"""What to do about each cause of a trace, on each engine.

One table for the ledger of our own functions and for what doctor finds in other people's: the
causes are the same, the cures differ. Causes are in order of weight: of several, the first that
applies is the one to talk about.
"""

from __future__ import annotations

from collections.abc import Iterable

_OUTSIDE = "create it once, before the loop, and call the same one"
_KERAS_SIZES = (
    "make the batches equal (`batch_size` that divides the data, `drop_remainder=True`), or train "
    "with trainstep.Trainer, which serves all sizes from one trace"
)

CURES: dict[str, dict[str, str]] = {
    "function": {
        "": f"a new function object is a new program: {_OUTSIDE}",
        "tensorflow": f"`tf.function` is applied again each time: {_OUTSIDE}",
        "jax": (
            "`jax.jit` is given a new function, lambda, partial or bound method each time, which "
            f"never finds the earlier program: {_OUTSIDE}"
        ),
        "torch": f"`torch.compile` is given a new function each time: {_OUTSIDE}",
    },
    "instance": {
        "": f"each object traces its methods for itself: {_OUTSIDE}",
    },
    "object": {
        "": (
            "an object is part of the program: pass the same one, or expect one trace for each; "
            "create models, optimizers and functions outside the loop"
        ),
        "tensorflow": (
            "another Python object among the arguments is another program: create it once, or let "
            "the function take it from around it instead of as an argument"
        ),
        "torch": f"another Python object each time is another program: {_OUTSIDE}",
    },
    "compile": {
        "": (
            "`compile()` drops the compiled functions: call it once; a learning rate changes by "
            "`optimizer.learning_rate = ...`"
        ),
    },
    "variables": {
        "": (
            "the first call created variables, and was traced twice for it: build the model "
            "(`model.build(...)`) and the optimizer "
            "(`optimizer.build(model.trainable_variables)`) before"
        ),
        "keras": (
            "the first batch created variables, and was traced twice for it: begin the model with "
            "an Input, build the optimizer (`optimizer.build(model.trainable_variables)`), and "
            "pass metrics as objects, not as strings"
        ),
    },
    "capture": {
        "": (
            "a value that the step takes from around it is part of the program: pass it as an "
            "argument, or keep it in a keras.Variable, and no trace is needed"
        ),
        "torch": (
            "a value around the function is part of the program: pass it as a tensor argument, or "
            "keep it in a tensor (in a module: `register_buffer`)"
        ),
    },
    "structure": {
        "": "keep one structure: an optional argument that comes and goes costs a program",
        "keras": (
            "`fit` and `train_on_batch` hand the step different structures, and so does a batch "
            "with sample weights beside one without: keep to one"
        ),
    },
    "shape": {
        "": (
            "a program of its own: declare axes whose size varies (`dynamic=`, or None in a `Spec`)"
        ),
        "tensorflow": (
            "give `tf.function` an `input_signature` whose size is None where it varies, or "
            "`reduce_retracing=True`; or make all batches equal (`drop_remainder=True`)"
        ),
        "jax": "make all batches equal: drop the short one, or pad to a few sizes",
        "torch": (
            "make all batches equal (`drop_last=True`), or tell which size varies before the first "
            "call: `torch._dynamo.mark_dynamic(x, 0)`, or `torch.compile(dynamic=True)`"
        ),
        "keras": _KERAS_SIZES,
    },
    "dtype": {
        "": "a program of its own: convert to one dtype before the call",
    },
    "weak": {
        "": (
            "a Python number and an array take turns: pass `jnp.asarray(value, dtype)` at every "
            "call"
        ),
    },
    "number": {
        "": "pass a number of one type: an int and a float are different programs",
        "tensorflow": (
            "a Python number is part of the program, one trace for each value: pass "
            "`tf.constant(value)` or a NumPy number"
        ),
        "torch": (
            "a Python number is part of the program: pass a tensor (`torch.tensor(n)`); one that "
            "has changed once is taken to vary, as long as nothing branches on it"
        ),
    },
    "item": {
        "": (
            "a number that was taken out of a tensor (`.item()`, `float()`) is part of the rest of "
            "the program: keep it a tensor, or take it out after the compiled function"
        ),
    },
    "static": {
        "": "a bool, string, None or enum is part of the program: one trace per value",
        "jax": (
            "a static argument, or a plain attribute of an nnx module, is part of the program, one "
            "for each value: if it only enters arithmetic, take it out of "
            "`static_argnums`/`static_argnames`, or keep it in an `nnx.Variable`"
        ),
    },
    "flag": {
        "": "freezing is part of the program: one trace per pattern; going back reuses the first",
        "keras": "set `trainable` before `compile()`, and once",
    },
    "mode": {
        "": "each mode (with or without gradients, training or not) needs one trace of its own",
    },
    "sharding": {
        "": "place the arguments on the same devices at every call (`jax.device_put`)",
    },
    "context": {
        "": "the same arguments under another setting of the engine: set it once, at the start",
    },
    "hidden": {
        "": (
            "`jit_compile=True` compiles for every shape, also where no trace is needed: make the "
            "shapes equal, or leave `jit_compile` off"
        ),
        "keras": (
            "`jit_compile=True` compiles for every shape, also where no trace is needed: "
            "make the batches equal, or compile the model with `jit_compile=False`"
        ),
    },
    "unknown": {
        "": "nothing that doctor can see differs; the engine may have dropped the earlier program",
    },
}


def cure(kind: str, engine: str = "", *, keras: bool = False) -> str:
    """What to do about a cause on an engine; for a function that Keras made, if there is more."""
    cures = CURES.get(kind, CURES["unknown"])
    return (cures.get("keras") if keras else None) or cures.get(engine) or cures[""]


def trace_advice(kinds: Iterable[str]) -> str:
    """One line on what to do about a trace of ours, given the kinds of what changed."""
    changed = set(kinds)
    found = (cure(kind) for kind in CURES if kind in changed)
    return next(found, "nothing: the first trace is needed")
