"""A prefill and a decode engine; tests play both node servers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import EngineConfig, SpeculativeConfig
from engine.contracts.messages import KVTransferResult
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.request_stream import RequestStream
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tests.engine.core.tiny_engine import NUM_BLOCKS, make_request, tiny_config


@dataclass
class Pair:
    prefill: AsyncLLM
    decode: AsyncLLM
    num_started: int = field(default=0)

    def request(self, seed: int, **sampling: Any) -> tuple[GenerationRequest, GenerationRequest]:
        """Makes a request (for prefill, for decode). Of one that asks for one token no KV moves."""
        request_id = f"r{self.num_started + 1}"
        export = make_request(request_id, seed, **{**sampling, "max_tokens": 1})
        return self._with_transfer(export, make_request(request_id, seed, **sampling))

    def choices(
        self, prompt: list[int], seeds: range, **sampling: Any
    ) -> tuple[GenerationRequest, GenerationRequest]:
        """Makes a request (for prefill, for decode) of several choices, `r.0`, `r.1` ..."""
        request_id = f"r{self.num_started + 1}"
        choices = [
            GenerationRequest(
                f"{request_id}.{i}", RequestSpec(prompt, SamplingParams(seed=seed, **sampling))
            )
            for i, seed in enumerate(seeds)
        ]
        pull = GenerationRequest.of_choices(request_id, choices)
        export = replace(pull, request_id=request_id, spec=pull.spec.for_one_token(), choice_ids=())
        return self._with_transfer(export, replace(pull, request_id=request_id))

    def _with_transfer(
        self, export: GenerationRequest, pull: GenerationRequest
    ) -> tuple[GenerationRequest, GenerationRequest]:
        self.num_started += 1
        transfer_id = f"{self.num_started:032x}"
        pull.kv_transfer_params = KVTransferParams(
            do_remote_prefill=True,
            transfer_id=transfer_id,
            peer=self.prefill.ready.peer,
            first_token_only=pull.spec.needs_one_token,
        )
        if not pull.spec.needs_one_token:
            export.kv_transfer_params = KVTransferParams(
                do_remote_decode=True, transfer_id=transfer_id
            )
        return export, pull

    async def run_prefill(self, export: GenerationRequest) -> KVTransferResult:
        try:
            async for output in self.prefill.generate(export):
                for token_id in output.token_ids:
                    of_prompt = output.prompt_logprobs or ()
                    self.decode.supply_first_token(
                        export.request_id,
                        token_id,
                        prompt_logprobs=of_prompt,
                        siblings=output.siblings,
                        draft_feature=output.draft_feature,
                    )
            return await self.prefill.wait_kv_result(export.request_id)
        finally:
            self.prefill.abort(export.request_id)


async def tokens_of(stream: RequestStream) -> list[int]:
    return [token for output in [o async for o in stream] for token in output.token_ids]


async def tokens_by_choice(stream: RequestStream) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    async for output in stream:
        found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


async def start_engines(*starting: Awaitable[AsyncLLM]) -> list[AsyncLLM]:
    """Starts all at the same time, or none: if one fails, the others are shut down."""
    found = await asyncio.gather(*starting, return_exceptions=True)
    failed = [one for one in found if isinstance(one, BaseException)]
    started = [one for one in found if not isinstance(one, BaseException)]
    if failed:
        for llm in started:
            await llm.shutdown()
        raise failed[0]
    return started


async def start_engine(
    role: str,
    num_blocks: int = NUM_BLOCKS,
    speculative: SpeculativeConfig | None = None,
    path: str = "",
    stages: int = 1,
    **transfer: Any,
) -> AsyncLLM:
    """Starts an engine. `role`: prefill or decode. `path`: where the model has a tokenizer.
    `transfer`: settings of its data plane."""
    kv_transfer = KVTransferConfig(
        kv_role="kv_producer" if role == "prefill" else "kv_consumer",
        **{"num_streams": 2, **transfer},
    )
    config = tiny_config(async_scheduling=role == "decode", path=path)
    config = replace(config, cache=replace(config.cache, num_blocks=num_blocks))
    parallel = replace(config.parallel, pipeline_parallel_size=stages)
    config = replace(config, kv_transfer=kv_transfer, speculative=speculative, parallel=parallel)
    if speculative is not None and role == "decode":
        config = replace(config, decode_query_len=speculative.num_speculative_tokens + 1)
    return await AsyncLLM.start(config)


def other_role(config: EngineConfig) -> EngineConfig:
    """Returns the engine in its other role, as a node that is new to its peers."""
    assert config.kv_transfer is not None
    role = "kv_consumer" if config.is_producer else "kv_producer"
    transfer = replace(config.kv_transfer, kv_role=role)
    name = f"{role}-{secrets.token_hex(4)}"
    return replace(config, engine_id=name, epoch=secrets.randbits(63), kv_transfer=transfer)
