"""Tokenizers of the two families that matter, small enough to be made in a test."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.frontend.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]
_TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "ein Rücken kann auch entzücken – größer, älter, Straße",
    "日本語のテキスト 漢字かな交じり文",
    "emoji 👩‍👩‍👧 and flags 🇩🇪 stop right here",
]


def byte_level_backend(*, adds_bos: bool = False) -> Backend:
    """Builds a backend like those of Llama 3, Qwen and GPT-2: each byte is a character of an
    alphabet.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return backend


def byte_fallback_backend() -> Backend:
    """Builds a backend like those of Llama 2 and Mistral: ▁ for spaces, and `<0x..>` for bytes
    without a token.
    """
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdefghijklmnopqrstuvwxyz", "▁t", "▁th", "▁the", "ü", "の"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend())


@cache
def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_backend())


def save(folder: Path, backend: Backend, template: str | None = None, **config: object) -> Path:
    """Saves a checkpoint folder, as far as tokenizers are concerned."""
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
