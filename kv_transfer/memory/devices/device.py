"""A kind of memory that holds KV: what opens it, allocates more, pins host memory, and copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.base import KVCacheHandle
from kv_transfer.errors import KVTransferError
from kv_transfer.memory.devices.copy_stream import CopyStream


class DeviceError(KVTransferError):
    """The device, or its driver, refused or failed. Says which call and why."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Memory at an address of this process, its own or another's, until `close`."""

    address: int
    num_bytes: int
    close: Callable[[], None]


class MemoryDevice(ABC):
    """The device on which the cache of one rank lies."""

    is_gpu: bool
    copies_at_once: bool
    """A copy is done when it was issued, so its source need not live longer."""
    number: int | None = None
    """The GPU's, among those that this process sees; None: host memory."""
    pci_address: str = ""
    """The address of a GPU, as in /sys/bus/pci/devices; empty: none, or unknown."""

    @abstractmethod
    def open_cache(self, handle: KVCacheHandle) -> Mapping:
        """Raises `DeviceError`, or OSError when the owner has gone."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Mapping:
        """Returns memory that is this process's own. Raises `DeviceError`."""

    @abstractmethod
    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Lets copies from and to this host memory run beside us from now on."""

    @abstractmethod
    def new_stream(self) -> CopyStream: ...
