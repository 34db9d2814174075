"""Tells before anything is loaded that a model cannot fit this machine's memory, or has too few
GPUs.

Only weights are counted, which lie in files whose size is known; nodes say themselves what is
missing besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.local_cluster.cluster import UpSettings
from cli.local_cluster.gpu_placement import are_gpus_from_ray
from engine.contracts.errors import CannotStartError
from engine.node.settings.engine_settings import detect_device
from host.memory import available_memory
from kv_transfer.memory.devices.cuda_driver import cuda_driver

_GIB = 1 << 30


class TooLarge(CannotStartError):
    """The weights need more memory than there is."""


class TooFewGpus(CannotStartError):
    """A node has more ranks than this machine has GPUs."""


def check_memory(settings: UpSettings, node_args: Sequence[str] = ()) -> None:
    """Raises `TooLarge` or `TooFewGpus`. The size of a model that is still to be downloaded is not
    judged, nor are GPUs that Ray hands out: they may be those of other machines. `node_args` are
    flags of all nodes."""
    folder = Path(settings.model).expanduser()
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    device = detect_device() if settings.device == "auto" else settings.device
    if device == "cuda":
        if not are_gpus_from_ray(node_args):
            _check_gpus(settings, num_bytes)
    elif num_bytes:
        _check_host(settings, num_bytes)


def _check_host(settings: UpSettings, num_bytes: int) -> None:
    num_nodes, free = settings.num_nodes, available_memory()
    needed = num_nodes * num_bytes
    if needed > free:
        raise TooLarge(
            f"{settings.model} has {_size(num_bytes)} of weights, which {num_nodes} nodes need "
            f"{_size(needed)} for, and this machine has {_size(free)} left; "
            + _advice(settings, num_bytes <= free)
        )


def _check_gpus(settings: UpSettings, num_bytes: int) -> None:
    driver = cuda_driver()
    num_gpus = len(driver.device_uuids())
    if not num_gpus:
        return
    if settings.tp > num_gpus:
        raise TooFewGpus(
            f"{settings.tp} tensor-parallel ranks need a GPU each, and this machine has "
            f"{num_gpus}; lower --tp, or compute on --device cpu"
        )
    num_places = num_gpus // settings.tp
    num_sharing = -(-settings.num_nodes // num_places)
    total = min(driver.total_memory(index) for index in range(num_gpus))
    each = num_bytes // settings.tp
    if num_sharing * each > total:
        raise TooLarge(
            f"{settings.model} has {_size(num_bytes)} of weights; {num_sharing} nodes on a GPU "
            f"with {settings.tp} tensor-parallel ranks need {_size(num_sharing * each)} of it, "
            f"and it has {_size(total)}; " + _advice(settings, each <= total)
        )


def _advice(settings: UpSettings, fits_once: bool) -> str:
    if fits_once and settings.num_nodes > 1:
        alone = "--prefill 0 --decode 1" + (" --switchable 0" if settings.switchable else "")
        return f"start one node with {alone}, or choose a smaller model"
    return "choose a smaller model, or a larger machine"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes >> 20} MiB"
