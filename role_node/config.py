"""Settings of a node that changes its role: those of a decode node, and what both roles need."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from decode_node.config import DecodeNodeSettings
from prefill_node.config import PrefillNodeSettings
from role_node.role_engines import refuse_what_has_one_role


class RoleNodeSettings(DecodeNodeSettings):
    """Computes prompts or streams tokens, and changes between the two when it is asked to, without
    loading weights again. Settings that both kinds of node have hold in both roles."""

    role: Literal["prefill", "decode"] = Field(
        default="prefill",
        description="The role in which it starts, and starts again after a crash.",
    )
    grpc_port: int = Field(
        default=8200,
        ge=0,
        le=65535,
        description="gRPC port of load reports, of health and of the Prefill service: where "
        "routers and decode nodes find it. 0: any free one.",
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Keep KV of finished requests, in either role. A change of roles forgets it.",
    )
    max_waiting_tokens: int = Field(
        default=1 << 20,
        ge=1,
        description="As a prefill node: prompts are refused while more tokens than this wait to "
        "be computed.",
    )
    switch_empty_s: float = Field(
        default=2.0,
        ge=0,
        description="Seconds in which the engine must have released its KV, when its requests "
        "have ended and it shall change its role. What a peer has not fetched then is dropped, "
        "and computed elsewhere.",
    )

    def check_roles(self) -> None:
        """Refuses what a node cannot have in both roles, as far as no model is read. Raises
        `SettingsError`."""
        drafts = self.speculative_config is not None
        refuse_what_has_one_role(self._parallel_config(), drafts=drafts)

    def for_prefill(self) -> PrefillNodeSettings:
        """Returns the settings of the prefill node that it is."""
        values = {name: getattr(self, name) for name in PrefillNodeSettings.model_fields}
        return PrefillNodeSettings.model_construct(**{**values, "port": self.grpc_port})
