"""The training of `torchrun_train.py` as a job of Ray Train, with two workers.

    python examples/ray_train.py [DIRECTORY]

Ray sends the address of the first worker, and a key for the job, to all workers. When a worker
dies, Ray starts all of them again, and they continue from the newest checkpoint in the directory.
Ray's own checkpoints are not used: they lag behind. On several machines, each has to see the
directory and both files under the same names.

Ray listens on addresses that other machines can reach, even if it is given 127.0.0.1, and runs the
code that it receives: run it on a private network.
"""

import os
import secrets
import socket
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def address_here() -> str:
    """Returns an address of this machine, with a port that is free."""
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as found:
        return f"{host}:{found.getsockname()[1]}"


def work(config: dict[str, str]) -> tuple[float, str]:
    """The part of one worker."""
    from torchrun_train import train  # Keras is needed in the workers alone

    import trainstep as ts

    place = get_context()
    index, count = place.get_world_rank(), place.get_world_size()
    made = (address_here(), secrets.token_hex(32)) if index == 0 else None
    address, key = broadcast_from_rank_zero(made)
    os.environ["TRAINSTEP_AUTHKEY"] = key  # Ray's address is seldom a loopback one
    ts.initialize(address, count, index)
    return tuple(train(config["directory"]))  # plain values, which the driver can read


def main(directory: str = "checkpoints") -> None:
    # Without a cluster that is running already, one of this machine is started, and ended.
    engine = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "jax")}
    ray.init(include_dashboard=False, runtime_env={"env_vars": engine})
    here = Path(directory).absolute()  # Ray's workers run in folders of their own
    trainer = DataParallelTrainer(
        work,
        train_loop_config={"directory": str(here)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(here / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    accuracy, state = trainer.fit().return_value  # of the first worker
    print(f"accuracy on unseen digits {accuracy:.3f}; state {state}")
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
