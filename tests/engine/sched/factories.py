"""Small configurations and requests for scheduler tests."""

from __future__ import annotations

from typing import Any

from engine.config import CacheConfig, EngineConfig, KVLayers, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.sched.prompts.even_chunks import COST_BY_TOKENS, EvenChunks
from engine.sched.prompts.prompt_order import PromptOrder
from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout, attention_group
from kv_transfer.metadata import KVPeer, KVTransferParams
from kv_transfer.planes import Plane
from tests.engine.tiny_model import tiny_model

BLOCK_SIZE = 4
VOCAB_SIZE = 64
EOS = 0


def kv_layers(*windows: int | None, heads: int = 1) -> tuple[KVLayers, ...]:
    """Builds layers, one in each group. With 2 or 4 `heads` the first group has more than the
    others, whose blocks have as many times more tokens.
    """
    return tuple(
        KVLayers(layers=(index,), planes=(Plane("k", 1 if index else heads, 4),), window=window)
        for index, window in enumerate(windows)
    )


def compressed_layers() -> tuple[KVLayers, ...]:
    """Builds a layer in three groups, and one in two: a window, rows of 2 and 4 tokens, and what is
    still to become one, as DeepSeek V4 has them."""
    kv = (Plane("kv", 1, 4),)
    return (
        KVLayers(layers=(0, 1), planes=kv, window=5),
        KVLayers(layers=(0,), planes=kv, compress_ratio=2),
        KVLayers(layers=(0,), planes=(Plane("open", 1, 8),), window=3, window_align=2),
        KVLayers(layers=(1,), planes=kv, compress_ratio=4),
        KVLayers(layers=(1,), planes=(Plane("open", 1, 8),), window=1, window_align=4),
    )


def with_states(layers: tuple[KVLayers, ...], row_bytes: int = 4) -> tuple[KVLayers, ...]:
    """Adds two groups of a layer each that keep a state. Above 16 bytes it is larger than a block
    of four tokens is to begin with."""
    first = len(layers)
    return layers + tuple(
        KVLayers(layers=(first + i,), planes=(Plane("s", 1, row_bytes),), is_state=True)
        for i in range(2)
    )


def make_config(
    *,
    block_size: int = BLOCK_SIZE,
    max_model_len: int = 128,
    enable_prefix_caching: bool = True,
    decode_query_len: int = 1,
    kv_layers: tuple[KVLayers, ...] = (),
    kv_transfer: KVTransferConfig | None = None,
    **scheduler: Any,
) -> EngineConfig:
    """Makes a config; `scheduler` holds fields of `SchedulerConfig`."""
    model = tiny_model(
        served_model_name="fake",
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        model_hash="fake",
        kv_layers=kv_layers,
    )
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler}
    return EngineConfig(
        engine_id="test",
        epoch=1,
        model=model,
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        scheduler=SchedulerConfig(**limits),
        decode_query_len=decode_query_len,
        kv_transfer=kv_transfer,
    )


def make_order(full_tokens: int = 8, budget: int = 64) -> PromptOrder:
    """Makes an order of prompts, whose tokens all take the same time."""
    return PromptOrder(chunks=EvenChunks(COST_BY_TOKENS, budget), full_tokens=full_tokens)


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    priority: int = 0,
    cache_salt: str = "",
    arrival_time: float = 0.0,
    kv: KVTransferParams | None = None,
    num_choices: int = 1,
    seed: int = 0,
    prefix_peer: str = "",
    **sampling: Any,
) -> Request:
    """Makes a request. `sampling`: fields of `SamplingParams`; end-of-sequence does not end it
    unless asked. Several choices are named `r.0`, `r.1` ... and draw with seed, seed + 1 ...
    """
    params: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "seed": seed, **sampling}
    choice_ids = [f"{request_id}.{i}" for i in range(num_choices)] if num_choices > 1 else []
    return Request(
        EngineCoreRequest(
            request_id=request_id,
            spec=RequestSpec(
                prompt,
                SamplingParams(**params),
                priority=priority,
                cache_salt=cache_salt,
                sibling_seeds=tuple(seed + i for i in range(1, num_choices)),
            ),
            eos_token_ids=(EOS,),
            arrival_time=arrival_time,
            kv_transfer_params=kv,
            choice_ids=tuple(choice_ids),
            prefix_peer=prefix_peer,
        )
    )


def remote_prefill(transfer_id: str, attempt: int = 0) -> KVTransferParams:
    """Makes parameters for a decode node: the prompt's KV comes from a peer."""
    group = attention_group(layers=[0], heads=1, head_dim=4, dtype="float32", block_size=BLOCK_SIZE)
    layout = KVLayout(groups=(group,), tp_size=1, model_hash="fake")
    return KVTransferParams(
        do_remote_prefill=True,
        transfer_id=transfer_id,
        attempt=attempt,
        peer=KVPeer(engine_id="peer", epoch=1, layout=layout),
    )


def remote_decode(transfer_id: str, attempt: int = 0) -> KVTransferParams:
    """Makes parameters for a prefill node: a peer will pull the prompt's KV."""
    return KVTransferParams(do_remote_decode=True, transfer_id=transfer_id, attempt=attempt)
