"""Turns what clients send into tokens: texts, token ids and chats. Only here is tokenised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from decode_node.protocol.chat import ChatCompletionRequest
from decode_node.protocol.generation_body import too_long
from decode_node.protocol.tools import ToolUse
from decode_node.serving.chat_prompt import ChatPrompt
from edge.http import long_work
from edge.http.errors import BadRequest
from engine.config import ModelConfig
from engine.frontend.tokenizer import Tokenizer, TooManyTokens


class Prompts:
    """Forms prompts for one model. `is_long`: the body is long, and what is done to all of it
    happens beside the event loop."""

    def __init__(
        self, model: ModelConfig, tokenizer: Tokenizer, *, trusts_templates: bool = False
    ) -> None:
        self._max_tokens = model.max_model_len
        self._tokenizer = tokenizer
        self._chat_prompt = ChatPrompt(tokenizer, trusts_templates=trusts_templates)

    async def of_texts(
        self, prompts: Sequence[str | list[int]], *, is_long: bool
    ) -> list[list[int]]:
        """Returns the tokens of each prompt. Raises `BadRequest`."""
        return [
            await self.encode(p, is_long=is_long, param="prompt") if isinstance(p, str) else p
            for p in prompts
        ]

    async def of_chat(
        self, body: ChatCompletionRequest, tool_use: ToolUse, *, is_long: bool
    ) -> tuple[str, list[int]]:
        """Returns the text of a chat's prompt, and its tokens. Raises `BadRequest`."""
        text = await long_work.run(is_long, partial(self._chat_prompt.render, body, tool_use))
        # A rendered chat has its special tokens written out.
        encode = partial(self.encode, is_long=is_long, param="messages", add_special_tokens=False)
        return text, await encode(text)

    async def encode(
        self, text: str, *, is_long: bool, param: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the tokens of `text`, which came in the field `param`. Raises `BadRequest`."""
        self._check_length(text, param)
        encode = partial(
            self._tokenizer.encode,
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=self._max_tokens,
        )
        try:
            if not is_long and len(text) <= long_work.LONG_BODY:
                return encode()
            # Takes seconds and lets other threads go on, so that each has its own.
            return await asyncio.to_thread(encode)
        except TooManyTokens as error:
            raise too_long(self._max_tokens, error.num_tokens, param) from None
        except TypeError:
            raise BadRequest("the text holds half a surrogate pair", param=param) from None

    async def echo(self, prompt: str | list[int], *, is_long: bool) -> str:
        """Returns the text of a prompt, for an answer that repeats it."""
        if isinstance(prompt, str):
            return prompt
        return await long_work.run(is_long, partial(self._tokenizer.decode, prompt))

    def _check_length(self, text: str, param: str) -> None:
        """Refuses a text that cannot fit for its length, before seconds are spent on it."""
        context = self._max_tokens
        if len(text) > context * self._tokenizer.max_token_length:
            raise BadRequest(
                f"this model's context is {context} tokens and the prompt has "
                f"{len(text)} characters, which is far more; shorten it",
                param=param,
                code="context_length_exceeded",
            )
