"""The node server's side of adapters: which names there are, and calls that change them.

static     --lora-modules: known from the start
load       read here for its digest ──▶ by every rank ──▶ served by its name
unload     the name is gone at once ──▶ the engine core forgets the adapter when its last
           request has ended, and no other name stands for it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.frontend.engine_calls import EngineCalls
from engine.lora import check_adapter_name
from engine.messages import AdapterAnswer, AddAdapter, RemoveAdapter, ToEngineCore
from engine.models.adapter_files import AdapterError, read_adapter
from engine.request_spec import AdapterRef


class AdapterCalls(EngineCalls[AdapterAnswer]):
    """Adapters by name, and the calls that change them."""

    def __init__(self, config: EngineConfig, send: Callable[[ToEngineCore], None]) -> None:
        super().__init__(send)
        self._config = config
        self._lock = asyncio.Lock()
        modules = () if config.lora is None else config.lora.modules
        self.known = {module.name: AdapterRef(module.name, module.digest) for module in modules}

    def names_of(self, digest: str) -> list[str]:
        """Returns the names that stand for an adapter."""
        return [name for name, ref in self.known.items() if ref.digest == digest]

    def has(self, digest: str) -> bool:
        """Returns whether any name stands for an adapter."""
        return bool(self.names_of(digest))

    async def load(self, name: str, path: str, *, in_place: bool = False) -> AdapterRef:
        """Serves the adapter in the folder `path` by this name. With `in_place` the name may stand
        for another one, whose requests go on.

        Raises:
            InvalidRequest: The name is taken, or the adapter cannot be served.
            EngineDeadError: The engine is dead.
        """
        lora = self._config.lora
        if lora is None:
            raise InvalidRequest("this node serves no adapters: start it with --enable-lora")
        folder = _below(lora.folder, path)
        async with self._lock:
            taken = {*self._config.model.served_names, *(() if in_place else self.known)}
            if fault := check_adapter_name(name, taken):
                raise InvalidRequest(fault, "lora_name")
            try:
                found = await asyncio.to_thread(read_adapter, folder, lora.max_lora_rank)
            except AdapterError as error:
                raise InvalidRequest(str(error), "lora_path") from None
            ref, old = AdapterRef(name, found.digest), self.known.get(name)
            answer = await self._ask(AddAdapter(next(self._ids), ref.digest, str(folder)))
            if answer.error:
                raise InvalidRequest(answer.error, "lora_path")
            self.known[name] = ref
        if old is not None and not self.has(old.digest):
            await self._ask(RemoveAdapter(next(self._ids), old.digest))
        return ref

    async def unload(self, name: str) -> None:
        """Serves nothing by this name any more; returns when its adapter is forgotten.

        Raises:
            KeyError: There is no such adapter.
            EngineDeadError: The engine is dead.
        """
        async with self._lock:
            ref = self.known.pop(name)
            is_last = not self.has(ref.digest)
        if is_last:
            await self._ask(RemoveAdapter(next(self._ids), ref.digest))


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
