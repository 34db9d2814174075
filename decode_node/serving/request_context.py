"""Holds what comes with a request besides its body: what its headers and the connection say."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.answer.journal import Resume
from edge.http.kept_response import KeptResponse
from edge.tracing.context import TraceContext


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Is one request's. `prefill_nodes` is None when none were named, `resume` is set when another
    node has begun the answer. With `is_long` the body is long, and what is done to all of it
    happens beside the event loop."""

    request_id: str
    received_at: float
    is_long: bool = False
    prefill_nodes: list[str] | None = None
    wants_timeline: bool = False
    wants_journal: bool = False
    wants_keepalives: bool = True
    resume: Resume | None = None
    cache_salt: str = ""
    """The tenant's salt, which the request's own can narrow and never leave."""
    model: str = ""
    """The router calls the model so; the answer bears the client's own name for it then."""
    trace: TraceContext | None = None
    load_format: str = ""
    """The format in which the answer tells the node's load; "": none."""
    prefix_hash: int = 0
    """The name that routers give to the prompt's beginning."""
    adapter_digest: str = ""
    """Says what a router means by an adapter's name; "": whatever has it."""
    prefix_holder: str = ""
    """Names who may hold the prompt's KV, for a prefill node to fetch it."""
    kept: KeptResponse | None = None
    """Says what a router tells of a response that it keeps."""
