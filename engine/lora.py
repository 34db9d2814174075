"""Room for adapters (LoRA), as an engine is configured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAModule:
    """An adapter that the engine has from its start.

    Attributes:
        name: What clients ask for.
        path: Its folder.
        digest: Of its files; see `engine.models.adapters.adapter_files`.
    """

    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Says how many adapters the engine holds where.

    Attributes:
        max_loras: Adapters of one batch at most: each has a slot in device memory.
        max_lora_rank: Slots are of this rank.
        max_cpu_loras: Adapters in host memory at most, from which slots are filled.
        modules: Adapters that there are from the start.
        folder: Others may be loaded from folders below it; "": none can be.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int = 1
    modules: tuple[LoRAModule, ...] = ()
    folder: str = ""


MAX_ADAPTER_NAME = 256


def check_adapter_name(name: str, taken: Collection[str]) -> str:
    """Returns what is wrong with a name for an adapter; empty: nothing."""
    if not name or len(name) > MAX_ADAPTER_NAME or not name.isprintable():
        return f"a name has 1 to {MAX_ADAPTER_NAME} printable characters"
    return f"the name {name!r} is taken already" if name in taken else ""
