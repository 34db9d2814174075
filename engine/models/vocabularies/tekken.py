"""Mistral's tokenizer: `tekken.json`.

    config.pattern                     the expression that finds words
    config.default_num_special_tokens  this many ids stand in front of all others
    special_tokens                     their names; of the oldest files all have the same
    vocab                              tokens by rank, more than the model has: the first ones count

The chat template is what the library mistral-common makes of the same file (extra `mistral`).
"""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import processors

from engine.models.config.json_file import read_json
from engine.models.errors import CheckpointError
from engine.models.vocabularies.ranked_bpe import SpecialToken, ranked_bpe

logger = logging.getLogger(__name__)

FILE = "tekken.json"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_OLDEST = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of files that name none, up to version 7."""


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _SpecialToken(msgspec.Struct):
    rank: int
    token_str: str
    is_control: bool = True


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_SpecialToken] | None = None


def read_tekken(path: Path) -> tokenizers.Tokenizer:
    """Reads a `tekken.json`. Texts begin with `<s>`, as mistral-common has them. Raises
    `CheckpointError`."""
    file = read_json(path, _File)
    count = file.config.default_num_special_tokens
    size = file.config.default_vocab_size - count
    try:
        ranks = {
            base64.b64decode(token.token_bytes, validate=True): token.rank
            for token in file.vocab
            if token.rank < size
        }
    except ValueError as error:  # no base64, or no text in ASCII
        raise CheckpointError(path, f"has a token that is none: {error}", _AGAIN) from error
    if sorted(ranks.values()) != list(range(size)):
        raise CheckpointError(path, "lacks tokens between others", _AGAIN)
    given = file.special_tokens
    if given is None:
        given = [_SpecialToken(rank, text) for rank, text in enumerate(_OLDEST)]
    named = {token.rank: token for token in given if token.rank < count}
    special = [
        SpecialToken(named[id_].token_str, id_, named[id_].is_control)
        if id_ in named
        else SpecialToken(f"<SPECIAL_{id_}>", id_)
        for id_ in range(count)
    ]
    tokenizer = ranked_bpe(path, ranks, count, file.config.pattern, special)
    bos = NAMES["bos_token"]
    if (id_ := tokenizer.token_to_id(bos)) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, id_)]
        )
    return tokenizer


_AGAIN = "download the file again"


def tekken_template(path: Path) -> str | None:
    """Returns the chat template of a `tekken.json`; None: mistral-common is not installed, or has
    none for this file."""
    try:
        from mistral_common.integrations.chat_templates.chat_templates import (
            convert_tokenizer_to_chat_template,
        )
    except ImportError:
        logger.warning(
            "%s comes without a chat template; pip install 'tandem[mistral]' to have the one that "
            "mistral-common makes, or put chat_template.jinja into the folder",
            path.parent,
        )
        return None
    try:
        text: str = convert_tokenizer_to_chat_template(path)
    except Exception as error:  # the library raises what its own checks do
        logger.warning("mistral-common makes no chat template of %s: %s", path, error)
        return None
    return text
