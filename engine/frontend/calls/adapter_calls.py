"""The node server's side of adapters: which names there are, and calls that change them.

static     --lora-modules: known from the start
load       read here for its digest ──▶ by every rank ──▶ served by its name
unload     the name is gone at once ──▶ the engine core forgets the adapter when its last
           request has ended, or a new name stands for the same weights

Calls have versions: one that is older than what is known here changes nothing. `records` tells
routers of those that were followed, which bring other nodes up to date.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

from edge.adapter_call import LOAD_LIMIT_S, MAX_VERSION, UNLOAD_LIMIT_S, AdapterCall
from edge.printable import printable
from engine.config import EngineConfig
from engine.contracts.errors import EngineCallTimeout, InvalidRequest
from engine.contracts.messages import AdapterAnswer, AddAdapter, RemoveAdapter
from engine.contracts.request_spec import AdapterRef
from engine.frontend.calls.adapter_records import AdapterRecords
from engine.frontend.calls.engine_calls import EngineCalls
from engine.frontend.calls.served_adapters import ServedAdapters
from engine.lora import check_adapter_name
from engine.models.adapters.adapter_files import AdapterError, read_adapter

_MAX_NAME = 512
"""Characters that routers read of a name."""
_MAX_PATH = 900
"""Characters of a path below `--lora-dir`: errors name it."""


class OutdatedCall(Exception):
    """A newer call has changed the name since."""


class AdapterCalls:
    """Adapters by name, and the calls that change them."""

    def __init__(self, config: EngineConfig, calls: EngineCalls) -> None:
        self._calls = calls
        self._config = config
        self._of_names: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Calls about a name come one after the other."""
        self._loads = asyncio.Lock()
        """Ranks read one adapter at a time, each within a limit of its own."""
        self._adding = ""
        """The digest of what is read, which no name stands for yet."""
        self._reader = ThreadPoolExecutor(1, "adapter-files")
        """A file server that is silent keeps this thread, and none of those that prompts need."""
        modules = () if config.lora is None else config.lora.modules
        self.known = ServedAdapters()
        self.known.update((one.name, AdapterRef(one.name, one.digest)) for one in modules)
        self.records = AdapterRecords()
        self._own_paths = {(module.name, module.digest): module.path for module in modules}

    def has(self, digest: str) -> bool:
        """Returns whether any name stands for an adapter."""
        return self.known.has(digest)

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
        for another one, whose requests go on: nothing waits for them.

        Args:
            path: Below `--lora-dir`; empty: of the adapter that the settings name so.
            version: Of the call; 0: it is the newest.
            digest: What the adapter must be; empty: whatever lies there.
            model: Whose it is, as `records` tells.

        Raises:
            InvalidRequest: The name is taken, or the adapter cannot be served.
            OutdatedCall: A newer call has changed the name.
            EngineCallTimeout: The adapter could not be read in time, and nothing has changed.
            EngineDeadError: The engine is dead.
        """
        _check_call(name, version, model)
        async with self._lock_of(name), self._loads:
            version = version or self.records.next_version(name)
            if (known := self.records.of(name)) is not None and version < known.version:
                raise OutdatedCall
            if known is not None and digest and (version, digest) == known.order:
                return self.known[name]  # Many routers ask for the same.
            until = asyncio.get_running_loop().time() + LOAD_LIMIT_S
            try:
                async with asyncio.timeout_at(until):
                    folder, found = await self._read(name, path, digest, in_place=in_place)
            except TimeoutError:
                raise EngineCallTimeout("reading the adapter's files", LOAD_LIMIT_S) from None
            record = AdapterCall(name, found, path, version, model)
            if known is not None and record.order <= known.order:
                if record.order < known.order:
                    raise OutdatedCall
                return self.known[name]
            await self._add(found, folder, until)
            ref, old = AdapterRef(name, found), self.known.get(name)
            self.known[name] = ref
            self.records.note(record)
        if old is not None and not self._is_wanted(old.digest):
            self._calls.send(RemoveAdapter(self._calls.next_id(), old.digest))
        return ref

    async def unload(self, name: str, version: int = 0, model: str = "") -> None:
        """Serves nothing by this name any more; returns when its adapter is forgotten. A call of a
        given `version` is remembered where there is none, too.

        Raises:
            InvalidRequest: It is no call that a router makes.
            KeyError: There is no such adapter.
            OutdatedCall: A newer call has changed the name.
            EngineCallTimeout: Its last request has not ended; no other can follow.
            EngineDeadError: The engine is dead.
        """
        _check_call(name, version, model)
        async with self._lock_of(name):
            if name not in self.known and not version:
                raise KeyError(name)
            version = version or self.records.next_version(name)
            if self.records.is_newer(version, "", name):
                self.records.note(AdapterCall(name, "", "", version, model))
            elif name in self.known:
                raise OutdatedCall
            ref = self.known.pop(name)
            is_last = not self._is_wanted(ref.digest)
        if is_last:
            await self._remove(ref.digest)

    def _is_wanted(self, digest: str) -> bool:
        """Returns whether any name stands for an adapter, or soon will."""
        return digest == self._adding or self.has(digest)

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._of_names.setdefault(name, asyncio.Lock())

    async def _add(self, digest: str, folder: Path, until: float) -> None:
        """Lets the engine core read an adapter, which no name stands for yet. Whether its caller
        goes on waiting or not, it is forgotten there if none will. Raises like `load`."""
        call = AddAdapter(self._calls.next_id(), digest, str(folder))
        self._adding = digest
        try:
            left_s = until - asyncio.get_running_loop().time()
            answer = await self._calls.ask(call, AdapterAnswer, left_s)
            if answer.error:
                raise InvalidRequest(answer.error, "lora_path")
        except (EngineCallTimeout, InvalidRequest, asyncio.CancelledError):
            if not self.has(digest):
                self._calls.send(RemoveAdapter(self._calls.next_id(), digest))
            raise
        finally:
            self._adding = ""

    async def _remove(self, digest: str) -> None:
        """Returns when the engine core has forgotten an adapter that no name stands for."""
        call = RemoveAdapter(self._calls.next_id(), digest)
        await self._calls.ask(call, AdapterAnswer, UNLOAD_LIMIT_S)

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
            found = await asyncio.get_running_loop().run_in_executor(
                self._reader, read_adapter, folder, lora.max_lora_rank
            )
        except AdapterError as error:
            raise InvalidRequest(printable(str(error)), "lora_path") from None
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
    if len(path) > _MAX_PATH:
        raise InvalidRequest(f"lora_path has at most {_MAX_PATH} characters", "lora_path")
    try:
        folder = Path(root, path).resolve()
    except (OSError, ValueError, RuntimeError):
        folder = Path("/")
    if not folder.is_relative_to(root):
        raise InvalidRequest("lora_path must lie below the folder of --lora-dir", "lora_path")
    return folder


def _check_call(name: str, version: int, model: str) -> None:
    """Refuses what reports could not carry. Raises `InvalidRequest`."""
    if version > MAX_VERSION:
        raise InvalidRequest(f"a version is at most {MAX_VERSION}", "version")
    if len(name) > _MAX_NAME or len(model) > _MAX_NAME:
        raise InvalidRequest(f"a name has at most {_MAX_NAME} characters", "lora_name")
