"""A tokenizer as large as a real one: for models with random weights, which have none.

Byte-level BPE, like those of Llama 3 and Qwen: bytes, numbers of up to three digits, runs of
punctuation, and words of small letters, with a space before most of them. What a mask costs depends
on the shape of the vocabulary, of which words are nine tenths here as there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_END = "<|end|>"
"""Token 0, which ends an output."""
_SPACE = "Ġ"
_PUNCTUATION = "{}[]\":,.-_/\\<>()=;'"
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_LONGEST_WORD = 12


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a tokenizer with exactly `vocab_size` tokens, the same each time."""
    vocab = {_END: 0}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    merges: list[tuple[str, str]] = []
    for left, right in _pairs(vocab_size):
        if len(vocab) == vocab_size:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_END])
    return backend


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Saves one as a checkpoint's tokenizer.json."""
    synthetic_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))


def _pairs(vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yields tokens to make, each from two that there are; without end."""
    for length in (2, 3):
        for digits in product("0123456789", repeat=length):
            yield "".join(digits[:-1]), digits[-1]
    for length in (2, 3):
        for run in product(_PUNCTUATION, repeat=length):
            yield "".join(run[:-1]), run[-1]
    draw = random.Random(0)
    weights = range(len(_LETTERS), 0, -1)
    words = [*_LETTERS, _SPACE]
    while True:
        word = draw.choice(words)
        [letter] = draw.choices(_LETTERS, weights)
        if len(word) < _LONGEST_WORD:
            yield word, letter
            if len(words) < vocab_size:
                words.append(word + letter)
