"""Writes vocabularies that are no tokenizer.json, and what their own libraries make of texts.

Called by `extract.py`, in the environment of the libraries:

    vocabularies/tekken/    tekken.json as mistral-common ships it, and the template that it makes
    vocabularies/kimi/      tiktoken.model and tokenizer_config.json: the same tokens with Kimi's
                            expression and special tokens, since no package has Kimi's own
    vocabularies/*/ids.json    texts, and their ids
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import tiktoken
from mistral_common.integrations.chat_templates.chat_templates import (
    convert_tokenizer_to_chat_template,
)
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

NUM_TEXTS = 10_000
TEKKEN = "tekken_240911.json"
KIMI_NAMES = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "[EOT]")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = (
    *[
        "the",
        "don't",
        "WE'LL",
        "naïve",
        "Straße",
        "camelCaseX",
        "Ω",
        "мир",
        "שלום",
        "नमस्ते",
        "สวัสดี",
        "한국어",
        "日本語",
        "中文",
        "カタカナ",
    ],
    *[
        "㍿",
        "ǅ",
        "ʰ",
        "ﬁ",
        "é",
        "𝔘",
        "1234567",
        "3.14",
        "½",
        "٣٤٥",
        "〇",
        "ⅷ",
        "--",
        ":://",
        "...",
        "<s>",
        "[INST]",
        "'s",
        "'LL",
    ],
    '{"a":[1,2]}',
    "\U0001f469\u200d\U0001f467",
)
_SPACES = " \t\n\r\u00a0\u3000\u2028\u0085\u200b\x0b\x0caB1中"


def texts(names: Sequence[str]) -> Iterator[str]:
    """Yields code, CJK, numbers, white space, any characters, and control tokens in texts."""
    draw = random.Random(5)
    code = Path(__file__).read_text(encoding="utf-8")

    def characters(first: int, last: int) -> str:
        points = (draw.randrange(first, last) for _ in range(draw.randrange(1, 50)))
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)

    def some(parts: Sequence[str], most: int, between: str = "") -> str:
        return between.join(draw.choice(parts) for _ in range(draw.randrange(1, most)))

    kinds: tuple[Callable[[], str], ...] = (
        lambda: code[(at := draw.randrange(len(code))) : at + draw.randrange(200)],
        lambda: characters(0x4E00, 0x9FFF),
        lambda: some("0123456789,. -", 60),
        lambda: some(_SPACES, 40),
        lambda: some(_WORDS, 20, draw.choice(("", " "))),
        lambda: characters(0x20, 0x2FFF),
        lambda: characters(0x20, 0x1FFFF),
        lambda: some((*_WORDS, *names, " "), 12),
    )
    for number in range(NUM_TEXTS):
        yield kinds[number % len(kinds)]()


def write(found: Path) -> None:
    """Writes both folders below `found`."""
    with resources.as_file(resources.files("mistral_common") / "data" / TEKKEN) as source:
        content = json.loads(source.read_text(encoding="utf-8"))
        tekken = found / "tekken"
        tekken.mkdir()
        shutil.copy(source, tekken / "tekken.json")
    template = convert_tokenizer_to_chat_template(tekken / "tekken.json")
    (tekken / "chat_template.jinja").write_text(template, encoding="utf-8")
    library = Tekkenizer.from_file(tekken / "tekken.json")
    _write_ids(tekken, lambda text: library.encode(text, bos=True, eos=False), ())
    size = content["config"]["default_vocab_size"] - content["config"]["default_num_special_tokens"]
    _write_kimi(found / "kimi", [token["token_bytes"] for token in content["vocab"][:size]])


def _write_kimi(folder: Path, tokens: Sequence[str]) -> None:
    folder.mkdir()
    lines = (f"{token} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("".join(lines))
    first = len(tokens)
    added = {str(first + i): {"content": name} for i, name in enumerate(KIMI_NAMES)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    special = {f"<|reserved_token_{id_}|>": id_ for id_ in range(first, first + 256)}
    special = dict(zip(KIMI_NAMES, range(first, first + 256), strict=False)) | {
        name: id_ for name, id_ in special.items() if id_ >= first + len(KIMI_NAMES)
    }
    ranks = {base64.b64decode(token): rank for rank, token in enumerate(tokens)}
    library = tiktoken.Encoding(
        "kimi", pat_str=KIMI_WORDS, mergeable_ranks=ranks, special_tokens=special
    )
    names = (*KIMI_NAMES, f"<|reserved_token_{first + 9}|>")
    _write_ids(folder, lambda text: library.encode(text, allowed_special="all"), names)


def _write_ids(folder: Path, encode: Callable[[str], list[int]], names: Sequence[str]) -> None:
    given = list(texts(names))
    content = {"texts": given, "ids": [encode(text) for text in given]}
    (folder / "ids.json").write_text(json.dumps(content), encoding="utf-8")
