"""Byte-pair encoding by ranks, as tiktoken has it, made a tokenizer of the `tokenizers` library.

tiktoken joins the two neighbours whose union has the lowest rank. `tokenizers` joins pairs by their
place in a list, so every pair of tokens whose union is a token is in it, in the order of the
unions' ranks. Both take a word that is a token as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.models.errors import CheckpointError


class SpecialToken(msgspec.Struct, frozen=True):
    """A token that no bytes are joined to. `is_hidden`: answers do not show it."""

    text: str
    id: int
    is_hidden: bool = True


def ranked_bpe(
    path: Path,
    ranks: Mapping[bytes, int],
    first_id: int,
    pattern: str,
    special: Sequence[SpecialToken],
) -> tokenizers.Tokenizer:
    """Returns the tokenizer.

    Args:
        path: Of the file that all this is from.
        ranks: The tokens.
        first_id: The id of the token of rank 0.
        pattern: The expression that finds words.
        special: In any order.

    Raises:
        CheckpointError: A special token is an ordinary one as well, or the expression is none.
    """
    vocabulary = {_printable(token): first_id + rank for token, rank in ranks.items()}
    for token in special:
        if vocabulary.setdefault(token.text, token.id) != token.id:
            raise CheckpointError(
                path,
                f"has {token.text!r} as a special and as an ordinary token",
                "put a tokenizer.json into the folder",
            )
    merges = [(_printable(left), _printable(right)) for left, right in _merges(ranks)]
    model = models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(model)
    try:
        words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            path,
            f"finds words by an expression that cannot be read ({error})",
            "put a tokenizer.json into the folder",
        ) from error
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token.text, normalized=False, special=token.is_hidden)
            for token in sorted(special, key=lambda token: token.id)
        ]
    )
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns all pairs of tokens whose union is a token, in the order of its rank."""
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                found.append((rank, ranks[left], ranks[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _alphabet() -> dict[int, str]:
    """Returns how byte-level BPE writes each byte (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }


_ALPHABET = _alphabet()


def _printable(token: bytes) -> str:
    return "".join(map(_ALPHABET.__getitem__, token))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file of a tokenizer's folder."""
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
