"""Refuses by name what pipeline stages cannot do."""

from __future__ import annotations

from edge.command_line import SettingsError
from engine.config import EngineConfig, ParallelConfig
from kv_transfer.config import KVRole


def check_ranks(parallel: ParallelConfig, kv_role: KVRole | None) -> None:
    """Raises `SettingsError` for stages of a decode node, or of data-parallel groups."""
    num_stages = parallel.pipeline_parallel_size
    if num_stages > 1 and parallel.data_parallel_size > 1:
        raise SettingsError(
            f"--data-parallel-size does not work with --pipeline-parallel-size {num_stages}; use "
            "--tensor-parallel-size, or start as many nodes as groups"
        )
    if num_stages > 1 and kv_role == "kv_consumer":
        raise SettingsError(
            "--pipeline-parallel-size is for prefill nodes: a decoding row would wait for all "
            "stages before each token; use --tensor-parallel-size on decode nodes"
        )


def check_stages(config: EngineConfig) -> None:
    """Raises `SettingsError` where an engine with several stages cannot do what it is asked for."""
    num_stages, model = config.parallel.pipeline_parallel_size, config.model
    if num_stages == 1:
        return
    transfer = config.kv_transfer
    check_ranks(config.parallel, transfer.kv_role if transfer is not None else None)
    if num_stages > model.num_layers:
        raise SettingsError(
            f"--pipeline-parallel-size {num_stages} is more than the model has layers "
            f"({model.num_layers})"
        )
    layout = config.kv_layout
    for stage in range(num_stages):
        if not all(layout.layers_on(stage, group) for group in layout.groups):
            raise SettingsError(
                f"with --pipeline-parallel-size {num_stages} stage {stage} would have no layer of "
                "one of the kinds of attention in this model; use fewer stages"
            )
    for is_asked, what in (
        (config.speculative is not None, "--speculative-config with a drafter that keeps KV"),
        (config.lora is not None, "--enable-lora"),
        (model.vision is not None, "a model that sees images"),
        (config.inspection.enable_mfu_metrics, "--enable-mfu-metrics"),
    ):
        if is_asked:
            raise SettingsError(
                f"{what} does not work with --pipeline-parallel-size {num_stages}; use "
                "--tensor-parallel-size, or leave it"
            )
