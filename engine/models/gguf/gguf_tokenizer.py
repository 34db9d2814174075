"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from engine.models.errors import CheckpointError
from engine.models.gguf.gguf_file import GgufFile

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
"""Kinds of tokens, as llama.cpp numbers them."""
_SPACE = "\u2581"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def read_tokenizer(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """Returns the text of tokenizer.json, and what tokenizer_config.json says. Raises
    `CheckpointError`: it is of a kind that is not here."""
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    kinds = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    model = file.get("tokenizer.ggml.model", str, "")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if model == "gpt2":
        tokenizer = _byte_level(file, vocabulary)
    elif model == "llama":
        tokenizer = _sentencepiece(file, vocabulary, kinds)
    else:
        raise _refused(file, f"a tokenizer of kind {model!r}")
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    config = _config(file, tokens)
    if config["add_bos_token"]:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    text: str = tokenizer.to_str()
    return text, config


def _config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    ids = {
        name: file.get(f"tokenizer.ggml.{own}_token_id", int, -1) for own, name in _NAMES.items()
    }
    named = {name: tokens[index] for name, index in ids.items() if 0 <= index < len(tokens)}
    adds = file.get("tokenizer.ggml.model", str, "") == "llama"
    config = {
        **named,
        "add_bos_token": "bos_token" in named
        and file.get("tokenizer.ggml.add_bos_token", bool, adds),
    }
    template = file.get("tokenizer.chat_template", str, "")
    return config | ({"chat_template": template} if template else {})


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list, [])]
    kind = file.get("tokenizer.ggml.pre", str, "default")
    words = {"llama-bpe": _LLAMA3_WORDS, "qwen2": _QWEN2_WORDS}.get(kind)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe")
    )
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    if words is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_alone])
    elif kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_alone])
    elif kind in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = bytes_alone
    else:
        raise _refused(file, f"words cut as {kind!r} has them (tokenizer.ggml.pre)")
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    file: GgufFile, vocabulary: dict[str, int], kinds: list[int]
) -> tokenizers.Tokenizer:
    scores = file.get("tokenizer.ggml.scores", list, [])
    tokens = list(vocabulary)
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", int, 0)]
    merges = sorted(
        _merges(vocabulary, kinds), key=lambda merge: -scores[vocabulary["".join(merge)]]
    )
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    ends = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer


def _merges(vocabulary: dict[str, int], kinds: list[int]) -> Iterator[tuple[str, str]]:
    """Yields every pair of tokens that is a token itself; those of special kinds are never made
    of others."""
    special = (_CONTROL, _USER_DEFINED, _BYTE)
    for token, index in vocabulary.items():
        if kinds[index] in special:
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in vocabulary and pair[1] in vocabulary:
                yield pair


def _refused(file: GgufFile, what: str) -> CheckpointError:
    return CheckpointError(
        file.path,
        f"has {what}, which GGUF is not read with",
        "name the original checkpoint with its safetensors files",
    )
