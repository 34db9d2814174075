"""Makes what decides in an engine: a scheduler and its connector, or those of several groups."""

from __future__ import annotations

import logging
from dataclasses import replace

from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.steps.step_log import StepLog
from engine.contracts.steps.step_shapes import FULL_TOKENS
from engine.executor.abstract import KVCaches
from engine.heartbeat_slots import first_transfer_place
from engine.models.recorded_steps import launches_of
from engine.models.step_costs import cost_of
from engine.sched.groups.group_scheduler import GroupScheduler
from engine.sched.prompts.even_chunks import COST_BY_TOKENS, EvenChunks, whole_tiles
from engine.sched.prompts.prompt_order import PromptOrder, full_tokens
from engine.sched.scheduler import Scheduler
from host.life_signs import LifeSigns
from kv_transfer.base import KVConnectorScheduler
from kv_transfer.config import KVTransferConfig
from kv_transfer.connectors.group_connector import GroupConnector
from kv_transfer.errors import KVTransferError
from kv_transfer.factory import create_scheduler_connector

logger = logging.getLogger(__name__)


def create_scheduling(
    config: EngineConfig, caches: KVCaches, signs: LifeSigns | None, step_log: StepLog | None
) -> tuple[KVConnectorScheduler | GroupConnector, Scheduler | GroupScheduler]:
    """Starts the transfer processes, and returns connector and scheduler. Raises
    `KVTransferError`. `signs`, `step_log`: see `EngineCore`."""
    num_groups = config.parallel.data_parallel_size
    connectors = [_connector(config, group, caches, signs) for group in range(num_groups)]
    # Steps of several groups are no single line of a log: the report tells of the first group's.
    logs = [step_log, *[None] * (num_groups - 1)]
    launches = launches_of(config)
    schedulers = [
        Scheduler(config, caches.num_blocks, connector, log, prompt_order(config, caches), launches)
        for connector, log in zip(connectors, logs, strict=True)
    ]
    if num_groups == 1:
        return connectors[0], schedulers[0]
    query_len, is_adaptive = config.decode_query_len, config.is_adaptive
    groups = GroupScheduler(schedulers, query_len, is_adaptive=is_adaptive)
    return GroupConnector(connectors), groups


def prompt_order(config: EngineConfig, caches: KVCaches) -> PromptOrder | None:
    """Returns the order in which an engine computes prompts; None: in that of their arrival."""
    limits = config.scheduler
    if limits.prompt_order == "arrival" or not limits.enable_chunked_prefill:
        return None
    full, budget = limits.full_step_tokens or FULL_TOKENS, limits.max_num_batched_tokens
    if not limits.full_step_tokens and caches.prompt_steps:
        full = whole_tiles(full_tokens(caches.prompt_steps))
    logger.info("prompts: a step is full with %d tokens", min(full, budget))
    chunks = EvenChunks(cost_of(config) or COST_BY_TOKENS, budget)
    return PromptOrder(chunks=chunks, full_tokens=full)


def _connector(
    config: EngineConfig, group: int, caches: KVCaches, signs: LifeSigns | None
) -> KVConnectorScheduler:
    size = config.parallel.group_size
    own = slice(group * size, (group + 1) * size)
    processes = config.kv_transfer.num_processes if config.kv_transfer is not None else 0
    place = first_transfer_place(config) + group * size * processes
    transfer = config.kv_transfer
    if transfer is not None and group > 0:
        transfer = _of_group(transfer, group, group * size * processes)
    try:
        return create_scheduler_connector(
            transfer,
            config.name_of_group(group),
            config.epoch,
            config.kv_layout,
            caches.handles[own],
            caches.hosts[own],
            signs.part(place) if signs is not None else None,
        )
    except KVTransferError as error:
        raise EngineDeadError(str(error)) from error


def _of_group(transfer: KVTransferConfig, group: int, num_before: int) -> KVTransferConfig:
    """Returns the settings of a later group, before which there are `num_before` transfer
    processes. Its ranks count from 0 too, so its tiers have folders of their own."""

    def inside(folder: str) -> str:
        return folder and f"{folder}/group{group}"

    return replace(
        transfer,
        port=transfer.port and transfer.port + num_before,
        host_tier_path=inside(transfer.host_tier_path),
        disk_tier_path=inside(transfer.disk_tier_path),
    )
