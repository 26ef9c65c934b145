"""`Session.make_callable` and `Session.run`, divided by an equivalent `trainstep.function`.

`python -m benchmarks.session [--engine jax|tensorflow|torch] [--quick]`

All apply the same update to the same weights with the same optimizer, on NumPy batches, and read
the loss at every step. A callable returns the loss as NumPy, so its time includes the reading.
"""

import statistics
from collections.abc import Iterator

from benchmarks import table, timing
from benchmarks.engines import ENGINES, main
from benchmarks.settings import LEARNING_RATE


def run_here(engine: str, quick: bool) -> None:
    """Measures one engine in this process and prints its table."""
    plan = timing.QUICK if quick else timing.FULL
    lines = list(networks(plan))
    title = f"{ENGINES[engine]}: by the function that does the same, on this machine"
    headers = ["network", "make_callable / function", "run / function"]
    table.console().print(table.Table(headers, lines).rich(title))


def networks(plan: timing.Plan) -> Iterator[list[str]]:
    """Yields a line for each network."""
    from benchmarks.models import CASES

    for case in CASES.values():
        times = timing.measure(calls_of(case), float, plan)
        function = times["function"].each
        ratios = [
            statistics.median(a / b for a, b in zip(times[name].each, function, strict=True))
            for name in ("callable", "run")
        ]
        yield [case.name, *(f"{ratio:.2f}" for ratio in ratios)]


def calls_of(case: object) -> dict[str, timing.Call]:
    """Returns the three contenders that train a network."""
    import keras

    import trainstep as ts
    from trainstep import graph

    x, y = case.batch()
    loss_of = keras.losses.MeanSquaredError()
    model, optimizer = case.model(), keras.optimizers.Adam(LEARNING_RATE)

    @ts.function
    def step(x: object, y: object) -> object:
        def loss() -> object:
            return loss_of(y, model(x, training=True))

        value, grads = ts.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return value

    with graph.Graph().as_default() as g:
        xs = graph.placeholder(x.dtype, [None, *x.shape[1:]])
        ys = graph.placeholder(y.dtype, [None, *y.shape[1:]])
        loss = graph.call(loss_of, ys, case.model()(xs, training=True))
        train = graph.train.minimize(keras.optimizers.Adam(LEARNING_RATE), loss)
    session = graph.Session(g)
    fetch = session.make_callable([train, loss], [xs, ys])
    return {
        "function": lambda: step(x, y),
        "callable": lambda: fetch(x, y)[1],
        "run": lambda: session.run([train, loss], {xs: x, ys: y})[1],
    }


if __name__ == "__main__":
    main("session", __doc__, run_here)
