"""Fields that several APIs have and that change nothing here, each written once."""

from __future__ import annotations

from decode_node.protocol.bodies.body import Ignored, StrictBody


class TransferFields(StrictBody):
    """The fields by which peers' own proxies move caches from node to node."""

    kv_transfer_params: Ignored = None
    """The nodes move KV by themselves."""
    ec_transfer_params: Ignored = None
    """The nodes move what they need by themselves."""


class PacedFields(StrictBody):
    """The field that says how often a stream tells of new tokens."""

    stream_interval: Ignored = None
    """Tokens are sent as they come."""


class SessionFields(StrictBody):
    """The field that routers read."""

    session_id: Ignored = None
    """It names a session to the router, as X-Session-ID does."""


class PlacementFields(SessionFields):
    """The fields by which SGLang's own router places a prompt, and labels it."""

    bootstrap_host: Ignored = None
    """The cluster places a prompt by itself."""
    bootstrap_port: Ignored = None
    """The cluster places a prompt by itself."""
    bootstrap_room: Ignored = None
    """The cluster places a prompt by itself."""
    routed_dp_rank: Ignored = None
    """The cluster places a prompt by itself."""
    data_parallel_rank: Ignored = None
    """The cluster places a prompt by itself."""
    custom_labels: Ignored = None
    """Metrics have no labels of clients."""


class SummaryFields(StrictBody):
    """The field that would have thoughts summarised."""

    summary: Ignored = None
    """All of the reasoning is sent, and nothing is summarised."""


class TierFields(StrictBody):
    """The field that says what a request may cost."""

    service_tier: Ignored = None
    """There is one tier."""


class CallerFields(StrictBody):
    """The fields by which all of OpenAI's APIs know who asks, and what is cached for them."""

    safety_identifier: Ignored = None
    """Nothing is kept by user."""
    prompt_cache_key: Ignored = None
    """Prefixes are found by their content."""
    prompt_cache_options: Ignored = None
    """Prefixes are found by their content, wherever they end."""


class AccountFields(TierFields, CallerFields):
    """The same in APIs of answers, with older ones."""

    user: Ignored = None
    """Nothing is kept by user."""
    prompt_cache_retention: Ignored = None
    """Prefixes are kept while there is room."""
