"""Threads that call one traced function, while another draws random numbers, prints and writes."""

import random
import sys
import threading

import tensorflow as tf
import witness

drawn = []


@tf.function
def work(x):
    witness.mark("work")
    for _ in range(60):  # a trace long enough for the other thread to run meanwhile
        x = tf.nn.relu(x) + 1.0
    return tf.reduce_sum(x)


def feed(stop):
    while not stop.is_set():
        drawn.append(random.random())
        print(end="", file=sys.stderr)


stop = threading.Event()
feeder = threading.Thread(target=feed, args=(stop,))
feeder.start()
work(tf.ones((4,)))
workers = [threading.Thread(target=work, args=(tf.ones((4,)),)) for _ in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
stop.set()
feeder.join()
witness.say(drew=bool(drawn))
