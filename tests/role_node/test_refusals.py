"""A node that changes its role refuses wishes, settings and ports by name."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.contracts.errors import EngineDeadError, RoleSwitchRefused
from engine.node.grpc_server import PortInUse
from engine.node.services.role_switch import RoleSwitch
from engine.node.settings.engine_settings import SettingsError
from role_node.config import RoleNodeSettings
from role_node.ports import HeldPorts
from role_node.role_engines import RoleEngines, differing
from role_node.server import switch_engine
from tandem_pb import node_pb2
from tests.engine.core.tiny_engine import tiny_config

PREFILL, DECODE = node_pb2.NODE_ROLE_PREFILL, node_pb2.NODE_ROLE_DECODE


def settings(demo_checkpoint: Path, **values: Any) -> RoleNodeSettings:
    return RoleNodeSettings(
        _cli_parse_args=[],  # type: ignore[call-arg]
        **{"model": str(demo_checkpoint), "device": "cpu", **values},
    )


@pytest.mark.asyncio
async def test_one_wish_of_one_life() -> None:
    switch = RoleSwitch(PREFILL, drain_timeout_s=30.0, http_port=8100)
    for role, seconds, why in (
        (node_pb2.NODE_ROLE_UNSPECIFIED, 0.0, "prefill or decode"),
        (PREFILL, 0.0, "a prefill node already"),
        (DECODE, -1.0, "from 0 on"),
        (DECODE, float("nan"), "from 0 on"),
    ):
        with pytest.raises(RoleSwitchRefused, match=why):
            switch.ask(role, seconds)
    assert switch.request is None
    switch.ask(DECODE, 500.0)
    wish = await switch.requested()
    assert (wish.role, wish.drain_timeout_s) == (DECODE, 30.0)
    for role in (PREFILL, DECODE):
        with pytest.raises(RoleSwitchRefused, match="changes its role already.*decode"):
            switch.ask(role)
    short = RoleSwitch(DECODE, drain_timeout_s=30.0, http_port=8100)
    short.ask(PREFILL, 0.5)
    assert (await short.requested()).drain_timeout_s == 0.5


@pytest.mark.asyncio
async def test_a_node_of_one_role_says_so() -> None:
    with pytest.raises(RoleSwitchRefused, match="decode node for good.*tandem node"):
        RoleSwitch(DECODE).ask(PREFILL)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
            "--speculative-config",
        ),
    ],
)
def test_features_of_one_role(demo_checkpoint: Path, values: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=f"{named}.*tandem prefill"):
        settings(demo_checkpoint, **values).check_roles()


def test_both_engines_have_the_same_workers(demo_checkpoint: Path) -> None:
    node = settings(demo_checkpoint, max_num_seqs=4)
    node.check_roles()
    engines = RoleEngines(*(node.to_engine_config(r) for r in ("kv_producer", "kv_consumer")))
    lives = [engines.of("prefill"), engines.of("decode"), engines.of("prefill")]
    assert [life.is_producer for life in lives] == [True, False, True]
    assert len({life.epoch for life in lives}) == len({life.engine_id for life in lives}) == 3
    assert node.for_prefill().port == node.grpc_port != node.port


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decode_query_len": 3}, "decode_query_len"),
        ({"scheduler": SchedulerConfig(max_num_seqs=2)}, "scheduler"),
        ({"cache": CacheConfig(block_size=16)}, r"cache\.block_size"),
    ],
)
def test_a_difference_that_workers_would_see_is_named(change: dict[str, Any], named: str) -> None:
    one: EngineConfig = replace(tiny_config(), kv_transfer=None)
    with pytest.raises(SettingsError, match=named):
        RoleEngines(one, replace(one, **change))


def test_what_workers_do_not_see_may_differ(demo_checkpoint: Path) -> None:
    one = settings(demo_checkpoint).to_engine_config("kv_producer")
    other = settings(demo_checkpoint, enable_prefix_caching=False).to_engine_config("kv_consumer")
    assert differing(one, other) == ""


def test_ports_stay_ours_and_can_be_listened_on() -> None:
    held = HeldPorts("127.0.0.1")
    port = held.hold(0)
    for _ in range(2):
        socket.create_server(("127.0.0.1", port)).close()
    with socket.socket() as stranger, pytest.raises(OSError):
        stranger.bind(("127.0.0.1", port))
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(PortInUse, match="choose another"):
        HeldPorts("127.0.0.1").hold(listener.getsockname()[1])
    held.close()


class HungEngine:
    """Never changes its role."""

    def __init__(self) -> None:
        self.asked: list[EngineConfig] = []

    async def switch_role(self, config: EngineConfig, _: Any, empty_within_s: float) -> None:
        self.asked.append(config)
        await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_an_engine_that_hangs_on_its_way_is_given_up(demo_checkpoint: Path) -> None:
    node, engine, config = (
        settings(demo_checkpoint, switch_empty_s=0.0, stuck_after_s=0.02),
        HungEngine(),
        tiny_config(),
    )
    with pytest.raises(EngineDeadError, match=r"within 0\.02 s.*started again"):
        await switch_engine(engine, config, None, node)
    assert engine.asked == [config]
