"""The node server's side of adapters: which names there are, and calls that change them.

static     --lora-modules: known from the start
load       read here for its digest ──▶ by every rank ──▶ served by its name
unload     the name is gone at once ──▶ the engine core forgets the adapter when its last
           request has ended, and no other name stands for it

Calls have versions: one that is older than what is known here changes nothing. `records` tells
routers of those that were followed, which bring other nodes up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from edge.adapter_call import AdapterCall
from engine.config import EngineConfig
from engine.contracts.errors import InvalidRequest
from engine.contracts.messages import AdapterAnswer, AddAdapter, RemoveAdapter, ToEngineCore
from engine.contracts.request_spec import AdapterRef
from engine.frontend.adapter_records import AdapterRecords
from engine.frontend.engine_calls import EngineCalls
from engine.lora import check_adapter_name
from engine.models.adapter_files import AdapterError, read_adapter


class OutdatedCall(Exception):
    """A newer call has changed the name since."""


class AdapterCalls(EngineCalls[AdapterAnswer]):
    """Adapters by name, and the calls that change them."""

    def __init__(self, config: EngineConfig, send: Callable[[ToEngineCore], None]) -> None:
        super().__init__(send)
        self._config = config
        self._lock = asyncio.Lock()
        modules = () if config.lora is None else config.lora.modules
        self.known = {module.name: AdapterRef(module.name, module.digest) for module in modules}
        self.records = AdapterRecords()
        self._own_paths = {(module.name, module.digest): module.path for module in modules}

    def names_of(self, digest: str) -> list[str]:
        """Returns the names that stand for an adapter."""
        return [name for name, ref in self.known.items() if ref.digest == digest]

    def has(self, digest: str) -> bool:
        """Returns whether any name stands for an adapter."""
        return bool(self.names_of(digest))

    async def load(
        self,
        name: str,
        path: str,
        *,
        in_place: bool = False,
        version: int = 0,
        digest: str = "",
        model: str = "",
    ) -> AdapterRef:
        """Serves the adapter in the folder `path` by this name. With `in_place` the name may stand
        for another one, whose requests go on.

        Args:
            path: Below `--lora-dir`; empty: of the adapter that the settings name so.
            version: Of the call; 0: it is the newest.
            digest: What the adapter must be; empty: whatever lies there.
            model: Whose it is, as `records` tells.

        Raises:
            InvalidRequest: The name is taken, or the adapter cannot be served.
            OutdatedCall: A newer call has changed the name.
            EngineDeadError: The engine is dead.
        """
        async with self._lock:
            version = version or self.records.next_version(name)
            if (known := self.records.of(name)) is not None and version < known.version:
                raise OutdatedCall
            folder, found = await self._read(name, path, digest, in_place=in_place)
            record = AdapterCall(name, found, path, version, model)
            if known is not None and record.order <= known.order:
                if record.order < known.order:
                    raise OutdatedCall
                return self.known[name]
            answer = await self._ask(AddAdapter(next(self._ids), found, str(folder)))
            if answer.error:
                raise InvalidRequest(answer.error, "lora_path")
            ref, old = AdapterRef(name, found), self.known.get(name)
            self.known[name] = ref
            self.records.note(record)
        if old is not None and not self.has(old.digest):
            await self._ask(RemoveAdapter(next(self._ids), old.digest))
        return ref

    async def unload(self, name: str, version: int = 0, model: str = "") -> None:
        """Serves nothing by this name any more; returns when its adapter is forgotten. A call of a
        given `version` is remembered where there is none, too.

        Raises:
            KeyError: There is no such adapter.
            OutdatedCall: A newer call has changed the name.
            EngineDeadError: The engine is dead.
        """
        async with self._lock:
            if name not in self.known and not version:
                raise KeyError(name)
            version = version or self.records.next_version(name)
            if self.records.is_newer(version, "", name):
                self.records.note(AdapterCall(name, "", "", version, model))
            elif name in self.known:
                raise OutdatedCall
            ref = self.known.pop(name)
            is_last = not self.has(ref.digest)
        if is_last:
            await self._ask(RemoveAdapter(next(self._ids), ref.digest))

    async def _read(self, name: str, path: str, digest: str, *, in_place: bool) -> tuple[Path, str]:
        """Returns the adapter's folder, and what it is. Raises `InvalidRequest`."""
        lora = self._config.lora
        if lora is None:
            raise InvalidRequest("this node serves no adapters: start it with --enable-lora")
        own_path = self._own_paths.get((name, digest)) if not path else None
        folder = Path(own_path) if own_path else _below(lora.folder, path)
        taken = {*self._config.model.served_names, *(() if in_place else self.known)}
        if fault := check_adapter_name(name, taken):
            raise InvalidRequest(fault, "lora_name")
        try:
            found = await asyncio.to_thread(read_adapter, folder, lora.max_lora_rank)
        except AdapterError as error:
            raise InvalidRequest(str(error), "lora_path") from None
        if digest and found.digest != digest:
            raise InvalidRequest(
                f"the adapter in {path or folder} is another one here ({found.digest[:12]}) than "
                f"on other nodes ({digest[:12]}): give all nodes the same files",
                "lora_path",
            )
        return folder, found.digest


def _below(root: str, path: str) -> Path:
    """Returns the folder of an adapter, which links do not lead out of `root`. Raises
    `InvalidRequest`."""
    if not root:
        raise InvalidRequest(
            "this node loads no adapters while it runs: start it with --lora-dir", "lora_path"
        )
    try:
        folder = Path(root, path).resolve()
    except (OSError, ValueError, RuntimeError):
        folder = Path("/")
    if not folder.is_relative_to(root):
        raise InvalidRequest("lora_path must lie below the folder of --lora-dir", "lora_path")
    return folder
