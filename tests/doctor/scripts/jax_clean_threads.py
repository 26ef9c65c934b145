"""Threads that call one compiled function, while another draws, prints and appends."""

import random
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import witness

drawn = []


@jax.jit
def work(x):
    witness.mark("work")
    for _ in range(60):  # a trace long enough for the other thread to run meanwhile
        x = jnp.tanh(x) + 1.0
    return x.sum()


def feed(stop):
    while not stop.is_set():
        drawn.append(random.random())
        print(end="", file=sys.stderr)


stop = threading.Event()
feeder = threading.Thread(target=feed, args=(stop,))
feeder.start()
x = np.ones((4,), "float32")
work(x)
workers = [threading.Thread(target=work, args=(x,)) for _ in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
stop.set()
feeder.join()
witness.say(drew=bool(drawn))
