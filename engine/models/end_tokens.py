"""Finds the tokens that end an answer.

    generation_config.json   eos_token_id, or else that of config.json
    tokenizer_config.json    eos_token, by its text; special_tokens_map.json may have it, too
    tokenizer.json           its id

Chat models are often trained from a base model whose ids stay in the former files, and tell the end
of a turn in the tokenizer's files alone. As in vLLM and SGLang both count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.models.config_file import ConfigFile, GenerationConfigFile, read_json


class _TokenizerConfig(msgspec.Struct):
    eos_token: Any = None
    added_tokens_decoder: Any = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def find_end_tokens(folder: Path, file: ConfigFile) -> tuple[int, ...]:
    """Returns the ids of all tokens that end an answer, without those that the model has no logits
    for: they never come. Raises `CheckpointError`."""
    found = _of_configuration(folder, file)
    own = _of_tokenizer(folder)
    found += [] if own is None else [own]
    return tuple(id_ for id_ in dict.fromkeys(found) if 0 <= id_ < file.vocab_size)


def _of_configuration(folder: Path, file: ConfigFile) -> list[int]:
    ids = file.eos_token_id
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_json(path, GenerationConfigFile)
        ids = ids if generation.eos_token_id is None else generation.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _of_tokenizer(folder: Path) -> int | None:
    """Returns the id of the tokenizer's own end; None where it has none."""
    path = folder / "tokenizer.json"
    text = _end_text(folder)
    if text is None or not path.is_file():
        return None
    tokens = read_json(path, _TokenizerFile).added_tokens
    return next((token.id for token in tokens if token.content == text), None)


def _end_text(folder: Path) -> str | None:
    """Returns the text of the tokenizer's end. The map counts for more, unless the configuration
    lists all tokens, as transformers has it."""
    config = _read(folder / "tokenizer_config.json")
    beside = _read(folder / "special_tokens_map.json")
    first, second = (beside, config) if config.added_tokens_decoder is None else (config, beside)
    found = second.eos_token if first.eos_token is None else first.eos_token
    text = found.get("content") if isinstance(found, dict) else found
    return text if isinstance(text, str) else None


def _read(path: Path) -> _TokenizerConfig:
    return read_json(path, _TokenizerConfig) if path.is_file() else _TokenizerConfig()
