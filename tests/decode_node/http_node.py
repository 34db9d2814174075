"""A decode node's HTTP application over a fake engine, reached through ASGI or a real socket."""

from __future__ import annotations

import asyncio
import atexit
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from decode_node.config import DecodeNodeSettings
from decode_node.disagg.cached_prefixes import CachedPrefixes
from decode_node.disagg.credits import KVCredits
from decode_node.disagg.proxy import DisaggProxy
from decode_node.disagg.remote_prefill import RemotePrefillLimits
from decode_node.grammar.checks.grammar_checker import GrammarChecker
from decode_node.http.callers import CallerCheck
from decode_node.http.routes import ApiState
from decode_node.images.create_reader import create_image_reader
from decode_node.served_text import ServedText, create_parsers, find_defaults
from decode_node.server import create_metrics, create_node_app, read_api_keys
from edge.http.connection.guarded_protocol import guarded_protocol
from edge.security.credentials import Credentials
from edge.tracing.tracer import Tracer
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from engine.lora import LoRAConfig
from engine.node.http_server import HttpServer, listen
from tests.decode_node.decode_fakes import TIMEOUT_S, FakeEngine, FakePrefillNodes
from tests.engine.core.tiny_engine import NUM_BLOCKS, tiny_config
from tests.engine.frontend.small_tokenizers import byte_level_backend

MODEL = "tiny"
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
)
VOCAB_SIZE = 400
CONTEXT = 256
_COMMON_LABELS = {"model_name", "engine"}


@cache
def chat_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), ChatTemplate(TEMPLATE, {}))


@cache
def _checker_of(tokenizer: str, vocab_size: int) -> GrammarChecker:
    folder = tempfile.TemporaryDirectory(prefix="tandem-tokenizer-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    checker = GrammarChecker(tiny_config(vocab_size=vocab_size, path=folder.name).model)
    atexit.register(checker.close)
    return checker


def grammar_checker(tokenizer: Tokenizer) -> GrammarChecker:
    """Returns the one that all nodes of a test process share. Its process starts when it is
    used."""
    return _checker_of(tokenizer.to_json(), max(VOCAB_SIZE, tokenizer.vocab_size))


@dataclass
class HttpNode:
    """One node. `client` speaks ASGI; the app never sees a socket."""

    engine: FakeEngine
    nodes: FakePrefillNodes
    proxy: DisaggProxy
    state: ApiState
    tokenizer: Tokenizer
    app: ASGIApp
    callers: CallerCheck
    settings: DecodeNodeSettings
    client: httpx.AsyncClient

    async def metrics(self) -> dict[str, float]:
        """Maps `name{"label": ...}` without the labels that all have, to value."""
        text = (await self.client.get("/metrics")).text
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in _COMMON_LABELS}
                found[sample.name + (json.dumps(labels) if labels else "")] = sample.value
        return found

    async def check_empty(self) -> None:
        await self.nodes.check_empty()
        await self.state.open.wait_idle(TIMEOUT_S)
        self.engine.check_empty()
        assert self.state.open.count == self.proxy.open.count == 0
        assert self.proxy.num_free_blocks == NUM_BLOCKS
        assert self.proxy.num_queued == 0


_known_settings: dict[str, DecodeNodeSettings] = {}


def _settings_of(**given: Any) -> DecodeNodeSettings:
    """Returns settings of a node, which take longer to read than a short answer to make. No test
    here sets them by its environment."""
    name = repr(sorted(given.items()))
    if name not in _known_settings:
        _known_settings[name] = DecodeNodeSettings(model="unused", **given)
    return _known_settings[name].model_copy()


@asynccontextmanager
async def http_node(
    *,
    auto: bool = True,
    tokenizer: Tokenizer | None = None,
    scripts: Sequence[str] = (),
    context: int = CONTEXT,
    block_size: int = 0,
    aliases: tuple[str, ...] = (),
    end_ids: tuple[int, ...] = (),
    lora: LoRAConfig | None = None,
    **settings: Any,
) -> AsyncIterator[HttpNode]:
    """At the end everything must be empty. `auto`: the engine answers by itself, with one of the
    `scripts` where there are any. `block_size`: larger than usual, for long prompts."""
    tokenizer = tokenizer or chat_tokenizer()
    vocab_size = max(VOCAB_SIZE, tokenizer.vocab_size)
    config = tiny_config(
        vocab_size=vocab_size,
        max_model_len=context,
        served_aliases=aliases,
        eos_token_ids=end_ids,
    )
    config = replace(config, lora=lora)
    if block_size:
        config = replace(config, cache=replace(config.cache, block_size=block_size))
    engine = FakeEngine(config, tokenizer, auto=auto)
    engine.scripts = [tokenizer.encode(text + "</s>") for text in scripts]
    nodes = FakePrefillNodes()
    node_settings = _settings_of(**settings)
    proxy = DisaggProxy(
        engine,
        nodes,
        KVCredits(NUM_BLOCKS, config.cache.block_size, 64),
        layout=config.kv_layout,
        prefix_index=CachedPrefixes(NUM_BLOCKS, config.cache.block_size),
        limits=RemotePrefillLimits(),
        max_waiting_requests=node_settings.max_waiting_requests,
    )
    state = ApiState()
    callers = CallerCheck(
        read_api_keys(node_settings), Credentials(node_settings.security_config())
    )
    tracer = Tracer.open(node_settings, "tandem-decode", config.engine_id)
    metrics = create_metrics(engine, proxy, tracer)  # type: ignore[arg-type]
    parsers = create_parsers(node_settings, tokenizer)
    text = ServedText(tokenizer, parsers, find_defaults(node_settings, config.model))
    app = create_node_app(
        node_settings,
        engine,  # type: ignore[arg-type]
        text,
        proxy,
        metrics,
        state,
        callers,
        grammar_checker(tokenizer),
        create_image_reader(node_settings, config),
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport,
        base_url="http://node",
        headers={"content-type": "application/json"},
    ) as client:
        node = HttpNode(engine, nodes, proxy, state, tokenizer, app, callers, node_settings, client)
        yield node
        await node.check_empty()


@asynccontextmanager
async def live(node: HttpNode) -> AsyncIterator[str]:
    """Serves the node's application behind a real uvicorn on loopback; yields its URL."""
    listener = listen("127.0.0.1", 0)
    protocol = guarded_protocol(
        node.settings.connection_limits(), node.callers, node.settings.http_front()
    )
    config = uvicorn.Config(
        node.app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        # Clients that do not try again must not meet a connection that has just been given up: on
        # a busy machine they do nothing for seconds.
        timeout_keep_alive=int(TIMEOUT_S),
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(TIMEOUT_S):
            await serving


def sse_events(body: str) -> list[str]:
    """Payloads of a stream, whose framing must be exact."""
    assert body.endswith("\n\n")
    events = body.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks_of(body: str) -> list[dict[str, Any]]:
    """Chunks of a complete stream: `[DONE]` once and last."""
    *chunks, done = sse_events(body)
    assert done == "[DONE]"
    assert "[DONE]" not in chunks
    return [json.loads(chunk) for chunk in chunks]
