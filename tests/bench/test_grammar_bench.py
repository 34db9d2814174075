"""The vocabulary that the bench of grammars makes up, and the grammars that it never ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.engine.grammar import grammar_of, measure_masks, under_grammar
from bench.engine.models.shapes import shape_config
from bench.engine.models.tokenizer import save_tokenizer, synthetic_tokenizer
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.grammar.tokenizer import load_grammar_tokenizer

VOCAB = 9000


def test_the_vocabulary_has_every_size_and_reads_what_it_writes() -> None:
    text = '{"count": 417, "tags": ["the house", null]}'
    for size in (400, VOCAB):
        backend = synthetic_tokenizer(size)
        assert backend.get_vocab_size() == size
        assert backend.decode(backend.encode(text).ids) == text
    assert len(backend.encode(text).ids) < len(text) * 0.8
    assert backend.to_str() == synthetic_tokenizer(VOCAB).to_str()


def test_masks_are_measured_over_rows_that_never_end(tmp_path: Path) -> None:
    config = shape_config("tiny", device="cpu", max_model_len=64, max_num_seqs=4)
    model = replace(config.model, path=str(tmp_path), vocab_size=VOCAB, eos_token_ids=(0,))
    save_tokenizer(tmp_path, VOCAB)
    assert load_grammar_tokenizer(model).vocab_size == VOCAB
    figures = measure_masks(replace(config, model=model), num_threads=1)
    assert figures["rows"] == 256
    assert 0 < figures["masks_ms_p50"] <= figures["masks_ms_p90"] <= figures["masks_ms_max"]


def test_requests_under_a_grammar_may_end() -> None:
    plain = EngineCoreRequest(
        request_id="a", spec=RequestSpec([1], SamplingParams(ignore_eos=True, max_tokens=9))
    )
    changed = under_grammar(plain, 3)
    assert changed.spec.sampling.grammar == grammar_of(3) != grammar_of(4)
    assert not changed.spec.sampling.ignore_eos and changed.eos_token_ids == (0,)
