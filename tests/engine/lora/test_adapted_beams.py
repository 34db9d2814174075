"""Beams of an adapted model are those that transformers finds with the adapter merged in, also
where other requests draft."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import CacheConfig, SpeculativeConfig
from engine.contracts.sampling_params import BeamParams
from tests.engine.lora.adapted_engine import Adapted, request
from tests.engine.models.test_beam_search import PROMPTS, asked, check, expected
from tests.engine.worker.one_engine import OneEngine, check_empty

BEAMS = (BeamParams(4), BeamParams(3, 0.0, early_stopping=True))


def test_beams_of_many_adapters_are_those_of_merged_models(
    adapted_family: Callable[[str], Adapted],
) -> None:
    """There are fewer slots than adapters and too few blocks, so that beams wait for both;
    requests beside them draft."""
    models = adapted_family("llama")
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
    )
    config = models.config(
        lora=models.lora(max_loras=2, max_cpu_loras=3),
        cache=CacheConfig(block_size=8, num_blocks=24),
        speculative=speculative,
        decode_query_len=4,
    )
    engine = OneEngine(config, 2)
    cases = [
        (f"{index}-{number}-{i}", index, number, beam)
        for index in (0, None, 3)
        for number in (1, 2)
        for i, beam in enumerate(BEAMS)
    ]
    drafting = [request(f"d{i}", seed=2 * i) for i in range(4)]
    for i, (name, index, number, beam) in enumerate(cases):
        engine.add(models.with_adapter(asked(name, PROMPTS[number], beam, 2), index))
        if i < len(drafting):
            engine.add(models.with_adapter(drafting[i], i % 2))
    engine.finish()
    found = set()
    for name, index, number, beam in cases:
        folder = models.model if index is None else models.folder / f"merged-{index}"
        wanted = expected(folder, number, beam, 2)
        found.add(tuple(map(tuple, wanted)))
        check(engine, name, wanted)
    assert len(found) > len(cases) / 2, "adapters must change answers"
    for i, message in enumerate(drafting):
        assert engine.tokens[message.request_id] == models.expected(message, i % 2)
    stats = engine.scheduler.stats()
    assert stats.drafts.num_accepted_tokens > 0
    check_empty(engine)
