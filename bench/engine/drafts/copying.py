"""A model that copies: the token behind t is t + 1, at the cost of any model of its shape.

What layers add to the stream is zero, and the head looks for the token before: whoever reads a
document of consecutive numbers and then its first token repeats the document. Weights that are zero
take as long as others. Source of the workload: prompt lookup's summaries and edits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bench.engine.drafts.engines import Engine, Pair, with_transfers
from engine.config import EngineConfig, SpeculativeConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.executor.abstract import KVCaches, ReportProgress
from engine.executor.uniproc_executor import UniprocExecutor
from engine.models.base import CausalLM
from engine.models.fill_jobs import fill_weight

_ADDED = (".o_proj.weight", ".down_proj.weight")


@dataclass(frozen=True, slots=True)
class Copying:
    """Says what is copied: documents of so many tokens, so often."""

    document: int
    num_copied: int
    num_rounds: int


class CopyingExecutor(UniprocExecutor):
    """Loads a model and makes it copy."""

    def initialize(self, report: ReportProgress) -> KVCaches:
        load = self._worker.load_model

        def load_and_change(report: Callable[[float], None]) -> None:
            load(report)
            with torch.no_grad():
                make_copy(self._worker.runner._model)

        self._worker.load_model = load_and_change  # type: ignore[method-assign]
        return super().initialize(report)


def make_copy(model: CausalLM) -> None:
    """Changes the weights of a model whose head is not its embedding."""
    embedding: torch.Tensor | None = None
    for weight in model.checkpoint_weights():
        device = weight.target.device
        if weight.name == "model.embed_tokens.weight":
            generator = torch.Generator(device).manual_seed(0)
            embedding = torch.randn(weight.shape, generator=generator, device=device)
            fill_weight(weight, weight.target, embedding)
        elif weight.name == "lm_head.weight":
            assert embedding is not None
            fill_weight(weight, weight.target, embedding.roll(1, dims=0))
        elif weight.name.endswith(_ADDED):
            fill_weight(weight, weight.target, torch.zeros(weight.shape, device=device))


def measure_copying(
    config: EngineConfig, speculative: SpeculativeConfig, plan: Copying
) -> dict[str, float]:
    """Returns tokens per second of one stream through P/D on one device, with and without."""
    prefill = _engine(with_transfers(config, is_producer=True))
    drafting = replace(
        config,
        speculative=speculative,
        decode_query_len=speculative.num_speculative_tokens + 1,
    )
    speeds = {}
    for name, one in (("plain", config), ("with drafts", drafting)):
        pair = Pair(prefill, _engine(with_transfers(one, is_producer=False)))
        _copied(pair, plan, 0)
        found = [_copied(pair, plan, number) for number in range(1, plan.num_rounds + 1)]
        speeds[name] = statistics.median(found)
        pair.close()
    prefill.close()
    return {
        "document, tokens": plan.document,
        "copied, tokens": plan.num_copied,
        "tokens_per_s": round(speeds["with drafts"], 1),
        "plain_tokens_per_s": round(speeds["plain"], 1),
        "ratio": round(speeds["with drafts"] / speeds["plain"], 2),
    }


def _engine(config: EngineConfig) -> Engine:
    return Engine(config, CopyingExecutor(config))


def _copied(pair: Pair, plan: Copying, number: int) -> float:
    """Returns the tokens per second of an answer, its prompt's time included."""
    first = 1 + number * plan.document
    document = list(range(first, first + plan.document))
    sampling = SamplingParams(temperature=0.0, max_tokens=plan.num_copied, ignore_eos=True)
    tokens: list[int] = []
    started = time.perf_counter()
    pair.submit(
        EngineCoreRequest(
            request_id=f"copy-{number}", spec=RequestSpec([*document, first], sampling)
        )
    )
    while not pair.is_idle:
        tokens += [token for output in pair.step() for token in output.new_token_ids]
    if tokens != document[1 : plan.num_copied + 1]:
        raise RuntimeError("the model has not copied its prompt: nothing was measured")
    return len(tokens) / (time.perf_counter() - started)
