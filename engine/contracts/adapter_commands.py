"""Commands about adapters: scheduler to all workers, in order with the steps. They decide about
host memory; slots of device memory come with the requests that use them (`LoRASlot`)."""

from __future__ import annotations

import msgspec


class LoadAdapter(msgspec.Struct, tag="load_adapter", array_like=True, frozen=True):
    """Asks for an adapter in host memory. Each rank answers."""

    digest: str
    path: str


class DropAdapter(msgspec.Struct, tag="drop_adapter", array_like=True, frozen=True):
    """Frees an adapter's host memory."""

    digest: str
