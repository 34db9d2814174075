"""Holds what comes with a request besides its body: what its headers and the connection say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_node.answer.journal import Resume
from decode_node.answer.running.aborts import EarlyAborts
from edge.http.answers.kept_response import KeptResponse
from edge.tracing.context import TraceContext


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """Says where a prompt is computed.

    Attributes:
        prefill_nodes: `host:port` of each, best first; None: none were named.
        prefix_hash: The name that routers give to the prompt's beginning.
        prefix_holder: Names who may hold the prompt's KV, for a prefill node to fetch it.
    """

    prefill_nodes: Sequence[str] | None = None
    prefix_hash: int = 0
    prefix_holder: str = ""


def created_at(resume: Resume | None, kept: KeptResponse | None) -> int:
    """Returns what another node has said of the answer, or else a router, or the clock. What needs
    the moment later takes it from here: midnight may lie between two readings."""
    if resume is not None:
        return resume.created
    return (kept.created_at if kept is not None else 0) or int(time.time())


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Is one request's. `places` are those of its prompts, in turn, `resume` is set when another
    node has begun the answer. With `is_long` the body is long, and what is done to all of it
    happens beside the event loop."""

    request_id: str
    received_at: float
    created: int
    """The Unix seconds at which the answer was created (`created_at`): a template's date is of the
    same moment."""
    is_long: bool = False
    places: Sequence[PromptPlace] = (PromptPlace(),)
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
    adapter_digest: str = ""
    """Says what a router means by an adapter's name; "": whatever has it."""
    kept: KeptResponse | None = None
    """Says what a router tells of a response that it keeps."""
    is_aborted: bool = False
    """Its end was wanted before it came here."""
    early: EarlyAborts = field(default_factory=EarlyAborts)
    """Learns of it while the request is read."""

    def place_of(self, prompt: int) -> PromptPlace:
        """Returns where the prompt of this number goes. What the place says of a beginning is of
        the first prompt that goes there."""
        place = self.places[prompt % len(self.places)]
        return place if prompt < len(self.places) else PromptPlace(place.prefill_nodes)
