"""Chooses the GPUs of this machine on which each node of a local cluster computes.

Every node gets GPUs of its own while there are enough. With fewer, nodes share: neighbours in the
list lie on different GPUs as long as possible, and each takes its part of the memory.
"""

from __future__ import annotations

_WHOLE_GPU = 0.9
"""Share of a GPU's memory, when one node has it alone."""


def placement_args(
    num_nodes: int, tp_size: int, num_gpus: int, gpu_memory_utilization: float | None
) -> list[list[str]]:
    """Flags for each node. `gpu_memory_utilization` None: as much as the nodes of a GPU can have.

    More ranks than GPUs are left to the node, which says what is wrong.
    """
    num_places = max(1, num_gpus // tp_size)
    num_sharing = -(-num_nodes // num_places)
    if gpu_memory_utilization is None and num_sharing > 1:
        gpu_memory_utilization = _WHOLE_GPU / num_sharing
    args = []
    for node in range(num_nodes):
        flags = ["--first-gpu", str(node % num_places * tp_size)]
        if gpu_memory_utilization is not None:
            flags += ["--gpu-memory-utilization", f"{gpu_memory_utilization:.3f}"]
        args.append(flags)
    return args
