"""Deep Q-learning in a corridor: an update after every move, each one compiled step.

The learner starts at the left end. A move to the right in the last cell ends the episode with a
reward of 1; every other move costs a little. The replay buffer is in NumPy, `assign` updates the
target network, and a compiled prediction chooses the moves. Hundreds of updates need three traces.
"""

from collections import deque
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import trainstep as ts

CELLS, LIMIT = 8, 40  # an episode ends after LIMIT moves
EPISODES, BATCH, DISCOUNT, COST = 80, 32, 0.9, 0.05
STATES = np.eye(CELLS, dtype="float32")
MOVES = np.eye(2, dtype="float32")  # left, right


def move(cell: int, action: int) -> tuple[int, float, bool]:
    """Returns the next cell, the reward, and whether the episode has ended."""
    if action == 1 and cell == CELLS - 1:
        return cell, 1.0, True
    return min(max(cell + (1 if action else -1), 0), CELLS - 1), -COST, False


def network(name: str) -> keras.Model:
    parts = [keras.Input((CELLS,)), layers.Dense(32, activation="relu"), layers.Dense(2)]
    return keras.Sequential(parts, name=name)


class Learner:
    """A network that estimates the value of moves, its target network, and their steps."""

    def __init__(self) -> None:
        self.online, self.target = network("online"), network("target")
        self.optimizer = keras.optimizers.Adam(5e-3)
        self.sync()

    @ts.function
    def values(self, states: Any) -> Any:
        return self.online(states)

    @ts.function
    def sync(self) -> None:
        for theirs, ours in zip(self.target.variables, self.online.variables, strict=True):
            theirs.assign(ours.value)

    @ts.function
    def update(self, states: Any, moves: Any, rewards: Any, later: Any, ended: Any) -> Any:
        """Trains one step towards the observed value of the moves."""
        worth = rewards + DISCOUNT * (1 - ended) * ops.max(self.target(later), axis=-1)

        def loss_of() -> Any:
            valued = ops.sum(self.online(states) * moves, axis=-1)
            return ops.mean((valued - worth) ** 2)

        loss, gradients = ts.value_and_grad(loss_of, self.online.trainable_variables)()
        self.optimizer.apply(gradients, self.online.trainable_variables)
        return loss

    def choose(self, cell: int) -> int:
        return int(np.argmax(ops.convert_to_numpy(self.values(STATES[cell : cell + 1]))))


def greedy_return(learner: Learner) -> float:
    """Returns the sum of rewards of an episode without exploration."""
    cell, total = 0, 0.0
    for _ in range(LIMIT):
        cell, reward, ended = move(cell, learner.choose(cell))
        total += reward
        if ended:
            break
    return total


def train(learner: Learner, numbers: np.random.Generator) -> int:
    """Plays and learns; returns the number of updates."""
    memory: deque[tuple[Any, ...]] = deque(maxlen=2000)
    updates = 0
    for episode in range(EPISODES):
        cell, explore = 0, max(0.1, 1 - 2 * episode / EPISODES)
        for _ in range(LIMIT):
            action = (
                int(numbers.integers(2)) if numbers.random() < explore else learner.choose(cell)
            )
            after, reward, ended = move(cell, action)
            memory.append((STATES[cell], MOVES[action], reward, STATES[after], float(ended)))
            cell = after
            if len(memory) >= BATCH:
                rows = [memory[i] for i in numbers.integers(len(memory), size=BATCH)]
                learner.update(
                    *(np.asarray(column, "float32") for column in zip(*rows, strict=True))
                )
                updates += 1
                if updates % 20 == 0:
                    learner.sync()
            if ended:
                break
    return updates


def main() -> tuple[float, float, dict[str, int]]:
    """Returns the greedy return before and after training, and the traces of each step."""
    keras.utils.set_random_seed(0)
    learner = Learner()
    before = greedy_return(learner)
    updates = train(learner, np.random.default_rng(0))
    after = greedy_return(learner)
    way = "".join("<>"[learner.choose(cell)] for cell in range(CELLS))
    print(f"return before {before:.2f}, after {updates} updates {after:.2f}")
    print(f"the way that it goes in each cell: {way}")
    steps = (learner.values, learner.update, learner.sync)
    traces = {step.__name__: step.trace_count for step in steps}
    print("traces:", ", ".join(f"{name} {count}" for name, count in traces.items()))
    return before, after, traces


if __name__ == "__main__":
    main()
