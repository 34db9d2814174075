"""Names tandem's own HTTP headers, in lower case, and says who says each to whom.

Clients may say:          SESSION, AGENT_SESSIONS, PRIORITY, TTFT_DEADLINE, TIMELINE, REQUEST_ID,
                          LOAD_FORMAT
Operators may say:        ENDPOINT
Only a router may say:    PREFILL_NODES, CACHE_SALT, PREFIX, PREFIX_HOLDER, PROMPT_PLACES, JOURNAL,
                          RESUME, MODEL, ADAPTER, SSE_KEEPALIVE, RESPONSE, ABORTED
A decode node answers:    REQUEST_ID, JOURNAL, PREFILL_NODE, PREFILL_WORK, PREFILL_FAILED, LOAD
A router answers:         REQUEST_ID, MODEL_VERSION, PREFILL_NODE, LOAD
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

from edge.tracing.context import REQUEST_ID as REQUEST_ID

SESSION = "x-session-id"
AGENT_SESSIONS = (
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-grok-conv-id",
    "x-litellm-session-id",
    "session-id",
)
"""Name the same for agents and proxies: opencode and crush, Claude Code, Grok Build, LiteLLM and
OpenHands, Codex. Not goose: its `agent-session-id` is the day and a number of each machine's own,
so the first sessions of all its users have one name."""
PRIORITY = "x-tandem-priority"
TTFT_DEADLINE = "x-slo-ttft-ms"
TIMELINE = "x-tandem-timeline"
"""An answer says where its time went, if this header is `1`."""
ENDPOINT = "x-gateway-destination-endpoint"
"""The node that serves a request, by its address or id. The name is that of the Gateway API's
endpoint pickers."""
LOAD_FORMAT = "endpoint-load-metrics-format"
"""Asks a decode node for its load, or a router for that of its nodes, by the name of a format."""
LOAD = "endpoint-load-metrics"

PREFILL_NODES = "x-prefiller-host-port"
"""`host:port` of each, best first; empty: the decode node computes the prompt itself."""
CACHE_SALT = "x-tandem-cache-salt"
PREFIX = "x-tandem-prefix"
"""Hash of the prompt's longest prefix of whole blocks, in 16 hex digits."""
PROMPT_PLACES = "x-tandem-prompt-places"
"""Says where each prompt of a list goes behind the first: `PREFIX/PREFILL_NODES`, with semicolons
between them. Prompts behind those go where the first does, the second, and so on."""
PREFIX_HOLDER = "x-tandem-prefix-holder"
"""Names who may hold more of the prompt's KV than the first prefill node: `prefill/host:port` or
`decode/host:port`, where its gRPC services are."""
JOURNAL = "x-tandem-journal"
"""Says in a request that a journal is wanted, in an answer the number of its first entry."""
RESUME = "x-tandem-resume"
"""Bytes of the client's own body; what exists of the answer already follows it."""
SSE_KEEPALIVE = "x-tandem-sse-keepalive"
"""Says by `0` that the node begins a stream with its first token and sends no keep-alives. A caller
that says so keeps the client's stream alive, and learns from the head of the answer."""
RESPONSE = "x-tandem-response"
"""Says of a response that the router keeps what its answer has to tell
(`edge.http.answers.kept_response`)."""
ABORTED = "x-tandem-aborted"
"""Says by `1` that the end of the answer was wanted before a node had the request."""
MODEL = "x-tandem-model"
"""The name by which the node serves the model, where the client asked by one that only routers
know. Percent-encoded, as is MODEL_VERSION."""

ADAPTER = "x-tandem-adapter"
"""Digest of the adapter that the router means by the model's name."""
MODEL_VERSION = "x-tandem-model-version"
"""The name by which nodes serve the model that answered."""
PREFILL_NODE = "x-tandem-prefill-node"
PREFILL_WORK = "x-tandem-prefill-work"
PREFILL_FAILED = "x-tandem-prefill-failed"

FROM_ROUTERS = frozenset(
    {
        PREFILL_NODES,
        CACHE_SALT,
        PREFIX,
        PROMPT_PLACES,
        PREFIX_HOLDER,
        JOURNAL,
        RESUME,
        MODEL,
        ADAPTER,
        SSE_KEEPALIVE,
        RESPONSE,
        ABORTED,
    }
)


def encode_name(name: str) -> str:
    """Returns a model's name as headers can have it."""
    return quote(name, safe=" !#$&'()*+,/:;=?@[]|~")


def decode_name(text: str) -> str:
    return unquote(text)


def media_type(headers: Mapping[str, str]) -> str:
    """Returns the type of a body without its parameters, in lower case; empty if none is said."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()
