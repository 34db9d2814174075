"""Engines with several pipeline stages give the tokens of an engine with one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from engine.models.checkpoint import load_model_config
from kv_transfer.config import KVRole, KVTransferConfig
from tests.engine.kv_groups.grouped_node import GroupedNode, hand_over, run_until
from tests.engine.models.reference_models import FAMILIES, save_checkpoint
from tests.engine.thread_executor import ThreadExecutor
from tests.engine.tiny_model import tiny_model

NUM_LAYERS = 5
PROMPTS = {
    f"r{i}": [1 + (i * 31 + j * 7) % 210 for j in range(length)]
    for i, length in enumerate((1, 3, 40, 64, 17, 80, 8, 33))
}
BEHIND_A_PREFIX = {"behind": [*PROMPTS["r3"][:48], 5, 6, 7]}


def stage_config(
    stages: int,
    tp_size: int = 1,
    num_blocks: int = 200,
    role: KVRole | None = None,
    block_size: int = 8,
    **model: Any,
) -> EngineConfig:
    return EngineConfig(
        engine_id=f"stages-{secrets.token_hex(4)}",
        epoch=secrets.randbits(63),
        model=tiny_model(num_layers=NUM_LAYERS, **model),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        parallel=ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=stages),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, async_scheduling=True),
        kv_transfer=KVTransferConfig(kv_role=role, num_streams=2) if role else None,
    )


@contextmanager
def running(config: EngineConfig) -> Iterator[GroupedNode]:
    kind = ThreadExecutor if config.parallel.num_ranks > 1 else UniprocExecutor
    executor = kind(config)
    core = EngineCore(config, executor, lambda *_: None)
    node = GroupedNode(config, core, executor, None)
    try:
        yield node
        node.check_empty()
    finally:
        node.shutdown()


class Expected:
    """Knows the greedy answers of one stage."""

    def __init__(self, node: GroupedNode) -> None:
        self._node = node

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        name = str(hash(tuple(prompt)))
        if name not in self._node.tokens:
            self._node.add(name, prompt, count)
            run_until([self._node], lambda: name in self._node.ended)
        return self._node.tokens[name]


def answers(node: GroupedNode, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        node.add(name, prompt, 14)
    run_until([node], lambda: node.ended.issuperset(prompts))
    return {name: node.tokens[name] for name in prompts}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    with running(stage_config(1)) as node:
        return {**answers(node, PROMPTS), **answers(node, BEHIND_A_PREFIX)}


@pytest.mark.parametrize(("stages", "tp_size"), [(2, 1), (4, 1), (2, 2)])
def test_stages_give_the_same_tokens(
    stages: int, tp_size: int, expected: dict[str, list[int]]
) -> None:
    """Prompts in chunks beside rows that decode, then one behind a cached prefix."""
    with running(stage_config(stages, tp_size)) as node:
        found = answers(node, PROMPTS)
        cached = node.core.stats().prefix_cache_hits
        found |= answers(node, BEHIND_A_PREFIX)
        assert node.core.stats().prefix_cache_hits - cached == 48
        assert isinstance(node.executor, ThreadExecutor)
        assert node.executor.max_in_flight == stages + 1
    assert found == expected


def test_rows_that_are_preempted_go_on(expected: dict[str, list[int]]) -> None:
    with running(stage_config(2, num_blocks=16)) as node:
        assert answers(node, PROMPTS) == {name: expected[name] for name in PROMPTS}
        assert node.core.stats().num_preemptions > 0


def test_a_tied_head_is_read_by_the_last_stage() -> None:
    found = []
    for stages in (1, 3):
        with running(stage_config(stages, tie_word_embeddings=True)) as node:
            found.append(answers(node, PROMPTS))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "stages"),
    [("gemma2", 2), ("qwen3_moe_sharded", 3), ("deepseek_v4", 2), ("kimi_k3", 3)],
)
def test_stages_read_their_part_of_a_checkpoint(family: str, stages: int, tmp_path: Path) -> None:
    """One has windows and a tied head, one experts in many files, one four residual streams, and
    one blocks of layers, all of which a stage gives the next one."""
    save_checkpoint(FAMILIES[family], tmp_path)
    model = load_model_config(tmp_path)
    prompts = {
        name: [token % model.vocab_size for token in prompt]
        for name, prompt in PROMPTS.items()
        if len(prompt) <= 40
    }
    found = []
    for num_stages in (1, stages):
        with running(replace(stage_config(num_stages), model=model)) as node:
            found.append(answers(node, prompts))
    assert found[0] == found[1]


def test_stages_sample_as_one_does() -> None:
    """Requests want noise, penalties, several choices, and log probabilities of all tokens."""
    sampling = SamplingParams(
        temperature=0.9,
        seed=7,
        max_tokens=12,
        ignore_eos=True,
        frequency_penalty=0.5,
        logprobs=2,
        prompt_logprobs=1,
    )
    found = []
    for stages in (1, 3):
        with running(stage_config(stages)) as node:
            for name in ("r2", "r3", "r5"):
                spec = RequestSpec(PROMPTS[name], sampling)
                node.core.handle(EngineCoreRequest(request_id=name, spec=spec))
            node.add("forked", PROMPTS["r4"], 10, num_choices=3)
            outputs: dict[str, list[EngineCoreOutput]] = {}
            while not node.core.is_idle:
                for output in node.core.step().outputs:
                    outputs.setdefault(output.request_id, []).append(output)
            found.append({name: told(parts) for name, parts in outputs.items()})
    assert found[0].keys() == {"r2", "r3", "r5", "forked.0", "forked.1", "forked.2"}
    assert found[0] == found[1]


def told(outputs: list[EngineCoreOutput]) -> tuple[object, ...]:
    """Returns all that a client hears of a request, but for times and how it was cut up."""
    tokens = [token for output in outputs for token in output.new_token_ids]
    scored = [one for output in outputs for one in output.logprobs or ()]
    parts = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    of_prompt = [one.token_ids for part in parts for one in part.unpack()]
    return tokens, [one.token_ids for one in scored], of_prompt, outputs[-1].finish_reason


def with_host_memory(config: EngineConfig) -> EngineConfig:
    """Gives each rank more transfer processes than its stage has layers."""
    assert config.kv_transfer is not None
    size = 60 * config.kv_layout.block_bytes
    transfer = replace(config.kv_transfer, host_tier_bytes=size, num_processes=3)
    return replace(config, kv_transfer=transfer)


def test_stages_hand_their_layers_over() -> None:
    """Two stages of one and of two ranks and four stages, to one and to two ranks with other
    blocks; behind the first turn prompts are cached."""
    prompts = {name: prompt for name, prompt in PROMPTS.items() if len(prompt) <= 64}
    with ExitStack() as nodes:

        def start(*sizes: int, **options: Any) -> GroupedNode:
            return nodes.enter_context(running(stage_config(*sizes, **options)))

        oracle = Expected(start(1))
        sizes = ((2, 1), (2, 2), (4, 1))
        prefills = [start(stages, ranks, role="kv_producer") for stages, ranks in sizes]
        decodes = [start(1, ranks, role="kv_consumer", block_size=16) for ranks in (1, 2)]
        for index, (prefill, decode) in enumerate(product(prefills, decodes)):
            named = {f"{name}-{index}": prompt for name, prompt in prompts.items()}
            hand_over(prefill, decode, named, oracle)
        assert all(prefill.core.stats().prefix_cache_hits > 0 for prefill in prefills)
