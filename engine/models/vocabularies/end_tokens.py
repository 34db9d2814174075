"""Finds the tokens that end an answer.

    generation_config.json   eos_token_id, or else that of config.json
    tokenizer_config.json    eos_token, by its text; special_tokens_map.json may have it, too
    tokenizer.json           its id

Chat models are often trained from a base model whose ids stay in the former files, and tell the end
of a turn in the tokenizer's files alone. As in vLLM and SGLang both count.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.models.config.config_file import ConfigFile, GenerationConfigFile
from engine.models.config.json_file import read_json
from engine.models.vocabularies.files import tokenizer_folder
from engine.models.vocabularies.special_tokens import read_special_tokens


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Piece(msgspec.Struct, array_like=True):
    text: str
    score: float


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[_Piece] = {}
    """The ids by text, or what has them in this order."""


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _WholeFile(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)


def find_end_tokens(folder: Path, file: ConfigFile) -> tuple[int, ...]:
    """Returns the ids of all tokens that end an answer, without those that the model has no logits
    for: they never come. Raises `CheckpointError`."""
    found = _of_configuration(folder, file)
    own = _of_tokenizer(tokenizer_folder(folder))
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
    text = read_special_tokens(folder).get("eos_token")
    if text is None or not path.is_file():
        return None
    for token in read_json(path, _TokenizerFile).added_tokens:
        if token.content == text:
            return token.id
    # Seldom, and a second reading, because a vocabulary takes much longer to read than to skip.
    vocabulary = read_json(path, _WholeFile).model.vocab
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    return next((id_ for id_, piece in enumerate(vocabulary) if piece.text == text), None)
