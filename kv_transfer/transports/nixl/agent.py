"""One NIXL agent of a transfer process, with the UCX back end.

    1. `NixlAgent(hosts)`   the library is loaded, and UCX opens its network devices
    2. `register`           memory that peers may read, or that reads may fill
    3. `connect(metadata)`  makes a peer known, by what its `metadata` says
    4. `read`               begins to read a peer's memory; `Transfer.is_done` says when it is
                            there. Then the peer gets a notice, if one was given
    5. `notices`            lets UCX work, which has no thread of its own; what peers gave notice of

UCX's progress thread takes half a core to a whole one while nothing happens, so a wait polls
instead. A read that has begun cannot be taken back: after its peer was forgotten, 460 MB still
arrived in memory that the reader had given up (NIXL 1.5.1 over TCP). Its memory has to wait for it.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from kv_transfer.errors import KVTransferError
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.transports.nixl.environment import PACKAGES, set_defaults

_MODULES = tuple(f"{package}._api" for package in PACKAGES)


class NixlError(KVTransferError):
    """NIXL is not there, or one of its calls failed; says which and why."""


class Transfer:
    """One read that was begun."""

    def __init__(self, agent: NixlAgent, handle: Any, is_done: bool) -> None:
        self._agent = agent
        self._handle = handle
        self._is_done = is_done

    def is_done(self) -> bool:
        """Never waits. Raises `NixlError` once it has failed; then it writes nothing more."""
        if not self._is_done:
            self._is_done = self._agent.has_ended(self._handle)
            if self._is_done:
                self._handle.release()
        return self._is_done


class NixlAgent:
    """Reaches the memory of peers, and opens ours to them.

    `hosts`: addresses of this host; UCX uses their interfaces and all of its RDMA devices, unless
    UCX_NET_DEVICES says otherwise.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """Starts UCX. Raises NixlError."""
        api = load(hosts)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent: Any = api.nixl_agent(f"tandem-{uuid.uuid4().hex}", config)
        except Exception as error:
            raise NixlError(f"UCX did not start: {error!r}") from error
        if "UCX" not in self._agent.backends:
            raise NixlError("this build of NIXL has no UCX")

    @property
    def metadata(self) -> bytes:
        """Returns what a peer needs in order to reach what was registered."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, num_bytes: int, device: int | None) -> Any:
        """Opens memory of GPU `device`, or of the host if that is None. Returns what `deregister`
        takes. Raises NixlError."""
        try:
            return self._agent.register_memory(
                [(address, num_bytes, device or 0, "")], _kind(device)
            )
        except Exception as error:
            raise NixlError(f"{num_bytes} bytes could not be registered: {error!r}") from error

    def deregister(self, registered: Any) -> None:
        """Closes memory that no read of ours uses. Raises NixlError."""
        try:
            self._agent.deregister_memory(registered)
        except Exception as error:
            raise NixlError(f"memory could not be deregistered: {error!r}") from error

    def connect(self, metadata: bytes) -> str:
        """Returns the name of the peer for `read` and `forget`. Raises NixlError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(f"the peer cannot be reached: {error!r}") from error
        return str(name, "ascii") if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Closes the connection, once all reads from this peer have ended."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise NixlError(f"the connection could not be closed: {error!r}") from error

    def read(
        self,
        name: str,
        targets: Numbers,
        sources: Numbers,
        sizes: Numbers,
        devices: tuple[int | None, int | None],
        notice: bytes = b"",
    ) -> Transfer:
        """Begins to read `sizes` bytes each from addresses of the peer to addresses of ours, all in
        memory that was registered; `devices`: of ours, of the peer's. The peer gets `notice` when
        all was read; empty: it gets none. Raises NixlError."""
        ours, theirs = devices
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._places(targets, sizes, ours),
                self._places(sources, sizes, theirs),
                name,
                notice,
            )
            state = self._agent.transfer(handle)
        except Exception as error:
            raise NixlError(f"a read could not begin: {error!r}") from error
        if state == "ERR":
            raise NixlError("a read could not begin")
        return Transfer(self, handle, state == "DONE")

    def has_ended(self, handle: Any) -> bool:
        """Returns whether a read has. Raises NixlError once it has failed."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise NixlError(f"a read failed: {error!r}") from error
        if state == "ERR":
            raise NixlError("a read failed")
        return bool(state == "DONE")

    def notices(self) -> list[bytes]:
        """Lets UCX answer what peers ask for. Returns what they gave notice of. Raises
        NixlError."""
        try:
            by_peer: dict[str, list[bytes]] = self._agent.get_new_notifs()
        except Exception as error:
            raise NixlError(f"UCX failed: {error!r}") from error
        return [notice for notices in by_peer.values() for notice in notices]

    def _places(self, addresses: Numbers, sizes: Numbers, device: int | None) -> Any:
        table = np.empty((len(addresses), 3), np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = addresses, sizes, device or 0
        return self._agent.get_xfer_descs(table, _kind(device))


def _kind(device: int | None) -> str:
    return "DRAM" if device is None else "VRAM"


def load(hosts: Sequence[str]) -> Any:
    """Returns the module of NIXL's interface, imported by the first call. Raises NixlError."""
    set_defaults(hosts)
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise NixlError("NIXL is not installed; pip install 'tandem[nixl]' brings it")
