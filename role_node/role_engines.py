"""The two engines that a node is in turn: one configuration a role, over the same workers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from engine.config import EngineConfig, ParallelConfig
from engine.node.settings.engine_settings import SettingsError
from engine.node.settings.image_settings import takes_images
from kv_transfer.config import KVRole

RoleName = Literal["prefill", "decode"]
KV_ROLES: dict[RoleName, KVRole] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_EPOCH_BITS = 63
_OF_A_ROLE = {"engine_id", "epoch", "kv_transfer", "cache"}
"""Fields in which the two may differ: workers read nothing else of them than `_OF_WORKERS`."""
_OF_WORKERS = {"cache": {"enable_prefix_caching"}, "kv_transfer": {"kv_role", "shares_prefixes"}}
"""Fields of these that may differ."""


@dataclass(frozen=True, slots=True)
class RoleEngines:
    """Says what the engine is in either role. Raises `SettingsError` where it cannot be both."""

    prefill: EngineConfig
    decode: EngineConfig

    def __post_init__(self) -> None:
        sees_images = takes_images(self.prefill)
        drafts = self.decode.speculative is not None
        refuse_what_has_one_role(self.prefill.parallel, drafts=drafts, sees_images=sees_images)
        if name := differing(self.prefill, self.decode):
            raise SettingsError(
                f"a node that changes its role keeps its workers, but {name} would differ between "
                "prefill and decode; start nodes of one role each"
            )

    def of(self, role: RoleName) -> EngineConfig:
        """Returns the engine of a node that starts in this role now."""
        config = self.prefill if role == "prefill" else self.decode
        name = f"{KV_ROLES[role]}-{secrets.token_hex(6)}"
        return replace(config, engine_id=name, epoch=secrets.randbits(_EPOCH_BITS) | 1)


def refuse_what_has_one_role(
    parallel: ParallelConfig, *, drafts: bool, sees_images: bool = False
) -> None:
    """Raises `SettingsError` naming what one of the roles cannot have, or cannot give up."""
    for is_asked, what in (
        (parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size: decode nodes have none"),
        (parallel.data_parallel_size > 1, "--data-parallel-size"),
        (parallel.distributed_executor_backend == "ray", "--distributed-executor-backend ray"),
        (drafts, "--speculative-config: prefill nodes record other steps than decode nodes"),
        (
            sees_images,
            "a model that sees images, whose encoder only prefill nodes have; --max-images 0 "
            "serves its text part",
        ),
    ):
        if is_asked:
            raise SettingsError(
                f"a node that changes its role does not work with {what}. Start nodes of one role "
                "each, by `tandem prefill` and `tandem decode`"
            )


def differing(one: EngineConfig, other: EngineConfig) -> str:
    """Returns the name of a field that workers read and in which the two differ; empty: none."""
    if name := _first_difference(one, other, _OF_A_ROLE):
        return name
    for part, free in _OF_WORKERS.items():
        ours, theirs = getattr(one, part), getattr(other, part)
        if name := _first_difference(ours, theirs, free):
            return f"{part}.{name}"
    return ""


def _first_difference(one: Any, other: Any, free: set[str]) -> str:
    names = (field.name for field in fields(one) if field.name not in free)
    return next((name for name in names if getattr(one, name) != getattr(other, name)), "")
