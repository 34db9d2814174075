"""The settings of experts that move between ranks, under vLLM's names.

    --enable-eplb --eplb-config '{"window_size": 1000, "step_interval": 3000}'

Nodes need not agree: KV does not depend on where experts are.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings

from edge.command_line import SettingsError
from engine.config import ParallelConfig
from engine.eplb_config import EplbConfig


def parse_eplb_config(text: str) -> EplbConfig:
    """Reads the setting. Raises `ValueError`, which names the field that does not fit."""
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('must be a JSON object, such as {"num_redundant_experts": 8}')
    known = [field.name for field in fields(EplbConfig)]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{name!r} is no field of it; those that exist: {', '.join(known)}")
        least = int(name != "num_redundant_experts")
        if name == "log_balancedness":
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, not {value!r}")
        elif type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    config = EplbConfig(**given)
    if config.window_size > config.step_interval:
        raise ValueError(
            f"window_size is {config.window_size}, more than step_interval, {config.step_interval}"
        )
    return config


def _checked(text: str | None) -> str | None:
    if text is not None:
        parse_eplb_config(text)
    return text


class ExpertSettings(BaseSettings):
    """See docs/parallelism.md."""

    enable_eplb: bool = Field(
        default=False,
        description="With --enable-expert-parallel: move experts between workers while the engine "
        "runs, by how many tokens came to each, so that all workers have equally many.",
    )
    eplb_config: Annotated[str | None, AfterValidator(_checked)] = Field(
        default=None,
        description="With --enable-eplb, as JSON: num_redundant_experts (copies of busy experts "
        "in each layer, on all workers together, default 0), step_interval (experts are placed "
        "anew after this many steps, default 3000), window_size (the last steps before, whose "
        "tokens count, default 1000), log_balancedness (true: log each placement).",
    )

    @property
    def eplb(self) -> EplbConfig | None:
        """Returns what the settings ask for; None: experts stay where they are. Raises
        `SettingsError`."""
        if self.enable_eplb:
            return parse_eplb_config(self.eplb_config or "{}")
        if self.eplb_config is not None:
            raise SettingsError("--eplb-config has no effect without --enable-eplb: add it")
        return None


def check_eplb(parallel: ParallelConfig, *, deterministic: bool) -> None:
    """Raises `SettingsError` naming what does not go together with experts that move."""
    if parallel.eplb is None:
        return
    if not parallel.enable_expert_parallel or parallel.num_ranks == 1:
        raise SettingsError(
            "--enable-eplb moves whole experts between workers: it needs --enable-expert-parallel, "
            "and --tensor-parallel-size or --data-parallel-size above 1"
        )
    if parallel.pipeline_parallel_size > 1:
        raise SettingsError(
            "--enable-eplb does not work with --pipeline-parallel-size; use --tensor-parallel-size"
        )
    if deterministic:
        raise SettingsError(
            "--enable-eplb does not go with --deterministic: which worker adds a token's experts "
            "up, and so the last bits of the sum, depends on where they are; leave one of them"
        )
