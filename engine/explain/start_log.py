"""Tells in the log of an engine that starts which kernels its steps will take."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.explain.explanation import Batch, explain
from engine.explain.report import summary, tables_of
from engine.explain.towers import explain_tower
from engine.layers.attention.whole_prompts import flash_attention
from tandem_kernels.device import gpu_facts

logger = logging.getLogger(__name__)

_DECODES = (1, 16)
_PROMPT = 2048
_IMAGE = 1024


def log_choices(config: EngineConfig, device: torch.device) -> None:
    """Logs a line for a few steps on a GPU. A CPU has nothing to choose. Never keeps an engine
    from starting."""
    gpu = gpu_facts(device)
    if gpu is None:
        return
    decodes = [Batch(n) for n in _DECODES if n <= config.scheduler.max_num_seqs]
    longest = min(_PROMPT, config.model.max_model_len, config.scheduler.max_num_batched_tokens)
    batches = [*decodes, Batch(prompts=(longest,))]
    try:
        found = explain(config, gpu, batches, has_flash=flash_attention.attends_prompts())
        if config.model.vision is not None and config.images.has_encoder:
            found.append(explain_tower(config, _IMAGE))
        logger.info("GEMMs and attention take tables of tunings of %s", ", ".join(tables_of(found)))
        for line in summary(found):
            logger.info("kernels of %s", line)
    except Exception as error:
        logger.warning("the choice of kernels cannot be explained here: %s", error)
