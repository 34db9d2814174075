"""Tests what does not go with several data-parallel groups: it is refused by name at the start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig, ParallelConfig, SpeculativeConfig
from engine.lora import LoRAConfig
from engine.node.command_line import SettingsError
from engine.node.group_settings import check_groups
from kv_transfer.config import KVTransferConfig
from tests.engine.sched.factories import make_config

GROUPS = ParallelConfig(data_parallel_size=2)


NGRAMS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=2, prompt_lookup_max=2, prompt_lookup_min=1
)


def config_of(**changes: Any) -> EngineConfig:
    return replace(make_config(), **{"parallel": GROUPS, **changes})


def test_groups_go_with_drafts_and_adapters() -> None:
    check_groups(config_of(speculative=NGRAMS, decode_query_len=3, lora=LoRAConfig()))


def test_groups_go_with_pd() -> None:
    for role in ("kv_producer", "kv_consumer"):
        check_groups(config_of(kv_transfer=KVTransferConfig(kv_role=role)))
        tiers = KVTransferConfig(kv_role=role, host_tier_bytes=1 << 30, shares_prefixes=True)
        check_groups(config_of(kv_transfer=tiers))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel": replace(GROUPS, distributed_executor_backend="ray")}, "ray"),
        (
            {
                "speculative": replace(NGRAMS, adaptive=True),
                "decode_query_len": 3,
            },
            "adaptive in --speculative-config",
        ),
    ],
)
def test_what_groups_cannot_do_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        check_groups(config_of(**changes))
    assert "--data-parallel-size" in str(caught.value)
    check_groups(config_of(**{**changes, "parallel": ParallelConfig()}))
