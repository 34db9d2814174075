"""Refuses, when a node starts, what several data-parallel groups cannot do."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.node.command_line import SettingsError


def check_groups(config: EngineConfig) -> None:
    """Raises `SettingsError` naming what does not go together with data-parallel groups."""
    if config.parallel.data_parallel_size == 1:
        return
    for is_set, what in (
        (config.parallel.distributed_executor_backend == "ray", "ray as executor backend"),
        (config.parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size"),
        (config.is_adaptive, "adaptive in --speculative-config"),
        (config.draft is not None, "a drafter with weights in --speculative-config"),
        (config.model.vision is not None, "a model that sees images"),
    ):
        if is_set:
            raise SettingsError(
                f"--data-parallel-size above 1 does not go with {what}: leave one of them, or "
                "start as many nodes as groups"
            )
