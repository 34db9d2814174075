"""Utilisation of a whole engine: what its steps count together, and by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.steps.step_work import num_pairs
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from engine.inspection_config import InspectionConfig
from engine.models.step_costs import cost_of
from tests.engine.core.tiny_engine import tiny_config

LENGTHS = (70, 9)
"""Tokens of the prompts; a step has room for 64."""
NEW_TOKENS = 6


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_counts_as_much_as_its_tokens_ask_for(async_scheduling: bool) -> None:
    config = replace(
        tiny_config(async_scheduling=async_scheduling),
        inspection=InspectionConfig(enable_mfu_metrics=True),
    )
    executor = UniprocExecutor(config)
    core = EngineCore(config, executor, lambda stage, fraction, total=0: None)
    try:
        for index, length in enumerate(LENGTHS):
            prompt = [1 + (index * 50 + place) % 200 for place in range(length)]
            sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            spec = RequestSpec(prompt, sampling)
            core.handle(EngineCoreRequest(request_id=f"r{index}", spec=spec))
        core.step()
        while not core.is_idle:
            core.step()
        work, cost = core.stats().work, cost_of(config)
    finally:
        core.shutdown()
        executor.shutdown()
    assert work is not None and cost is not None
    ends = [length + NEW_TOKENS - 1 for length in LENGTHS]
    (attention,) = cost.attention
    assert work.flops == pytest.approx(
        sum(ends) * cost.flops_per_token
        + len(LENGTHS) * NEW_TOKENS * cost.flops_per_sample
        + sum(num_pairs(end, end, None) for end in ends) * attention.flops_of_decodes
    )
    assert work.write_bytes == sum(ends) * attention.kv_bytes
    num_steps = core.scheduler.stats().num_steps
    assert work.read_bytes > num_steps * cost.weight_bytes
    assert work.kinds.keys() == {"prefill", "decode"} | ({"mixed"} & work.kinds.keys())
    assert all(rates.seconds > 0 < rates.flops for rates in work.kinds.values())


def test_nothing_is_counted_unless_asked() -> None:
    config = tiny_config()
    executor = UniprocExecutor(config)
    core = EngineCore(config, executor, lambda stage, fraction, total=0: None)
    assert core.stats().work is None
    core.shutdown()
    executor.shutdown()
