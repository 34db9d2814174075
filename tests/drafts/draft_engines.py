"""The engines of `parity.py`, in this process: one node, or two with the wire between.

A pair's transfer processes are real ones; this process plays both node servers.
"""

from __future__ import annotations

import json
import random
import secrets
import select
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from engine.config import (
    CacheConfig,
    DeviceConfig,
    DrafterName,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.contracts.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SupplyFirstToken,
)
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from engine.models.checkpoint import load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.worker.drafts.drafter import Drafter
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tandem_kernels.batch.batch_tables import RowTables
from tests.drafts.draft_requests import VOCAB, names_of
from tests.drafts.draft_targets import CONFIGS, LAYER, TARGETS
from tests.drafts.draft_tokenizer import save_tokenizer

_ROWS = 32
_LEASE_S = 600.0
"""On a busy machine, processes of low priority have no core for a while."""
_BLOCK_SIZE, _FEW_BLOCKS = 8, 130
"""A round's requests need more of them when they run at once, so some are preempted."""
_OF_ROWS = 1, 190
"""The same beside rows that stand for several tokens: with longer blocks no prompt is so long that
a prefix could be found."""
_DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {**LAYER, "num_hidden_layers": 1},
    "eagle": {**LAYER, "num_hidden_layers": 1},
    "eagle3": {
        **LAYER,
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    },
    "medusa": {"hidden_size": 32, "vocab_size": VOCAB, "num_heads": 7},
}


