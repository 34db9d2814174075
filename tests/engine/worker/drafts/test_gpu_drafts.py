"""Several tokens a row and step on a GPU: nothing depends on drafts, and nothing waits for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import DrafterName, EngineConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.steps.step_launches import GraphKey
from engine.models.checkpoint import load_model_config
from engine.models.draft_checkpoint import read_draft
from engine.sched.rows.row import Row
from engine.worker.drafts.drafter import Drafter
from engine.worker.drafts.passes import DraftPasses
from engine.worker.graphs.cuda_graphs import CudaGraphManager
from tests.engine.worker.drafts.drafters import KnowingDrafter, RepeatingDrafter
from tests.engine.worker.drafts.test_speculation import with_ngrams
from tests.engine.worker.gpu_workers import (
    SchedulerAndWorker,
    mixed_requests,
    small_config,
    started,
)
from tests.engine.worker.test_gpu_no_waiting import never_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def run(
    config: EngineConfig, requests: list[EngineCoreRequest], drafter: Drafter | None
) -> tuple[SchedulerAndWorker, int]:
    """Returns the engine, and how many steps it took. `drafter` None: that of `config`."""
    with started(config) as worker:
        if drafter is not None:
            worker.runner.drafts.drafter = drafter
        engine = SchedulerAndWorker(config, worker.start_step, depth=2)
        engine.run(requests)
        assert engine.scheduler.check_empty() == []
        return engine, engine.scheduler.stats().num_steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_deterministic_mode_not_even_a_bit_depends_on_drafts(
    small_weights: Path, make_prompt, dtype: str
) -> None:
    config = small_config(small_weights, dtype=dtype, deterministic=True)
    requests = mixed_requests(make_prompt)
    one, num_steps = run(config, requests, None)
    answers = [
        [*request.spec.prompt_token_ids, *one.tokens[request.request_id]] for request in requests
    ]
    for lies, at_most in ((0.0, 0.5), (0.4, 0.9)):
        drafter = KnowingDrafter(answers, lies=lies)
        several, fewer_steps = run(replace(config, decode_query_len=4), requests, drafter)
        assert several.tokens == one.tokens
        assert several.logprobs == one.logprobs
        assert fewer_steps <= at_most * num_steps


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("query_len", [2, 4, 8])
def test_in_deterministic_mode_not_even_a_bit_depends_on_ngrams(
    small_weights: Path, make_prompt, query_len: int, is_recorded: bool
) -> None:
    config = small_config(small_weights, dtype="bfloat16", deterministic=True)
    requests = mixed_requests(make_prompt)
    one, _ = run(config, requests, None)
    config = replace(
        with_ngrams(config, query_len),
        device=replace(config.device, enforce_eager=not is_recorded),
    )
    several, _ = run(config, requests, None)
    assert several.tokens == one.tokens
    assert several.logprobs == one.logprobs
    assert several.scheduler.stats().drafts.num_draft_tokens > 0


def of_states(config: EngineConfig, folder: Path) -> EngineConfig:
    """Returns the engine with a model of random weights, three of whose four layers keep a state,
    and a cache in which prefixes are found."""
    sizes = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": config.model.num_heads,
        "num_key_value_heads": config.model.num_kv_heads,
        "head_dim": config.model.head_dim,
        "max_position_embeddings": config.model.max_model_len,
        "vocab_size": config.model.vocab_size,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    model = load_model_config(folder, load_format="dummy", dtype=config.model.dtype)
    cache = replace(config.cache, num_blocks=80, enable_prefix_caching=True)
    return replace(config, model=model, cache=cache)


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("lies", [0.0, 0.3, 1.0])
def test_in_deterministic_mode_no_state_has_a_wrong_draft(
    small_weights: Path, make_prompt, tmp_path: Path, lies: float, is_recorded: bool
) -> None:
    for dtype in ("float32", "bfloat16"):
        config = of_states(small_config(small_weights, dtype=dtype, deterministic=True), tmp_path)
        config = replace(config, device=replace(config.device, enforce_eager=not is_recorded))
        requests = mixed_requests(make_prompt)
        one, num_steps = run(config, requests, None)
        answers = [
            [*request.spec.prompt_token_ids, *one.tokens[request.request_id]]
            for request in requests
        ]
        drafter = KnowingDrafter(answers, lies=lies)
        several, fewer_steps = run(with_ngrams(config, 4), requests, drafter)
        assert several.tokens == one.tokens
        assert several.logprobs == one.logprobs
        assert lies > 0.5 or fewer_steps <= 0.9 * num_steps


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("has_states", [True, False])
def test_in_deterministic_mode_no_bit_depends_on_who_decodes_at_once(
    small_weights: Path,
    make_prompt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_states: bool,
    is_recorded: bool,
) -> None:
    """The second time all but one token of each prompt is cached."""
    config = small_config(small_weights, dtype="bfloat16", deterministic=True)
    cache = replace(config.cache, num_blocks=80, enable_prefix_caching=True)
    config = of_states(config, tmp_path) if has_states else replace(config, cache=cache)
    device = replace(config.device, enforce_eager=not is_recorded)
    config = with_ngrams(replace(config, device=device), 4)
    size = config.kv_layout.groups[0].block_size

    def requests(turn: str) -> list[EngineCoreRequest]:
        kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "logprobs": 2}]
        return [
            EngineCoreRequest(
                request_id=f"{turn}-{index}",
                spec=RequestSpec(
                    make_prompt((1 + index % 2) * size + 1, index),
                    SamplingParams(
                        max_tokens=9 + 4 * index, ignore_eos=True, seed=index, **kinds[index % 2]
                    ),
                ),
            )
            for index in range(4)
        ]

    found = []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(Row, "may_decode_at_once", False)
        with started(config) as worker:
            engine = SchedulerAndWorker(config, worker.start_step, depth=2)
            engine.run(requests("first"))
            computed = engine.scheduler.stats().prompt_tokens_computed
            engine.run(requests("again"))
            stats = engine.scheduler.stats()
            assert stats.prompt_tokens_computed - computed == 4
            assert engine.scheduler.check_empty() == []
        found.append((engine.tokens, engine.logprobs))
    assert found[0] == found[1]


def with_head(config: EngineConfig, method: DrafterName, folder: Path) -> EngineConfig:
    """Returns the engine with a head of random weights."""
    model = config.model
    sizes: dict[str, object] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_model_len,
        "vocab_size": model.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "num_heads": 3,
    }
    if method == "medusa":
        sizes["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(sizes))
    return drafting(config, method, folder)


def drafting(config: EngineConfig, method: DrafterName, folder: Path) -> EngineConfig:
    config = with_ngrams(config, 4)
    assert config.speculative is not None
    draft = read_draft(method, str(folder), replace(config.model, load_format="dummy"), 3)
    return replace(config, speculative=replace(config.speculative, method=method, draft=draft))


def of_rows(config: EngineConfig, folder: Path) -> EngineConfig:
    """Returns the engine with a DeepSeek V4 of random weights, which has a layer that predicts
    ahead, and as many blocks as its rows and windows need."""
    sizes = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "num_hash_layers": 1,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 16,
        "sliding_window": 32,
        "compress_ratios": [0, 4, 128, 4, 0],
        "max_position_embeddings": config.model.max_model_len,
        "vocab_size": config.model.vocab_size,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    model = load_model_config(folder, load_format="dummy", dtype=config.model.dtype)
    return replace(config, model=model, cache=replace(config.cache, num_blocks=400))


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "mtp"])
def test_recorded_passes_draft_like_single_launches(
    small_weights: Path, make_prompt, tmp_path: Path, method: DrafterName
) -> None:
    plain = small_config(small_weights, dtype="bfloat16", deterministic=True)
    plain = of_rows(plain, tmp_path) if method == "mtp" else plain
    requests = mixed_requests(make_prompt)
    one, _ = run(plain, requests, None)
    makes = drafting if method == "mtp" else with_head
    config = makes(plain, method, tmp_path)
    found = []
    for enforce_eager in (True, False):
        device = replace(config.device, enforce_eager=enforce_eager)
        several, _ = run(replace(config, device=device), requests, None)
        assert several.tokens == one.tokens
        assert several.logprobs == one.logprobs
        found.append(several.scheduler.stats().drafts)
    assert found[0] == found[1]
    assert found[0].num_draft_tokens > 0


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_all_passes_of_a_step_are_one_graph(
    small_weights: Path, make_prompt, tmp_path: Path, method: DrafterName, monkeypatch
) -> None:
    replayed: list[GraphKey] = []
    replay = CudaGraphManager.replay
    monkeypatch.setattr(
        CudaGraphManager, "replay", lambda self, key: (replayed.append(key), replay(self, key))
    )
    monkeypatch.setattr(DraftPasses, "_passes", _once_recorded(DraftPasses._passes))
    run(with_head(small_config(small_weights), method, tmp_path), mixed_requests(make_prompt), None)
    assert {key.num_drafts for key in replayed} == {0, 3}
    assert any(key.draft_width for key in replayed), "prompts beside decodes are graphs, too"


def _once_recorded(passes: Any) -> Any:
    """Returns the same, which may only run for nobody once graphs are there."""

    def run(self: DraftPasses, batch: Any, *args: Any) -> Any:
        graphs = self._graphs
        done = graphs is not None and len(graphs._graphs) == len(graphs.keys)
        assert not done, "the kernels of a pass were launched one by one"
        return passes(self, batch, *args)

    return run


@pytest.mark.parametrize("kind", ["none", "repeating", "ngram", "eagle3", "medusa", "states"])
def test_no_step_with_drafts_waits(
    small_weights: Path, make_prompt, tmp_path: Path, kind: str
) -> None:
    config = small_config(small_weights, num_blocks=22, async_scheduling=True)
    if kind == "states":
        config = of_states(config, tmp_path)
    if kind in ("eagle3", "medusa"):
        config = with_head(config, kind, tmp_path)  # type: ignore[arg-type]
    else:
        config = with_ngrams(config, 4)
    with started(config) as worker:
        if kind in ("none", "repeating"):
            worker.runner.drafts.drafter = RepeatingDrafter() if kind == "repeating" else None
        engine = SchedulerAndWorker(config, never_waiting(worker), depth=2)
        engine.run(mixed_requests(make_prompt))
        assert engine.scheduler.check_empty() == []
