"""Kimi's tokenizer: `tiktoken.model`, with the special tokens of tokenizer_config.json.

    tiktoken.model    a line for each token: its bytes in base64, and its rank, which is its id
    tokenizer_config  added_tokens_decoder: special tokens by id, behind all others

Ids that nothing names are reserved ones. The expression that finds words is in the program that
Kimi publishes beside these files, alike in all releases from K2 to K2.7 and Kimi Linear. That
program also cuts runs of 25,000 characters without a space; here they are one text.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import msgspec
import tokenizers

from engine.models.config.json_file import read_json
from engine.models.errors import CheckpointError
from engine.models.vocabularies.ranked_bpe import SpecialToken, ranked_bpe

FILE = "tiktoken.model"
_NUM_RESERVED = 256
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = True


class _ConfigFile(msgspec.Struct):
    auto_map: dict[str, object] | None = None
    added_tokens_decoder: dict[str, _AddedToken] = {}


def read_kimi(path: Path) -> tokenizers.Tokenizer:
    """Reads a `tiktoken.model` and the tokenizer_config.json beside it. Raises
    `CheckpointError`."""
    ranks = _ranks(path)
    config = path.with_name("tokenizer_config.json")
    file = read_json(config, _ConfigFile) if config.is_file() else _ConfigFile()
    if "kimi" not in str(file.auto_map or "kimi"):
        raise CheckpointError(
            path,
            "finds words by an expression of its own program, which is not Kimi's",
            "put a tokenizer.json into the folder",
        )
    named = {int(id_): token for id_, token in file.added_tokens_decoder.items() if id_.isdigit()}
    special = [
        SpecialToken(named[id_].content, id_, named[id_].special)
        if id_ in named
        else SpecialToken(f"<|reserved_token_{id_}|>", id_, is_hidden=False)
        for id_ in sorted({*named, *range(len(ranks), len(ranks) + _NUM_RESERVED)})
    ]
    return ranked_bpe(path, ranks, 0, _WORDS, special)


def _ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                path, f"has a line {number} that is no token", "download the file again"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(path, "lacks tokens between others", "download the file again")
    return ranks
