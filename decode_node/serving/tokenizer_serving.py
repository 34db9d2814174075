"""Answers what clients ask the tokenizer itself. No engine is involved."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from decode_node.protocol.bodies.kept_part import KeptPart
from decode_node.protocol.messages.messages import CountTokensRequest
from decode_node.protocol.responses.responses import ResponsesRequest
from decode_node.protocol.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from decode_node.serving.served_model import ServedModel
from edge.http.errors import BadRequest
from edge.http.event_loop import long_work
from engine.models.vocabularies.files import tokenizer_folder

_CONFIG_FILE = "tokenizer_config.json"
_USUAL_CLASS = "PreTrainedTokenizerFast"

_ALL = 1 << 40
"""More tokens than any text has."""
_LONGEST_TEXT = 1 << 20
_CHARACTERS_A_TOKEN = 8
"""Texts longer than the context can be tokenised, too, but not all that a body may hold."""


class TokenizerServing:
    """Serves one model's tokenizer. `is_long`: the body is long, and what is done to all of it
    happens beside the event loop; `model` is what a router calls the model, if it says so."""

    def __init__(self, model: ServedModel) -> None:
        self._served = model
        self._model = model.config
        self._tokenizer = model.tokenizer
        self._prompts = model.prompts
        self._images = model.images

    async def tokenize(
        self, body: TokenizeRequest, *, is_long: bool, model: str = ""
    ) -> TokenizeAnswer:
        """Returns the tokens that a prompt or a chat would have. Raises `HttpError`."""
        self._served.check(model or body.model)
        body.check_supported()
        ids = await self._encode(body, is_long=is_long)
        strings = partial(self._tokenizer.token_strings, ids)
        return TokenizeAnswer(
            count=len(ids),
            max_model_len=self._model.max_model_len,
            tokens=ids,
            token_strs=await long_work.run(is_long, strings) if body.return_token_strs else None,
        )

    async def _encode(self, body: TokenizeRequest, *, is_long: bool) -> list[int]:
        """Returns all tokens, of a text longer than the context as well. Raises `BadRequest`."""
        text, param, chat = body.prompt, "prompt", None
        images = await self._images.read(body)
        if text is None:
            chat = self._prompts.as_read(body)
            text = await self._prompts.render(chat, body.tool_use(), is_long=is_long)
            param = "messages"
        longest = max(_LONGEST_TEXT, _CHARACTERS_A_TOKEN * self._model.max_model_len)
        if len(text) > longest:
            raise BadRequest(
                f"the text has {len(text)} characters, and at most {longest} are tokenised; send "
                f"it in parts",
                param=param,
            )
        keep = KeptPart(_ALL)
        if chat is not None:
            use = body.tool_use()
            ids = await self._prompts.chat_tokens(chat, use, text, keep, is_long=is_long)
        else:
            with_special = body.add_special_tokens is not False
            ids = await self._prompts.encode(
                text, param, keep, is_long=is_long, add_special_tokens=with_special
            )
        return self._images.with_images(body, ids, images).token_ids

    async def count(
        self, body: CountTokensRequest | ResponsesRequest, *, is_long: bool, model: str = ""
    ) -> int:
        """Returns the number of tokens that the prompt of a request would have. Raises
        `HttpError`."""
        with body.named_fields():
            chat = await long_work.run(is_long, body.to_chat)
            self._served.check(model or body.model)
            images = await self._images.read(chat)
            _, tokens = await self._prompts.of_chat(chat, chat.tool_use(), is_long=is_long)
            return len(self._images.with_images(chat, tokens, images).token_ids)

    async def detokenize(
        self, body: DetokenizeRequest, *, is_long: bool, model: str = ""
    ) -> DetokenizeAnswer:
        """Returns the text of tokens, special ones included. Raises `HttpError`."""
        self._served.check(model or body.model)
        ids, most = body.tokens, self._model.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < most:
            raise BadRequest(f"tokens must be 0 to {most - 1}", param="tokens")
        decode = partial(self._tokenizer.decode, ids, skip_special_tokens=False)
        return DetokenizeAnswer(prompt=await long_work.run(is_long, decode))

    def info(self) -> dict[str, Any]:
        """Returns the checkpoint's tokenizer configuration, with its class and chat template."""
        path = tokenizer_folder(Path(self._model.path)) / _CONFIG_FILE
        found: dict[str, Any] = {}
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content if isinstance(content, dict) else {}
        found.setdefault("tokenizer_class", _USUAL_CLASS)
        if template := self._tokenizer.chat_template:
            found.setdefault("chat_template", template.source)
        return found
