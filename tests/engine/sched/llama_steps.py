"""An engine of the shape of Llama 3.1 8B for the scheduler, and workers that make results up."""

from __future__ import annotations

import random

import msgspec

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.scheduler_output import SchedulerOutput
from engine.models.specs.llama import LlamaSpec
from engine.rope import Rotary

_MAX_MODEL_LEN = 4096
_MAX_NUM_BATCHED_TOKENS = 8192


def make_config(batch: int, block_size: int) -> EngineConfig:
    spec = LlamaSpec(
        hidden_size=4096,
        intermediate_size=14_336,
        rms_norm_eps=1e-5,
        rotary=Rotary(theta=500_000.0, dim=128),
        tie_word_embeddings=False,
    )
    model = ModelConfig(
        path="",
        served_model_name="none",
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=_MAX_MODEL_LEN,
        eos_token_ids=(128_001, 128_009),
        dtype="bfloat16",
        load_format="dummy",
        model_hash="none",
        spec=msgspec.to_builtins(spec),
    )
    return EngineConfig(
        engine_id="bench",
        epoch=1,
        model=model,
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(
            max_num_seqs=batch, max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS
        ),
    )


class Workers:
    """Answers each step with one token for every row that samples."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rows: dict[int, tuple[int, int]] = {}
        """row -> (epoch, prefill tokens not computed yet)."""
        self._decode: set[int] = set()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for row in step.finished_rows:
            del self._rows[row]
            self._decode.discard(row)
        for new in step.new_reqs:
            left = new.prefill_len - new.num_computed_tokens
            self._rows[new.row] = (new.epoch, left)
        self._decode.update(step.decode_add)
        self._decode.difference_update(step.decode_remove)
        rows = sorted(self._decode)
        for row, count in step.prefill_chunks:
            epoch, left = self._rows[row]
            self._rows[row] = (epoch, left - count)
            if left == count:
                rows.append(row)
        tokens = [self._rng.randrange(100_000) for _ in rows]
        return ModelRunnerOutput(step.step_id, rows, [self._rows[row][0] for row in rows], tokens)
