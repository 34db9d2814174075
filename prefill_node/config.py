"""Settings of a prefill node: those of its engine, and where it listens."""

from __future__ import annotations

from pydantic import Field

from engine.node.settings.engine_settings import EngineSettings


class PrefillNodeSettings(EngineSettings):
    """Computes prompts for decode nodes and hands their KV over while it is being computed."""

    port: int = Field(default=8200, ge=0, le=65535, description="gRPC port. 0: any free one.")
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of /metrics, /health, /health/live, /ready and /steps, always plain "
        "HTTP. 0: any free one. Default: none of them.",
    )
    max_waiting_tokens: int = Field(
        default=1 << 20,
        ge=1,
        description="Prompts are refused while more tokens than this wait to be computed.",
    )
