"""Tells which texts of a checkpoint are its special tokens, as transformers finds them.

    tokenizer_config.json    names them
    special_tokens_map.json  names more, and counts for more, even with null; unless the former has
                             `added_tokens_decoder`, which lists all tokens: then it counts nothing

Neither config.json nor tokenizer.json nor generation_config.json names a token's text. A special
token is its text, or an object (`AddedToken`) with the text in `content`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.config.json_file import read_json

_OF_EVERY_MODEL = (
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
)  # fmt: skip
_NAMED = "extra_special_tokens"
"""An object with tokens of this model by name, or a list of tokens without names."""
_NAMED_WHEN_SAVED = "model_specific_special_tokens"
"""Such an object, which counts only where the configuration names none of these in another way."""


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens by name (`eos_token`); null is no token. Raises
    `CheckpointError`."""
    config = _read(folder / "tokenizer_config.json")
    lists_all = "added_tokens_decoder" in config
    beside = {} if lists_all else _read(folder / "special_tokens_map.json")
    tokens = {name: value for name, value in config.items() if _may_be_token(name, value)} | beside
    tokens = {name: value for name, value in tokens.items() if name.endswith("_token")}
    tokens |= _of_this_model(config) | _object(beside.get(_NAMED))
    texts = ((name, _text_of(value)) for name, value in tokens.items())
    return {name: text for name, text in texts if text is not None}


def _may_be_token(name: str, value: object) -> bool:
    """Says whether transformers takes an entry of the configuration for a token. An object must say
    that it is one; where it must be one, and transformers loads nothing, we take its text."""
    is_unmarked = isinstance(value, dict) and value.get("__type") != "AddedToken"
    return name in _OF_EVERY_MODEL or not is_unmarked


def _of_this_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tokens that other models do not have. No other file replaces these."""
    tokens = {
        name: value
        for name, value in config.items()
        if name.endswith("_token") and name not in _OF_EVERY_MODEL and isinstance(value, str)
    }
    tokens |= _object(config.get(_NAMED))
    return tokens or _object(config.get(_NAMED_WHEN_SAVED))


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text_of(token: object) -> str | None:
    if isinstance(token, dict):
        # An object without a text is the token of no text.
        token = "" if token.get("content") is None else token["content"]
    return token if isinstance(token, str) else None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any]) if path.is_file() else {}
