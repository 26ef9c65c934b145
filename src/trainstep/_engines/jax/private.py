"""The private names of JAX that trainstep uses, and what it does without each.

Each is a module that has what is used of it, or None. The tricks look here as well.
"""

from __future__ import annotations

from trainstep._common.private_names import find

# Sizes with symbols: the classes and decisions that a trace with dynamic sizes listens to.
shape_poly = find(
    "jax._src.export.shape_poly",
    "_DimExpr",
    "_geq_decision",
    "InconclusiveDimensionOperation",
    without="every size of a dynamic axis is compiled by itself",
)
# The settings of this thread, unlike those of `jax.config`.
config = find(
    "jax._src.config",
    "compilation_cache_dir",
    "persistent_cache_min_compile_time_secs",
    without="programs are not kept on disk, unless JAX is set to do so",
)
# What SLURM, Open MPI, Kubernetes or a cloud says about the processes of a job.
clusters = find(
    "jax._src.clusters",
    "ClusterEnv",
    without="`initialize` needs the address, or the variables of a launcher",
)
# The strings that a job's coordinator stores.
distributed = find(
    "jax._src.distributed", "global_state", without="jobs of many processes are refused"
)
# Puts an array on a device in a tenth of the time of `jax.device_put`.
lib = find(
    "jax._src.lib", "xla_client.batched_device_put", without="small variables are not packed"
)
