"""A digit classifier as a graph: each run fetches the update, the loss and the gradient norm."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

from trainstep import graph


def main(picture: Path | None = None) -> tuple[float, float]:
    """Trains; returns the accuracy and the largest gradient norm."""
    images, labels = load_digits(return_X_y=True)
    images, rng = (images / 16).astype("float32"), np.random.default_rng(0)

    with graph.Graph().as_default():
        x = graph.placeholder("float32", [None, 64], name="x")
        y = graph.placeholder("int32", [None], name="y")
        weights = graph.Variable(np.zeros((64, 10)), name="weights")
        bias = graph.Variable(np.zeros(10), name="bias")
        scores = x @ weights + bias
        errors = keras.losses.sparse_categorical_crossentropy(y, scores, from_logits=True)
        loss = graph.identity(ops.mean(errors), name="loss")

        gradients = graph.gradients(loss, [weights, bias])
        clipped, norm = graph.clip_by_global_norm(gradients, 0.5)
        pairs = zip(clipped, [weights, bias], strict=True)
        train = graph.train.apply_gradients(keras.optimizers.SGD(1.0), pairs, name="train")
        right = ops.mean(ops.cast(ops.equal(ops.argmax(scores, -1), y), "float32"))

        with graph.Session() as session:
            step = session.make_callable([train, loss, norm], [x, y])
            norms = []
            for number in range(300):
                rows = rng.integers(0, len(images), 32)
                _, value, length = step(images[rows], labels[rows])
                norms.append(float(length))
                if number % 100 == 0:
                    print(f"step {number}: loss {value:.3f}")
            accuracy = float(session.run(right, {x: images, y: labels}))
            print(f"accuracy {accuracy:.3f}; the largest norm of a gradient was {max(norms):.2f}")
            print(graph.draw([train, "loss"], picture))
            print(session.ledger)
    return accuracy, max(norms)


if __name__ == "__main__":
    main()
