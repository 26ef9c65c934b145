"""The shortest useful training: a regression on arrays, in five lines.

It predicts the progress of diabetes a year later from ten measurements of a patient.
"""

import keras
from keras import layers
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

import trainstep as ts


def main() -> tuple[float, float]:
    """Returns the mean squared error before and after; always guessing the mean gives 1."""
    keras.utils.set_random_seed(0)

    x, y = (scale(part).astype("float32") for part in load_diabetes(return_X_y=True))
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, "relu"), layers.Dense(1)])
    trainer = ts.Trainer(model, optimizer="adam", loss="mse")
    before = trainer.evaluate(x, y, batch_size=442)["loss"]
    after = trainer.fit(x, y, epochs=20, batch_size=34, progress="lines").history["loss"][-1]

    print(f"mean squared error: {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main()
