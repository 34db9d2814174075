"""Refuses checkpoints that quantise parts of one GEMM in different ways."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.models.errors import CheckpointError
from engine.quantization import MixedSchemes, Quantization

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj", "gate_proj"),
    ("gate_proj", "up_proj"),
    ("index_q_proj", "index_k_proj"),
)
"""A gate beside queries is that of attention (AFMoE)."""


def check_fused_layers(
    folder: Path, quantization: Quantization | None, tensors: Iterable[str]
) -> None:
    """Raises `CheckpointError` where layers that are computed together have different schemes.
    Experts are left to the worker: there are tens of thousands.

    Args:
        tensors: The names of all tensors of the checkpoint.
    """
    if quantization is None:
        return
    modules = {name.rpartition(".")[0] for name in tensors if ".experts." not in name}
    for first, *others in _TOGETHER:
        parents = sorted(name.removesuffix(first) for name in modules if name.endswith(f".{first}"))
        for parent in parents:
            names = [parent + last for last in (first, *others) if parent + last in modules]
            try:
                quantization.scheme_of(*names)
            except MixedSchemes as error:
                raise mixed_schemes(folder, error) from error


def mixed_schemes(folder: Path | str, error: MixedSchemes) -> CheckpointError:
    """Returns the refusal of a checkpoint, as one sentence."""
    return CheckpointError(
        folder,
        f"quantises {', '.join(error.names)} in different ways, or only some of them, and they are "
        "computed as one",
        "quantise them alike, or list all of them as layers that stay plain",
    )
