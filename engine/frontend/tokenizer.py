"""Turns text into token ids and back, from a checkpoint's own files.

    tokenizer.json           the vocabulary and the rules of splitting and joining
    tokenizer_config.json    names of special tokens, and often the chat template
    special_tokens_map.json  more such names
    chat_template.jinja      the chat template, where it has a file of its own
    chat_template.json       the same, as older releases of models with images have it

Other forms of a vocabulary are made one first (`engine.models.vocabularies.files`). Only the
`tokenizers` library is needed, neither torch nor transformers. A model with random
weights may have no tokenizer; then each token is a word, t0, t1, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from edge.printable import printable
from engine.config import ModelConfig
from engine.contracts.errors import CannotStartError
from engine.frontend.templates.chat_template import ChatMessage, ChatTemplate, ChatTemplateError
from engine.frontend.templates.own_templates import own_template
from engine.frontend.text.byte_detokenizer import ByteTexts
from engine.models.config.json_file import read_json, read_text
from engine.models.errors import CheckpointError
from engine.models.vocabularies.files import has_tokenizer, tokenizer_folder
from engine.models.vocabularies.special_tokens import read_special_tokens

_STAND_IN_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_TEMPLATE_FILES = {
    _DEFAULT: "chat_template.jinja",
    _WITH_TOOLS: "additional_chat_templates/tool_use.jinja",
}
_FIRST_WORDS = "The quick brown fox, 1 Ünïcode 日本\n"
"""A file counts as read when this could be encoded."""
_CUT_MARGIN = 1024
"""Characters before those that may be needed, because a text is split otherwise near a cut."""
_QUICKLY_DECODED = 1000
"""Tokens, whose text is there within 1 ms."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TemplateField(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None

    def by_name(self) -> dict[str, str]:
        if isinstance(self.chat_template, list):
            return {one.name: one.template for one in self.chat_template}
        return {} if self.chat_template is None else {_DEFAULT: self.chat_template}


class TokenizerError(CannotStartError):
    """A tokenizer file is missing or unreadable; says which and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class TooManyTokens(ValueError):
    """A text has more tokens than it may."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens")
        self.num_tokens = num_tokens


