"""The tokenizer that grammars are compiled with: all ends of the model, and a reason if none."""

from __future__ import annotations

from pathlib import Path

import llguidance
import numpy as np
import pytest

from engine.config import ModelConfig
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.tokenizer import GrammarUnavailable, load_grammar_tokenizer, parser_limits
from tests.engine.frontend.small_tokenizers import (
    byte_fallback_backend,
    byte_level_backend,
    save,
)
from tests.engine.tiny_model import tiny_model

PADDED_VOCAB = 411
"""Models often have more logits than their tokenizer has tokens."""


def model_with(folder: Path, **changes: object) -> ModelConfig:
    fields = {"path": str(folder), "vocab_size": PADDED_VOCAB, "eos_token_ids": (1, 3), **changes}
    return tiny_model(**fields)


def allowed_after(tokenizer: llguidance.LLTokenizer, grammar: str, tokens: list[int]) -> set[int]:
    matcher = llguidance.LLMatcher(tokenizer, grammar, limits=parser_limits(), log_level=0)
    assert matcher.consume_tokens(tokens), matcher.get_error()
    return set(np.flatnonzero(_bits(matcher)).tolist())


@pytest.mark.parametrize("backend", [byte_level_backend, byte_fallback_backend])
def test_every_end_of_the_model_ends_a_grammar(tmp_path: Path, backend) -> None:
    save(tmp_path, backend())
    tokenizer = load_grammar_tokenizer(model_with(tmp_path))
    assert tokenizer.vocab_size == PADDED_VOCAB
    token = backend().token_to_id("a")
    assert allowed_after(tokenizer, "start: /a/", []) == {token}
    assert allowed_after(tokenizer, "start: /a/", [token]) == {1, 3}


def test_no_token_beyond_the_tokenizers_is_ever_allowed(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    tokenizer = load_grammar_tokenizer(model_with(tmp_path))
    allowed = allowed_after(tokenizer, r"start: /(.|\n)*/", [])
    assert len(allowed) > 200 and max(allowed) < 400


def test_tokens_that_the_model_has_no_logits_for_are_left_out(tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one for images, which its models of text alone do not."""
    backend = byte_level_backend()
    backend.add_special_tokens(["<image>", "<video>"])
    assert backend.token_to_id("<video>") == 401
    save(tmp_path, backend)
    tokenizer = load_grammar_tokenizer(model_with(tmp_path, vocab_size=400))
    assert tokenizer.vocab_size == 400
    token = backend.token_to_id("a")
    assert allowed_after(tokenizer, "start: /a/", []) == {token}
    assert max(allowed_after(tokenizer, r"start: /(.|\n)*/", [])) < 400


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eos_token_ids": ()}, "generation_config.json"),
        ({"path": "/nowhere"}, "tokenizer.json"),
        ({"vocab_size": 300}, "vocab size too small"),
    ],
)
def test_a_model_that_cannot_says_why(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    save(tmp_path, byte_level_backend())
    with pytest.raises(GrammarUnavailable, match=says):
        load_grammar_tokenizer(model_with(tmp_path, **changes))


def test_errors_do_not_repeat_what_the_grammar_says(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    tokenizer = load_grammar_tokenizer(model_with(tmp_path))
    matcher = llguidance.LLMatcher(
        tokenizer, "start: /secret/", limits=parser_limits(), log_level=0
    )
    assert not matcher.consume_token(7)
    assert "secret" not in matcher.get_error()


@pytest.mark.parametrize("backend", [byte_level_backend, byte_fallback_backend])
@pytest.mark.parametrize("text", ["<s>", "a</s>b", "x<|end|>"])
def test_a_text_that_looks_like_a_special_token_is_a_text(
    tmp_path: Path, backend, text: str
) -> None:
    """The library spells what a grammar forces, and took the special token for it."""
    save(tmp_path, backend())
    tokenizer = load_grammar_tokenizer(model_with(tmp_path))
    if backend is byte_fallback_backend:
        text = text.replace("|", "")
    matcher = llguidance.LLMatcher(
        tokenizer, f'start: "{text}"', limits=parser_limits(), log_level=0
    )
    written: list[int] = []
    while 1 not in (allowed := np.flatnonzero(_bits(matcher))):
        written.append(int(allowed[-1]))
        assert matcher.consume_token(written[-1]), matcher.get_error()
    special = {backend().token_to_id(name) for name in ("<s>", "</s>", "<|user|>", "<|end|>")}
    assert not special & set(written)
    assert tokenizer.decode_bytes(written) == text.encode()


def test_special_tokens_are_still_known_by_their_ids(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    tokenizer = load_grammar_tokenizer(model_with(tmp_path))
    user = byte_level_backend().token_to_id("<|user|>")
    assert allowed_after(tokenizer, f"start: <[{user}]> /a/", []) == {user}
    assert user not in allowed_after(tokenizer, r"start: /(.|\n)*/", [])


def _bits(matcher: llguidance.LLMatcher) -> np.ndarray:
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")


def test_a_deep_grammar_does_not_overflow_the_stack_of_a_thread(tmp_path: Path) -> None:
    """Each rule needs the next one, 4000 deep: with the stack that threads have anyway the process
    would end."""
    save(tmp_path, byte_level_backend())
    compiler = GrammarCompiler(model_with(tmp_path), num_threads=2)
    rules = [f'r{i}: "a{i}" r{i + 1} | "b"' for i in range(4000)]
    grammar = "\n".join(["start: r0", *rules, 'r4000: "x"'])
    compiled = [compiler.compile(grammar, []) for _ in range(3)]
    assert [one.result(60).failure for one in compiled] == [""] * 3
    compiler.close()
