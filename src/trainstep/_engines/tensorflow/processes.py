"""TensorFlow: the runtime of many processes, and what they send each other."""

from __future__ import annotations

import itertools
import pickle
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import collective_ops

from trainstep._common.errors import ProcessLostError, StrategyError
from trainstep._engines.contract import Tensor, Variable
from trainstep._engines.shared.heartbeat import note_lost
from trainstep._engines.tensorflow.store import Kept, Store

_KEY = 7001  # of the group of all processes; TensorFlow numbers its own from 1
_SUMS, _SIZES = 2**10, 2**20  # how many numbers a group has, for sums and for sizes of each
_group: Group | None = None


def group() -> Group | None:
    """The processes of the job; None if there is one."""
    return _group


def connect(address: str, count: int, index: int, *, timeout: float) -> Store:
    """Starts the runtime. Each process gets a port of its own, and tells it the others."""
    global _group
    host, _, port = address.rpartition(":")
    try:
        if index == 0:
            _kept.append(Kept((host, int(port)), backlog=2 * count))
        store = Store((host, int(port)), timeout)
        own = _own_address(host, int(port))
        store.set(f"trainstep/workers/{index}", own)
        workers = [store.get(f"trainstep/workers/{k}", count).decode() for k in range(count)]
        # TensorFlow waits for the others with Python standing still, and the store with it: the
        # first process may begin only when nobody asks for anything any more.
        store.set(f"trainstep/ready/{index}", "")
        if index == 0:
            for k in range(count):
                store.get(f"trainstep/ready/{k}", 1)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": workers}),
            task_type="worker",
            task_id=index,
            rpc_layer="grpc",
        )
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        runtime = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except (OSError, RuntimeError, ValueError, tf.errors.OpError) as error:
        raise StrategyError(
            f"process {index} of {count} could not join the others.\n"
            f"  expected: process 0 at {address}, and no tensor made before\n"
            f"  came:     {str(error).splitlines()[0]}\n"
            "  to fix:   see that all processes run, that the address is one of the first's, and "
            "that `trainstep.initialize` comes first"
        ) from error
    _group = Group(store, count, index, runtime)
    return Store((host, int(port)), timeout)  # for another thread


_kept: list[Kept] = []  # of the first process: as long as it lives


def _own_address(host: str, port: int) -> str:
    """Where the others reach this process: the address it has to the first one, and a free port."""
    with socket.create_connection((host, port)) as made:
        own = made.getsockname()[0]
    with socket.create_server((own, 0)) as free:
        return f"{own}:{free.getsockname()[1]}"


class Group:
    """All processes of the job.

    Attributes:
        count: How many there are.
        index: The number of this one.
    """

    def __init__(self, store: Store, count: int, index: int, runtime: Any) -> None:
        self.count, self.index = count, index
        self._store, self._runtime = store, runtime  # which ends when it is let go
        self._message = itertools.count()
        self._sum = itertools.count(1)

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of tensors over all processes, one message for each dtype.

        It is part of a graph. All processes write the same graphs in the same order, and so the
        same sums have the same numbers.
        """
        found: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = tf.concat([tf.reshape(tensors[place], [-1]) for place in places], 0)
            pieces = tf.split(
                self._added(flat), [tf.size(tensors[place]) for place in places], num=len(places)
            )
            for place, piece in zip(places, pieces, strict=True):
                found[place] = tf.reshape(piece, tf.shape(tensors[place]))
                found[place].set_shape(tensors[place].shape)
        return found

    def _added(self, flat: Tensor) -> Tensor:
        graph = tf.compat.v1.get_default_graph()
        more, number = divmod(next(self._sum), _SUMS)
        # A number stands for one size for ever; where sizes vary, each of them has one.
        instance = number * _SIZES + tf.size(flat) % _SIZES
        # One after the other: no process may wait for a sum that another has not come to.
        with tf.control_dependencies(getattr(graph, "trainstep_sums", [])):
            total = collective_ops.all_reduce_v2(
                flat, self.count, _KEY + more, instance, communication_hint="ring"
            )
        graph.trainstep_sums = [total]
        return total

    def broadcast(self, value: Any) -> Any:
        """What the first process has, in all of them."""
        key = f"trainstep/broadcast/{next(self._message)}"
        if self.index == 0:
            self._put(key, value)
        return self._got(key)

    def all_gather(self, value: Any) -> list[Any]:
        """What each process has, in all of them."""
        key = f"trainstep/all_gather/{next(self._message)}"
        self._put(f"{key}/{self.index}", value)
        return [self._got(f"{key}/{k}") for k in range(self.count)]

    def _put(self, key: str, value: Any) -> None:
        try:
            self._store.put(key, pickle.dumps(value))
        except (OSError, EOFError) as error:
            raise _lost(error) from error

    def _got(self, key: str) -> Any:
        try:
            return pickle.loads(self._store.get(key, self.count))
        except (OSError, EOFError) as error:
            raise _lost(error) from error

    def agree_on(self, variables: Iterable[Variable]) -> None:
        """Gives variables the values of the first process, when they are first used."""
        new = [v for v in variables if not getattr(v, "_trainstep_agreed", False)]
        values = self.broadcast([keras.ops.convert_to_numpy(v.value) for v in new])
        for variable, value in zip(new, values, strict=True):
            variable._value.assign(value)
            variable._trainstep_agreed = True


def _lost(error: Exception) -> ProcessLostError:
    note_lost()
    return ProcessLostError(f"the first process does not answer ({type(error).__name__})")
