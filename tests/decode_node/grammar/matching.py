"""A tokenizer with markers, and what a grammar lets through of it."""

from __future__ import annotations

import random
from functools import cache

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|end|>", "<|eot|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
_TEXT = ['the quick {"name": "fox", "age": 12} jumps over true false null and think hard </think>']


@cache
def backend() -> Backend:
    """Builds a byte-level BPE tokenizer of about 320 tokens."""
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _TEXT * 3,
        trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_special_tokens(SPECIAL)
    return made


def id_of(special: str) -> int:
    found = backend().token_to_id(special)
    assert found is not None
    return found


END, EOT = id_of("<|end|>"), id_of("<|eot|>")
THINK, END_THINK = id_of("<think>"), id_of("</think>")
CALL, END_CALL = id_of("<tool_call>"), id_of("</tool_call>")
END_IDS = (END, EOT)


@cache
def _plain() -> Backend:
    made = Backend.from_str(backend().to_str())
    made.encode_special_tokens = True
    return made


@cache
def ll_tokenizer() -> LLTokenizer:
    return LLTokenizer(backend().to_str(), eos_token=list(END_IDS))


def matcher(grammar: str) -> LLMatcher:
    """Compiles a grammar, which must be correct."""
    made = LLMatcher(ll_tokenizer(), grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def spell(*parts: str | int) -> list[int]:
    """Returns the tokens of texts and ids; a text that looks like a special token is a text."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else _plain().encode(part).ids
    return ids


def accepts(grammar: str, *parts: str | int) -> bool:
    """Says whether the parts are a complete answer."""
    made, ids = matcher(grammar), spell(*parts)
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()


def allowed(made: LLMatcher) -> list[int]:
    """Returns the ids that may come next."""
    mask = made.compute_bitmask()
    return [i for i in range(ll_tokenizer().vocab_size) if mask[i >> 3] >> (i & 7) & 1]


def allowed_after(grammar: str, *parts: str | int) -> list[int]:
    made = matcher(grammar)
    assert made.consume_tokens(spell(*parts)), made.get_error()
    return allowed(made)


def random_answer(grammar: str, seed: int, most: int) -> tuple[list[int], bool]:
    """Draws tokens evenly from those allowed, `most` at most; says whether the answer ended."""
    made, draw = matcher(grammar), random.Random(seed)
    ids: list[int] = []
    while len(ids) < most:
        chosen = draw.choice(allowed(made))
        assert made.consume_token(chosen), made.get_error()
        if chosen in END_IDS:
            return ids, True
        ids.append(chosen)
    return ids, False
