"""Steps of prompts are timed at the start, and nothing is left of them."""

from __future__ import annotations

from dataclasses import replace

from engine.config import SchedulerConfig
from engine.core.scheduling import prompt_order
from engine.executor.abstract import KVCaches
from engine.worker.start.prompt_times import measures_prompts, time_prompt_steps
from tests.engine.sched.factories import make_config


def test_steps_are_timed_up_to_the_budget(runner, driver, make_prompt) -> None:
    config = runner._config
    limits = replace(config.scheduler, max_num_batched_tokens=16)
    found = time_prompt_steps(runner, replace(config, scheduler=limits))
    assert [tokens for tokens, _ in found] == [16]
    assert all(seconds > 0 for _, seconds in found)
    assert not runner.states.is_live_np.any()
    driver.add("a", 0, make_prompt(5, 1))
    driver.step({"a": 5})


def test_only_engines_whose_order_depends_on_it_time_prompts() -> None:
    config = make_config(prompt_order="shortest")
    assert measures_prompts(config)
    for limits in (
        SchedulerConfig(prompt_order="arrival"),
        SchedulerConfig(prompt_order="shortest", full_step_tokens=100),
        SchedulerConfig(prompt_order="shortest", enable_chunked_prefill=False),
    ):
        assert not measures_prompts(replace(config, scheduler=limits))


def test_a_full_step_is_the_setting_or_measured_or_a_default() -> None:
    config = make_config(prompt_order="shortest", max_num_batched_tokens=8192)
    steps = [(128, 0.010), (256, 0.011), (512, 0.020), (8192, 0.320)]
    measured = prompt_order(config, KVCaches(9, [], prompt_steps=steps))
    assert measured is not None
    assert 256 < measured.full_tokens <= 512 and measured.full_tokens % 64 == 0
    default = prompt_order(config, KVCaches(9, []))
    assert default is not None and default.full_tokens == 2048
    limits = replace(config.scheduler, full_step_tokens=100)
    fixed = prompt_order(replace(config, scheduler=limits), KVCaches(9, [], prompt_steps=steps))
    assert fixed is not None and fixed.full_tokens == 100
    for other in (
        replace(limits, prompt_order="arrival"),
        replace(limits, enable_chunked_prefill=False),
    ):
        assert prompt_order(replace(config, scheduler=other), KVCaches(9, [])) is None
