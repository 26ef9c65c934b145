"""A thread that draws, prints and appends while the main one compiles and runs."""

import random
import sys
import threading

import torch
import witness

drawn = []


@torch.compile(backend=witness.dynamo("work"))
def work(x):
    for _ in range(20):
        x = torch.tanh(x) + 1.0
    return x.sum()


def feed(stop):
    while not stop.is_set():
        drawn.append(random.random())
        print(end="", file=sys.stderr)


stop = threading.Event()
feeder = threading.Thread(target=feed, args=(stop,))
feeder.start()
for _ in range(3):
    work(torch.ones(4))
stop.set()
feeder.join()
witness.say(drew=bool(drawn))
