"""A decode node gives the KV of its answers to prefill nodes, for the next turns of conversations.

1. `only_kept_answers`   at the start: not where a model's answers stand in no later prompt, nor
                         where no state is kept behind them, as with drafts
2. `serve_answers`       `Prefixes` is served, and load reports name the prompts whose answers end
"""

from __future__ import annotations

import logging
from dataclasses import replace

from decode_node.disagg.proxy import DisaggProxy
from decode_node.parsers.output_parsers import OutputParsers
from decode_node.serving.prompts.kept_answers import keeps_answers
from engine.config import EngineConfig
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.tokenizer import Tokenizer
from engine.node.grpc_server import NodeGrpcServer
from engine.node.prefix_servicer import PrefixServicer
from engine.node.status import NodeStatus
from tandem_pb import prefixes_pb2_grpc

logger = logging.getLogger(__name__)


def only_kept_answers(
    config: EngineConfig, tokenizer: Tokenizer, parsers: OutputParsers
) -> EngineConfig:
    """Returns the configuration, without sharing where that would be of no use."""
    transfer = config.kv_transfer
    if transfer is None or not transfer.shares_prefixes:
        return config
    has_states = any(group.is_state for group in config.kv_layout.groups)
    if has_states and config.decode_query_len > 1:
        why = "with drafts states are kept behind prompts, and not behind answers"
    elif keeps_answers(tokenizer, reasons=parsers.reasoning_format is not None):
        return config
    else:
        why = (
            "the chat template leaves the reasoning of earlier turns away, so no later prompt "
            "begins with an answer's tokens"
        )
    logger.warning("answers are not offered to prefill nodes (--kv-share-prefixes): %s", why)
    return replace(config, kv_transfer=replace(transfer, shares_prefixes=False))


def serve_answers(
    engine: AsyncLLM, status: NodeStatus, proxy: DisaggProxy, server: NodeGrpcServer
) -> None:
    """Serves prefixes, if the engine offers any. Comes before the server starts."""
    transfer = engine.config.kv_transfer
    if transfer is None or not transfer.shares_prefixes:
        return
    status.serves_prefixes = True

    def note(prefix_hash: int) -> None:
        status.note_prefix(prefix_hash)
        status.notify()

    proxy.on_answer = note
    prefixes_pb2_grpc.add_PrefixesServicer_to_server(  # type: ignore[no-untyped-call]
        PrefixServicer(engine, status), server.server
    )
