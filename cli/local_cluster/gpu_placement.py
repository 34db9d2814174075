"""Chooses the GPUs of this machine on which each node of a local cluster computes.

Every node gets GPUs of its own while there are enough. With fewer, nodes share: neighbours in the
list lie on different GPUs as long as possible, and each takes its part of the memory. With Ray as
the executor, Ray hands out the GPUs, of other machines too.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_settings import BaseSettings, SettingsConfigDict

_BACKEND = "--distributed-executor-backend"
_WHOLE_GPU = 0.9
"""Share of a GPU's memory, when one node has it alone."""


class _NodeEnvironment(BaseSettings):
    """Holds what the environment tells nodes, which judge it."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_")

    distributed_executor_backend: str = "mp"


def placement_args(
    num_nodes: int, tp_size: int, num_gpus: int, gpu_memory_utilization: float | None
) -> list[list[str]]:
    """Flags for each node. `gpu_memory_utilization` None: as much as the nodes of a GPU can have.

    `tandem up` refuses more ranks than GPUs before (`check_memory`). A machine without GPUs, and
    callers that do not check, are left to the node, which says what is wrong.
    """
    num_places = max(1, num_gpus // tp_size)
    num_sharing = -(-num_nodes // num_places)
    if gpu_memory_utilization is None and num_sharing > 1:
        gpu_memory_utilization = _WHOLE_GPU / num_sharing
    share = _share_args(gpu_memory_utilization)
    first_gpus = (str(node % num_places * tp_size) for node in range(num_nodes))
    return [["--first-gpu", gpu, *share] for gpu in first_gpus]


def are_gpus_from_ray(node_args: Sequence[str]) -> bool:
    """Says whether Ray places the ranks, by the flags of nodes or else by their environment."""
    backend = _NodeEnvironment().distributed_executor_backend
    for at, arg in enumerate(node_args):
        flag, equals, value = arg.partition("=")
        if flag == _BACKEND:
            backend = value if equals else "".join(node_args[at + 1 : at + 2])
    return backend == "ray"


def ray_args(num_nodes: int, gpu_memory_utilization: float | None) -> list[list[str]]:
    """Returns flags for each node whose GPUs Ray chooses, and gives to no other node."""
    return [_share_args(gpu_memory_utilization) for _ in range(num_nodes)]


def _share_args(gpu_memory_utilization: float | None) -> list[str]:
    if gpu_memory_utilization is None:
        return []
    return ["--gpu-memory-utilization", f"{gpu_memory_utilization:.3f}"]
