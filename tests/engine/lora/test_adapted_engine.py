"""An engine with adapters on the CPU: each request gets, token for token, what the model with its
adapter merged in gives, whoever else is in the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from engine.layers.methods import lora as method
from engine.layers.methods.lora import AdapterForm
from tandem_kernels import ops
from tests.engine.lora.adapted_engine import Adapted, request
from tests.engine.worker.one_engine import OneEngine, check_empty
from tests.engine.worker.test_choices import forked
from tests.engine.worker.test_grammars import TwoRanks
from tests.processes import free_address

WHO = [0, None, 1, 2, 3, None, 4, 0]
"""The adapter of each request, by number; None: the model itself."""


def serve(
    models: Adapted, config: EngineConfig, who: list[int | None], depth: int = 2
) -> OneEngine:
    """Runs a request for each of `who`, all together, and compares."""
    two_ranks = config.parallel.tensor_parallel_size == 2
    worker = TwoRanks(config, free_address()) if two_ranks else None
    engine = OneEngine(config, depth, worker)
    messages = [request(f"r{i}", seed=i) for i in range(len(who))]
    for message, index in zip(messages, who, strict=True):
        engine.add(models.with_adapter(message, index))
    engine.finish()
    for message, index in zip(messages, who, strict=True):
        assert engine.errors[message.request_id] == ""
        assert engine.tokens[message.request_id] == models.expected(message, index), message
    return engine


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "gemma2", "gemma4_apart"])
def test_a_batch_of_many_adapters_answers_as_merged_models_do(
    adapted_family: Callable[[str], Adapted], family: str
) -> None:
    models = adapted_family(family)
    engine = serve(models, models.config(lora=models.lora()), WHO)
    answers = {tuple(models.expected(request("r", seed=0), i)) for i in (None, 0, 1, 2, 3, 4)}
    assert len(answers) == 6, "the adapters must change answers"
    check_empty(engine)


def test_two_ranks_add_their_parts(adapted_family: Callable[[str], Adapted]) -> None:
    models = adapted_family("llama")
    parallel = ParallelConfig(tensor_parallel_size=2)
    check_empty(serve(models, models.config(lora=models.lora(), parallel=parallel), WHO))


def test_adapters_take_turns_where_slots_host_memory_and_blocks_are_few(
    adapted_family: Callable[[str], Adapted],
) -> None:
    models = adapted_family("llama")
    config = models.config(
        lora=models.lora(max_loras=2, max_cpu_loras=2),
        cache=CacheConfig(block_size=8, num_blocks=14),
    )
    engine = serve(models, config, [*WHO, *WHO[::-1]])
    assert engine.scheduler.stats().num_preemptions > 0
    check_empty(engine)


def test_drafts_are_checked_by_the_adapted_model(
    adapted_family: Callable[[str], Adapted],
) -> None:
    models = adapted_family("llama")
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
    )
    config = models.config(lora=models.lora(), speculative=speculative, decode_query_len=4)
    engine = serve(models, config, WHO)
    assert sum(count for tokens, count in engine.counts.items() if tokens > 1) > 0
    check_empty(engine)


def test_in_deterministic_mode_an_answer_has_the_same_bits_alone_and_together(
    adapted_family: Callable[[str], Adapted],
) -> None:
    models = adapted_family("llama")
    config = models.config(lora=models.lora(), device=DeviceConfig(deterministic=True))
    logprobs = []
    for who in ([0, 1, 0, None, 2], [0]):
        engine = OneEngine(config, 1)
        for i, index in enumerate(who):
            message = request(f"r{i}", seed=i, logprobs=2)
            engine.add(models.with_adapter(message, index))
        engine.finish()
        logprobs.append(engine.logprobs["r0"])
        engine.worker.shutdown()
    assert logprobs[0] == logprobs[1]


def test_choices_of_a_prompt_share_its_adapter(adapted_family: Callable[[str], Adapted]) -> None:
    models = adapted_family("llama")
    config = models.config(lora=models.lora(max_loras=1, max_cpu_loras=1))
    engine = OneEngine(config, 2)
    prompts = [forked(f"f{i}", [5, 6, 7, 8 + i], 3, max_tokens=6, temperature=0.9) for i in (0, 1)]
    engine.add(models.with_adapter(prompts[0], 0))
    engine.add(models.with_adapter(prompts[1], 1))
    engine.finish()
    for index, prompt in enumerate(prompts):
        for choice, name in enumerate(prompt.choice_ids):
            alone = request(name, seed=0)
            spec = prompt.spec.of_choice(choice)
            alone = type(alone)(request_id=name, spec=spec, eos_token_ids=prompt.eos_token_ids)
            assert engine.tokens[name] == models.expected(alone, index)
    check_empty(engine)


def test_a_batch_without_adapters_computes_nothing_more(
    adapted_family: Callable[[str], Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = adapted_family("llama")

    def fails(*_args: object, **_options: object) -> None:
        raise AssertionError("adapters are applied to a batch that has none")

    for name in ("lora_slots_of_tokens", "lora_shrink", "lora_expand"):
        monkeypatch.setattr(ops, name, fails)
    check_empty(serve(models, models.config(lora=models.lora()), [None, None, None]))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_few_rows_may_take_fewer_launches_on_two_streams(
    adapted_family: Callable[[str], Adapted], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more rows take those of many."""
    done = Counter[str]()

    class Side:
        def __init__(self, device: torch.device) -> None:
            done["forks"] += 1

        @contextmanager
        def beside(self) -> Iterator[None]:
            yield

        def join(self) -> None:
            done["joins"] += 1

    for name in ("lora_expand", "lora_expand_few", "lora_expand_gated"):
        op = getattr(ops, name)

        def counted(*args: Any, _op: Any = op, _name: str = name, **options: Any) -> Any:
            done[_name] += 1
            return _op(*args, **options)

        monkeypatch.setattr(ops, name, counted)
    monkeypatch.setattr(method, "SideStream", Side)
    monkeypatch.setattr(method, "is_recording", lambda x: True)
    models = adapted_family(family)
    monkeypatch.setattr(AdapterForm, "choose", lambda *_args: AdapterForm(8))
    check_empty(serve(models, models.config(lora=models.lora()), [0, None, 1, 2]))
    assert min(done[name] for name in ("lora_expand", "lora_expand_few")) > 0
    assert done["lora_expand_gated"] > 0
    assert done["forks"] == done["joins"] == done["lora_expand_few"] + done["lora_expand_gated"]


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_few_rows_may_take_the_launch_of_their_layer(
    adapted_family: Callable[[str], Adapted], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a bias and without do; prompts of more rows do not."""
    done = Counter[str]()
    for name in ("lora_expand", "lora_gemm", "lora_gate_up"):
        op = getattr(ops, name)

        def counted(*args: Any, _op: Any = op, _name: str = name, **options: Any) -> Any:
            done[_name] += 1
            return _op(*args, **options)

        monkeypatch.setattr(ops, name, counted)
    monkeypatch.setattr(method.lora_gemm_shapes, "takes", lambda *_args: True)
    monkeypatch.setattr(AdapterForm, "choose", lambda *_args: AdapterForm(one_launch_rows=8))
    models = adapted_family(family)
    check_empty(serve(models, models.config(lora=models.lora()), [0, None, 1, 2]))
    assert min(done.values()) > 0 and len(done) == 3
    # Each layer has four, of which one is gate and up.
    assert done["lora_gemm"] == 3 * done["lora_gate_up"]


def test_the_form_is_for_gpus_that_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, made = torch.device("cuda"), []
    hopper = True
    monkeypatch.setattr(method, "side_stream", made.append)
    monkeypatch.setattr(method, "supports_pdl", lambda device: device == gpu)
    monkeypatch.setattr(method, "has_warpgroup_mma", lambda _device: hopper)
    for device, config in (
        (torch.device("cuda:1"), DeviceConfig(device="cuda")),
        (gpu, DeviceConfig(device="cuda", deterministic=True)),
        (torch.device("cpu"), DeviceConfig()),
    ):
        assert AdapterForm.choose(config, device) == AdapterForm()
    assert not made
    usual = AdapterForm.choose(DeviceConfig(device="cuda"), gpu)
    assert usual.few_rows == usual.one_launch_rows > 0 and made == [gpu]
    config = DeviceConfig(device="cuda", disabled_fast_paths=("lora-gemm",))
    assert AdapterForm.choose(config, gpu) == replace(usual, one_launch_rows=0)
    config = DeviceConfig(device="cuda", disabled_fast_paths=("side-stream",))
    assert AdapterForm.choose(config, gpu) == replace(usual, few_rows=0) and len(made) == 2
    hopper = False
    assert AdapterForm.choose(DeviceConfig(device="cuda"), gpu) == replace(usual, one_launch_rows=0)


def test_kv_is_shared_by_digest_and_never_by_name(
    adapted_family: Callable[[str], Adapted],
) -> None:
    models = adapted_family("llama")
    engine = OneEngine(models.config(lora=models.lora()), 1)
    twin = replace(models, refs=[models.refs[0].__class__("adapter-1", models.refs[0].digest)])
    hits = []
    for name, whose, index in (
        ("first", models, 0),
        ("again", models, 0),
        ("other", models, 1),
        ("model", models, None),
        ("renamed", twin, 0),
    ):
        before = engine.scheduler.stats().prefix_cache_hits
        engine.add(whose.with_adapter(request(name, seed=8), index))
        engine.finish()
        hits.append(engine.scheduler.stats().prefix_cache_hits > before)
    assert hits == [False, True, False, False, True]
    assert engine.tokens["again"] == engine.tokens["renamed"] == engine.tokens["first"]
    check_empty(engine)
