"""TensorFlow: starts the runtime of many processes, and sends values between them."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainstep._common.errors import ProcessLostError, StrategyError
from trainstep._engines.contract import Tensor, Variable
from trainstep._engines.shared.authkey import job_key
from trainstep._engines.shared.heartbeat import note_lost
from trainstep._engines.shared.messages import decode, encode
from trainstep._engines.tensorflow.store import Store, StoreServer

_KEY = 7001  # the group key of all processes; TensorFlow numbers its own groups from 1
_SUMS, _SIZES = 2**10, 2**20  # instance keys in a group: so many sums, so many sizes of each
_group: Group | None = None


def group() -> Group | None:
    """Returns the processes of the job; None if this is the only one."""
    return _group


def connect(address: str, count: int, index: int, *, timeout: float) -> Store:
    """Starts the runtime: each process chooses a port, and the store gives all of them to each.

    The port is bound by TensorFlow's gRPC server, which listens on all interfaces, authenticates
    no peer, and has no setting for either. The store listens on `address` only.

    Raises:
        StrategyError: The job has no key, or the processes do not find each other.
    """
    global _group
    host, _, port = address.rpartition(":")
    key = job_key(host)
    try:
        place = (host, int(port))
        if index == 0:
            _servers.append(StoreServer(place, key, backlog=2 * count))
        store = Store(place, key, timeout)
        heartbeats = Store(place, key, timeout)  # used by another thread
        store.set(f"trainstep/workers/{index}", _free_port(store.own_host))
        names = [f"trainstep/workers/{k}" for k in range(count)]
        workers = [store.get(name, count, timeout).decode() for name in names]
        # While TensorFlow waits for the others, it keeps Python's lock, and the store is blocked.
        # The first process may begin only when no other one still needs the store.
        store.set(f"trainstep/ready/{index}", "")
        if index == 0:
            for k in range(count):
                store.get(f"trainstep/ready/{k}", 1, timeout)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": workers}),
            task_type="worker",
            task_id=index,
            rpc_layer="grpc",
        )
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        runtime = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except (OSError, EOFError, RuntimeError, ValueError, tf.errors.OpError) as error:
        raise StrategyError(
            f"process {index} of {count} could not join the others.\n"
            f"  expected: process 0 at {address}, and no tensor computed before\n"
            f"  got:      {(str(error) or type(error).__name__).splitlines()[0]}\n"
            "  to fix:   check that all processes run, that the address belongs to the machine of "
            "process 0, and that `trainstep.initialize` is called first"
        ) from error
    _group = Group(store, count, index, runtime)
    return heartbeats


_servers: list[StoreServer] = []  # of the first process: it serves as long as the process lives


def _free_port(host: str) -> str:
    """Returns `host:port`, with a port that is free on this machine."""
    with socket.create_server((host, 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


class Group:
    """All processes of the job.

    Attributes:
        count: How many there are.
        index: The number of this one.
    """

    def __init__(self, store: Store, count: int, index: int, runtime: Any) -> None:
        self.count, self.index = count, index
        # The runtime ends when nothing refers to it any more.
        self._store, self._runtime = store, runtime
        self._message = itertools.count()
        self._sum = itertools.count(1)

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums of tensors over all processes, with one message for each dtype.

        The sums are part of a graph. All processes build the same graphs in the same order, so a
        sum has the same instance key in each of them.
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
        # TensorFlow ties an instance key to one size; dynamic sizes need a key for each size.
        instance = number * _SIZES + tf.size(flat) % _SIZES
        # In one order: two processes that each wait in a different sum would wait for ever.
        with tf.control_dependencies(getattr(graph, "trainstep_sums", [])):
            total = tf.raw_ops.CollectiveReduceV2(
                input=flat,
                group_size=self.count,
                group_key=_KEY + more,
                instance_key=instance,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint="ring",
            )
        graph.trainstep_sums = [total]
        return total

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first process, in every process."""
        key = f"trainstep/broadcast/{next(self._message)}"
        if self.index == 0:
            self._put(key, value)
        return self._get(key)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in every process."""
        key = f"trainstep/all_gather/{next(self._message)}"
        self._put(f"{key}/{self.index}", value)
        return [self._get(f"{key}/{k}") for k in range(self.count)]

    def _put(self, key: str, value: Any) -> None:
        try:
            self._store.put(key, encode(value))
        except (OSError, EOFError) as error:
            raise _lost(error) from error

    def _get(self, key: str) -> Any:
        try:
            message = self._store.get(key, self.count)
        except (OSError, EOFError) as error:
            raise _lost(error) from error
        return decode(message)

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