class Tokenizer:
    """Wraps `tokenizers.Tokenizer`. All methods are pure and safe to call from any thread."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.chat_template = chat_template
        self._tool_template = tool_template
        self._special_tokens = dict(special_tokens or {})
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_length = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        """The number of characters of the longest token: n tokens hold at most n times as many."""
        self._added = backend.get_added_tokens_decoder()
        self.added_token_ids = {token.content: id_ for id_, token in self._added.items()}
        """The ids of special and other added tokens, by their text."""
        self._byte_of_char = _byte_level_alphabet() if _is_byte_level(backend) else {}
        self.byte_texts = self._byte_texts()
        """Has the texts of tokens where a text is that of their bytes in a row, else None."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads a checkpoint's tokenizer. Raises `TokenizerError` naming the file and the cure."""
        try:
            folder = tokenizer_folder(Path(folder))
            return cls._read(folder)
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error
        except ChatTemplateError as error:
            raise TokenizerError(
                f"{folder}: {error}; copy the checkpoint's files again, or correct the template"
            ) from error

    @classmethod
    def _read(cls, folder: Path) -> Tokenizer:
        """Reads a folder with a tokenizer.json. Raises `TokenizerError`, `CheckpointError`,
        `ChatTemplateError`."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{file} does not exist; save the tokenizer in the checkpoint's folder "
                f"in the `tokenizers` format (tokenizer.json), or as tiktoken.model or tekken.json"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
            backend.encode(_FIRST_WORDS)
        except BaseException as error:
            # The library raises plain Exception, and panics where parts of a file do not fit.
            if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
                raise
            raise TokenizerError(
                f"{file} cannot be read: {error}; copy the checkpoint's files again"
            ) from error
        if _read_json(folder / "tokenizer_config.json").get("split_special_tokens") is True:
            backend.encode_special_tokens = True  # as ordinary text
        special = read_special_tokens(folder)
        sources = _chat_template_sources(folder)
        named = {name: ChatTemplate(text, special) for name, text in sources.items()}
        return cls(backend, named.get(_DEFAULT), named.get(_WITH_TOOLS), special)

    @classmethod
    def of_model(cls, model: ModelConfig) -> Tokenizer:
        """Returns the checkpoint's tokenizer, or a stand-in where weights are random and it has
        none. A template that the folder lacks may be one of ours. Raises `TokenizerError`."""
        if has_tokenizer(Path(model.path)) or model.load_format != "dummy":
            found = cls.from_folder(model.path)
            own = own_template(model.architecture)
            return found if own is None or found.chat_template else found.with_chat_template(own)
        return cls.stand_in(model.vocab_size)

    @classmethod
    def stand_in(cls, vocab_size: int) -> Tokenizer:
        """Returns a tokenizer with a word for each token; unknown words are t0. Chats are their
        contents in a row."""
        vocabulary = {f"t{i}": i for i in range(vocab_size)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return cls(backend, ChatTemplate(_STAND_IN_TEMPLATE, {}))

    def with_chat_template(self, source: str) -> Tokenizer:
        """Returns this tokenizer with another chat template for all chats. Raises
        `ChatTemplateError`."""
        template = ChatTemplate(source, self._special_tokens)
        return Tokenizer(self._backend, template, special_tokens=self._special_tokens)

    def to_json(self) -> str:
        """Returns the text of its tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the token ids of `text`. Other threads go on meanwhile: only the library's calls
        for batches let them.

        Raises:
            TooManyTokens: There are more than `max_tokens`.
            TypeError: `text` holds half a surrogate pair.
        """
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def encode_end(
        self, text: str, num_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the last `num_tokens` tokens of `text`. What the tokenizer puts around a text
        stays and counts. Raises TypeError for half a surrogate pair."""
        end = text[-(num_tokens * self.max_token_length + _CUT_MARGIN) :]
        [encoding] = self._backend.encode_batch_fast([end], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if len(ids) <= num_tokens:
            return ids
        around = encoding.special_tokens_mask
        num_front = around.index(0) if 0 in around else 0
        front = ids[: max(0, min(num_front, num_tokens - 1))]
        return [*front, *ids[len(ids) - num_tokens + len(front) :]]

    def encode_start(
        self, text: str, num_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the first `num_tokens` tokens of `text`; otherwise as `encode_end`."""
        start = text[: num_tokens * self.max_token_length + _CUT_MARGIN]
        [encoding] = self._backend.encode_batch_fast([start], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if len(ids) <= num_tokens:
            return ids
        around = encoding.special_tokens_mask[::-1]
        num_back = around.index(0) if 0 in around else 0
        num_front = max(1, num_tokens - num_back)
        return [*ids[:num_front], *ids[len(ids) - num_tokens + num_front :]]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without special tokens. Raises TypeError for half a
        surrogate pair."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Returns the text of `token_ids`; bytes that are no UTF-8 become U+FFFD. Some tokenizers
        put spaces between tokens: not between added ones, if `spaces_between_special_tokens` is
        false."""
        ids = list(token_ids)
        text = self._text(ids, skip_special_tokens)
        if spaces_between_special_tokens or skip_special_tokens:
            return text
        for i in range(len(ids) - 1, 0, -1):
            if ids[i - 1] in self._added and ids[i] in self._added:
                # From the end on, so that what comes before is still as the tokenizer wrote it.
                at = len(self._text(ids[:i], False))
                if text.startswith(" " + self._added[ids[i]].content, at):
                    text = text[:at] + text[at + 1 :]
        return text

    def _text(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Returns the text of tokens. Of many only the library's call for several texts lets other
        threads run meanwhile: the other one holds up the event loop."""
        if len(ids) <= _QUICKLY_DECODED:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    @property
    def template_sources(self) -> str:
        """Returns the text of all chat templates, which show how the model writes."""
        templates = (self.chat_template, self._tool_template)
        return "\n".join(template.source for template in templates if template)

    def chat_template_for(self, *, has_tools: bool) -> ChatTemplate:
        """Returns the checkpoint's template: of several named ones `tool_use` where there are
        tools. Raises `TokenizerError` when the checkpoint brings none."""
        template = (self._tool_template if has_tools else None) or self.chat_template
        if template is None:
            raise TokenizerError(
                "this checkpoint has no chat template; use /v1/completions, or add "
                "chat_template.jinja to its folder"
            )
        return template

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt of a chat without tools. Raises `ChatTemplateError`, and
        `TokenizerError` when the checkpoint brings no template."""
        return self.chat_template_for(has_tools=False).render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary spells it; empty for one that it does not have."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what this token adds to the text; a part of a character is possible."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._byte_of_char and all(char in self._byte_of_char for char in piece):
            return bytes(self._byte_of_char[char] for char in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def _byte_texts(self) -> ByteTexts | None:
        if not isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return None
        special = frozenset(id_ for id_, token in self._added.items() if token.special)
        return ByteTexts(self._decoded_bytes, special)

    def _decoded_bytes(self, token_id: int) -> bytes:
        """Returns what the byte-level decoder makes of a token, an added one too: bytes if all of
        its characters stand for bytes."""
        piece = self._backend.id_to_token(token_id) or ""
        try:
            return bytes(map(self._byte_of_char.__getitem__, piece))
        except KeyError:
            return piece.encode()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Says whether tokens are bytes. The decoder's pickled state is its JSON; no other way asks
    what it consists of."""
    decoder = backend.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character stands for. Byte-level BPE writes each byte as one
    printable character: printable bytes as themselves, the others as characters from U+0100 on, in
    order (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file, dict[str, Any]) if file.is_file() else {}


def _chat_template_sources(folder: Path) -> dict[str, str]:
    """Returns the chat templates by name. Files of their own win; a list in the configuration holds
    named ones. Raises `CheckpointError`."""
    found: dict[str, str] = {}
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        fields = read_json(file, _TemplateField) if file.is_file() else _TemplateField()
        if fields.chat_template is not None:
            found = fields.by_name()
            break
    for name in (_DEFAULT, _WITH_TOOLS):
        file = folder / _TEMPLATE_FILES[name]
        if file.is_file():
            found[name] = read_text(file)
    return {name: found[name] for name in (_DEFAULT, _WITH_TOOLS) if name in found}
