"""A tiny model that sees images, with a tokenizer of words and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.engine.images.vision_checkpoints import END, IMAGE, START, save_checkpoint
from tests.engine.images.vision_families import VIDEO

_NAMES = {
    IMAGE: "<|image_pad|>",
    START: "<|vision_start|>",
    END: "<|vision_end|>",
    VIDEO: "<|video_pad|>",
}
_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""


def save(folder: Path) -> Path:
    """Saves it. Word `wN` is token N; sizes are limited to 54 tokens an image or a pair of
    frames."""
    save_checkpoint("qwen2_5", folder)
    vocab = {_NAMES.get(i, f"w{i}"): i for i in range(128)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Sequence([decoders.Replace("w", " w")])
    backend.add_special_tokens([AddedToken(name, special=True) for name in _NAMES.values()])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    sizes = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 54}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder
