"""A tokenizer for the tiny model: printable ASCII and a few words, 0 is the end."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_MERGES = [("t", "r"), ("tr", "u"), ("tru", "e"), ('"', ":"), ("Ġ", "a")]


@cache
def tiny_backend() -> Tokenizer:
    alphabet = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
    pieces = ["<end>", *alphabet, *(left + right for left, right in _MERGES)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def save_tokenizer(folder: Path) -> str:
    """Saves it, and returns the folder's path."""
    tiny_backend().save(str(folder / "tokenizer.json"))
    return str(folder)


def text_of(token_ids: list[int]) -> str:
    """Returns the text of an output, without its end."""
    text: str = tiny_backend().decode(token_ids, skip_special_tokens=True)
    return text