class Node(Protocol):
    """Takes requests and gives what clients get."""

    def submit(self, request: EngineCoreRequest) -> None: ...

    def abort(self, names: list[str]) -> None: ...

    def step(self) -> list[EngineCoreOutput]:
        """Goes on as far as possible without waiting, or waits until something has happened."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def core(self) -> EngineCore:
        """Returns the engine that decodes."""

    def close(self) -> None: ...


class Engine:
    """One engine."""

    def __init__(self, config: EngineConfig, executor: UniprocExecutor | None = None) -> None:
        self.executor = executor or UniprocExecutor(config)
        self._core = EngineCore(config, self.executor, lambda stage, fraction, total=0: None)

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def is_idle(self) -> bool:
        return self.core.is_idle

    @property
    def event_fds(self) -> list[Any]:
        fds = [*self.executor.poll_sources, self.core.connector.fileno()]
        return [fd for fd in fds if fd != -1]

    def plant(self, drafter: Drafter) -> None:
        """Replaces who drafts, from the next step on. There must be something: without, nothing
        that writes drafts was compiled while the engine started."""
        drafts = self.executor._worker.runner.drafts
        assert drafts.drafter is not None
        drafts.drafter = drafter

    def submit(self, request: EngineCoreRequest) -> None:
        self.core.handle(request)

    def abort(self, names: list[str]) -> None:
        self.core.handle(AbortRequests(names))

    def step(self) -> list[EngineCoreOutput]:
        return self.core.step().outputs

    def close(self) -> None:
        self.core.shutdown()
        self.executor.shutdown()


class Pair:
    """A prefill engine, which belongs to the caller, and a decode engine.

    1. `submit`   both get the request
    2. `step`     the first token, which prefill draws, goes to the client and to decode, which
                  pulls the prompt's KV meanwhile
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._prefill, self._decode = prefill, decode
        self._open: dict[str, EngineCoreRequest] = {}
        """Requests whose first token is not known, by id."""

    @property
    def core(self) -> EngineCore:
        return self._decode.core

    @property
    def is_idle(self) -> bool:
        engines = (self._prefill.core, self._decode.core)
        return all(one.is_idle and not one.connector.counters["live_transfers"] for one in engines)

    def submit(self, request: EngineCoreRequest) -> None:
        if request.spec.needs_one_token:
            self._prefill.submit(request)
            return
        transfer_id = secrets.token_hex(16)
        export = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
        pull = KVTransferParams(
            do_remote_prefill=True,
            transfer_id=transfer_id,
            peer=self._prefill.core.connector.peer_info,
        )
        changed = msgspec.structs.replace
        self._open[request.request_id] = request
        self._prefill.submit(
            changed(
                request,
                spec=request.spec.for_one_token(),
                choice_ids=(),
                kv_transfer_params=export,
            )
        )
        self._decode.submit(changed(request, kv_transfer_params=pull))

    def abort(self, names: list[str]) -> None:
        self._prefill.abort([*self._open, *names])
        self._decode.abort([*self._open, *names])
        self._open.clear()

    def step(self) -> list[EngineCoreOutput]:
        select.select([*self._prefill.event_fds, *self._decode.event_fds], [], [], 0.02)
        of_prefill = self._prefill.core.step()
        found = [one for output in of_prefill.outputs for one in self._first(output)]
        of_decode = self._decode.core.step()
        for outputs in (of_prefill, of_decode):
            _check_transfers(outputs)
        return found + of_decode.outputs

    def _first(self, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Takes what prefill gives of a request. Returns what the client gets of it now."""
        if output.error:
            raise RuntimeError(f"{output.request_id} failed on prefill: {output.error}")
        if output.request_id not in self._open:
            return [output]  # One token was the whole answer.
        if not output.new_token_ids:
            return [] if output.prompt_logprobs is None else [output]
        request = self._open.pop(output.request_id)
        others = output.siblings.token_ids if output.siblings is not None else []
        their_logprobs = output.siblings.logprobs if output.siblings is not None else []
        self._decode.core.handle(
            SupplyFirstToken(
                output.request_id,
                output.new_token_ids[0],
                others,
                output.draft_feature or b"",
            )
        )
        tokens = [output.new_token_ids[0], *others]
        logprobs = [*(output.logprobs or []), *their_logprobs]
        first = [
            EngineCoreOutput(name, [token], logprobs=logprobs[index : index + 1])
            for index, (name, token) in enumerate(zip(names_of(request), tokens, strict=True))
        ]
        first[0].prompt_logprobs = output.prompt_logprobs
        return first

    def close(self) -> None:
        self._decode.close()


def _check_transfers(outputs: EngineCoreOutputs) -> None:
    for result in outputs.kv_results:
        if not result.ok and not result.is_called_off and result.reason != "aborted":
            raise RuntimeError(f"the transfer of {result.request_id} failed: {result.reason}")


class PlantedAnswers:
    """Proposes what a run without drafts gave, wrong one time in five."""

    def __init__(self) -> None:
        self.known: dict[int, list[list[int]]] = {}
        """Prompts with their answers, by the sum of the first tokens."""
        self._rng = random.Random(0)

    def learn(self, known: Sequence[list[int]]) -> None:
        self.known = {}
        for one in known:
            self.known.setdefault(one[0], []).append(one)

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        found = torch.full((len(idx_mapping), rows.max_drafts), -1, dtype=torch.int64)
        for index, row in enumerate(idx_mapping.tolist()):
            length = int(rows.total_len[row])
            tokens = rows.token_ids[row, :length].tolist()
            fitting = (one for one in self.known.get(tokens[0], []) if one[:length] == tokens)
            drafts = next(fitting, [])[length : length + rows.max_drafts]
            told = [t if self._rng.random() < 0.8 else t ^ 1 for t in drafts]
            found[index, : len(told)] = torch.tensor(told, dtype=torch.int64)
        return found


def write_models(folder: Path, target: str = TARGETS[0]) -> None:
    """Writes what the engines read: config files, and the tokenizer that grammars need."""
    for kind, config in {"target": CONFIGS[target], **_DRAFTERS}.items():
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder / "target", VOCAB)


def base_config(folder: Path) -> EngineConfig:
    """Returns the engine without drafts to which others are compared."""
    model = load_model_config(folder / "target", load_format="dummy", dtype="float32")
    block_size, _ = _sizes_of(model)
    return EngineConfig(
        engine_id=f"parity-{secrets.token_hex(4)}",
        epoch=1,
        model=model,
        cache=CacheConfig(block_size=block_size, num_blocks=1000),
        scheduler=SchedulerConfig(max_num_seqs=_ROWS, max_num_batched_tokens=256),
        device=DeviceConfig(deterministic=True),
    )


def _sizes_of(model: ModelConfig) -> tuple[int, int]:
    """Returns the size of blocks, and how many are few."""
    has_rows = any(kv.compress_ratio > 1 for kv in model.kv_layers)
    return _OF_ROWS if has_rows else (_BLOCK_SIZE, _FEW_BLOCKS)


def speculative_config(folder: Path, method: str, num_drafts: int) -> SpeculativeConfig:
    name = msgspec.convert(method, DrafterName)
    draft = None
    if name != "ngram":
        where = folder / ("target" if name == "mtp" else name)
        draft = read_draft(name, str(where), base_config(folder).model, num_drafts)
    return SpeculativeConfig(
        method=name,
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=3,
        prompt_lookup_min=1,
        draft=draft,
    )


def decoding_config(
    folder: Path, speculative: SpeculativeConfig | None, query_len: int
) -> EngineConfig:
    """Returns an engine with few blocks whose rows compute `query_len` tokens a step."""
    config = base_config(folder)
    is_double = speculative is not None and speculative.method == "draft_model"
    _, blocks = _sizes_of(config.model)
    if is_double:
        blocks = blocks * 4 // 3
    return replace(
        config,
        cache=replace(config.cache, num_blocks=blocks),
        scheduler=replace(config.scheduler, async_scheduling=True),
        speculative=speculative,
        decode_query_len=query_len,
    )


def prefill_engine(folder: Path, speculative: SpeculativeConfig | None) -> Engine:
    config = replace(base_config(folder), speculative=speculative)
    return Engine(with_transfers(config, is_producer=True))


def decode_engine(config: EngineConfig) -> Engine:
    return Engine(with_transfers(config, is_producer=False))


def with_transfers(config: EngineConfig, *, is_producer: bool) -> EngineConfig:
    """Returns the engine of a prefill or a decode node, with a name of its own."""
    return replace(
        config,
        engine_id=f"{config.engine_id}-{secrets.token_hex(4)}",
        kv_transfer=KVTransferConfig(
            kv_role="kv_producer" if is_producer else "kv_consumer",
            num_streams=1,
            staging_bytes=256 << 20,
            lease_s=_LEASE_S,
        ),
    )
