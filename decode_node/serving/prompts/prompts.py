"""Turns what clients send into tokens: texts, token ids and chats. Only here is tokenised."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from decode_node.chat_templates.control_tokens import MARK
from decode_node.protocol.bodies.generation_body import GenerationBody, too_long
from decode_node.protocol.bodies.kept_part import KeptPart
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.tools import ToolUse
from decode_node.protocol.completions import CompletionRequest
from decode_node.serving.prompts.chat_prompt import RENDER_S, TOO_COSTLY, ChatPrompt
from decode_node.serving.prompts.long_texts import VERY_LONG, LongTexts
from decode_node.serving.prompts.recent_turns import RecentTurns
from decode_node.serving.prompts.required_prefix import RequiredPrefix, common_end, kept_tokens
from decode_node.serving.prompts.system_turns import system_first, without_billing_line
from decode_node.serving.prompts.unseen_images import with_texts
from edge.http.errors import BadRequest
from edge.http.event_loop import long_work
from engine.config import ModelConfig
from engine.contracts.errors import CONTEXT_EXCEEDED, InvalidRequest
from engine.frontend.input_processor import check_token_ids
from engine.frontend.tokenizer import Tokenizer, TooManyTokens

_QUICK_S = 0.03
"""Seconds of processor time that rendering may take in the event loop."""
_CUT_CHARACTERS = 16
"""Characters at the end of a cut text that may be other ones in the whole."""


class Prompts:
    """Forms prompts for one model. `is_long`: the body is long, and what is done to all of it
    happens beside the event loop. `sanitizes`: control tokens that users and tools write in chats
    are text. `moves_system_turns`: system turns come first, where the API has them later.
    `cuts_answers`: an answer may get less room than it asks for. `says_images`: a text stands where
    an image was."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        trusts_templates: bool = False,
        sanitizes: bool = False,
        moves_system_turns: bool = True,
        cuts_answers: bool = False,
        says_images: bool = False,
    ) -> None:
        self._max_tokens = model.max_model_len
        self._vocab_size = model.vocab_size
        self._end_ids = frozenset(model.eos_token_ids)
        self._tokenizer = tokenizer
        self._sanitizes = sanitizes
        self._long_texts = LongTexts()
        self._moves_system_turns = moves_system_turns
        self._cuts_answers = cuts_answers
        self._says_images = says_images
        self._chat_prompt = ChatPrompt(
            tokenizer,
            trusts_templates=trusts_templates,
            sanitizes=sanitizes,
            vision=model.vision,
        )

    async def of_texts(
        self, body: CompletionRequest, *, is_long: bool
    ) -> tuple[list[list[int]], list[str]]:
        """Returns the tokens of each prompt, and each as text, empty unless the answer repeats it.
        Raises `BadRequest`."""
        keep = body.kept_part(self._max_tokens, self._room_for_answer(body))
        prompts = await long_work.run(is_long, partial(self._given, body, keep))
        with_special = body.add_special_tokens is not False
        tokens: list[list[int]] = []
        echoes: list[str] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = await self.encode(
                    prompt, "prompt", keep, is_long=is_long, add_special_tokens=with_special
                )
            else:
                ids = prompt
            tokens.append(ids)
            is_cut = keep is not None and len(ids) == keep.num_tokens
            echo = partial(self._echo, prompt, ids, is_cut=is_cut)
            echoes.append(await long_work.run(is_long, echo) if body.echo else "")
        return tokens, echoes

    def as_read(self, body: ChatCompletionRequest) -> ChatCompletionRequest:
        """Returns a chat with the turns that its template gets."""
        messages = with_texts(body.messages) if self._says_images else body.messages
        messages = without_billing_line(messages)
        if self._moves_system_turns and body.moves_system_turns:
            messages = system_first(messages)
        if messages is body.messages:
            return body
        return body.model_copy(update={"messages": messages})

    async def of_chat(
        self, body: ChatCompletionRequest, tool_use: ToolUse, *, is_long: bool
    ) -> tuple[str, list[int]]:
        """Returns the text of a chat's prompt, and its tokens. Raises `BadRequest`."""
        body = self.as_read(body)
        try:
            return await self._of_chat(body, tool_use, is_long=is_long)
        except BadRequest as error:
            turns = RecentTurns(body.messages)
            if error.code != CONTEXT_EXCEEDED or not body.drops_turns or not turns.num_turns:
                raise
        return await self._of_recent(body, turns, tool_use, is_long=is_long)

    async def _of_recent(
        self, body: ChatCompletionRequest, turns: RecentTurns, tool_use: ToolUse, *, is_long: bool
    ) -> tuple[str, list[int]]:
        """Returns the same without as few of the oldest turns as can be. Each prompt that it makes
        halves what is left to try. Raises `BadRequest`."""
        few, most = 1, turns.num_turns
        while few < most:
            middle = (few + most) // 2
            try:
                shorter = body.model_copy(update={"messages": turns.without(middle)})
                await self._of_chat(shorter, tool_use, is_long=is_long)
                most = middle
            except BadRequest as error:
                if error.code != CONTEXT_EXCEEDED:
                    raise
                few = middle + 1
        shorter = body.model_copy(update={"messages": turns.without(most)})
        return await self._of_chat(shorter, tool_use, is_long=is_long)

    async def _of_chat(
        self, body: ChatCompletionRequest, tool_use: ToolUse, *, is_long: bool
    ) -> tuple[str, list[int]]:
        room = self._room_for_answer(body)
        keep = body.kept_part(self._max_tokens, room)
        text = await self.render(body, tool_use, is_long=is_long)
        tokens = await self.chat_tokens(body, tool_use, text, keep, is_long=is_long)
        if body.drops_turns and len(tokens) + room > self._max_tokens:
            raise too_long(self._max_tokens, f"{len(tokens)} tokens", "messages")
        return text, tokens

    async def chat_tokens(
        self,
        body: ChatCompletionRequest,
        tool_use: ToolUse,
        text: str,
        keep: KeptPart | None,
        *,
        is_long: bool,
    ) -> list[int]:
        """Returns the tokens of a chat whose prompt is `text`: as many as the context has, or only
        those to `keep`. Raises `BadRequest`, `Overloaded`."""
        read = partial(RequiredPrefix.of, body, self._vocab_size)
        prefix = await long_work.run(is_long, read)
        if prefix is not None:
            tokens = await self._behind_prefix(prefix, body, tool_use, text, is_long=is_long)
        else:
            kept, rest = await long_work.run(is_long, partial(self._kept_tokens, body, text))
            if not kept:
                # A rendered chat has its special tokens written out.
                with_special = bool(body.add_special_tokens)
                return await self.encode(
                    text, "messages", keep, is_long=is_long, add_special_tokens=with_special
                )
            tokens = kept + await self.encode(
                rest, "messages", is_long=is_long, add_special_tokens=False
            )
        if keep is None and len(tokens) > self._max_tokens:
            raise too_long(self._max_tokens, f"{len(tokens)} tokens", "messages")
        return tokens

    def _kept_tokens(self, body: ChatCompletionRequest, text: str) -> tuple[list[int], str]:
        """Returns the tokens that answers bring along, if the prompt begins with their text, and
        what follows it. Of more tokens than the context has only these are read. Raises
        `BadRequest`."""
        if body.add_special_tokens or body.truncate_prompt_tokens is not None or body.image_params:
            return [], text
        kept = kept_tokens(body.messages, self._vocab_size)
        said = self._tokenizer.decode(kept[: self._max_tokens], skip_special_tokens=False)
        if len(kept) <= self._max_tokens:
            return (kept, text[len(said) :]) if text.startswith(said) else ([], text)
        # What follows may change how the cut ends.
        if text.startswith(said[:-_CUT_CHARACTERS]):
            raise too_long(self._max_tokens, f"{len(kept)} tokens", "messages")
        return [], text

    async def _behind_prefix(
        self,
        prefix: RequiredPrefix,
        body: ChatCompletionRequest,
        tool_use: ToolUse,
        text: str,
        *,
        is_long: bool,
    ) -> list[int]:
        self._chat_prompt.check_order(body, tool_use, prefix.at)
        other = await self.render(prefix.another(body), tool_use, is_long=is_long)
        rest = await self.encode(
            common_end(text, other), "messages", is_long=is_long, add_special_tokens=False
        )
        has_calls, closes = bool(body.messages[prefix.at].tool_calls), False
        is_marker = bool(rest) and rest[0] in self._tokenizer.added_token_ids.values()
        if is_marker and not has_calls and prefix.may_end_otherwise(rest, self._end_ids):
            ended = prefix.until_answer(body)
            texts = [
                await self.render(one, tool_use, is_long=is_long)
                for one in (ended, prefix.another(ended))
            ]
            closes = bool(common_end(*texts).strip())
        return prefix.before(rest, self._end_ids, has_calls=has_calls, closes=closes)

    def _room_for_answer(self, body: GenerationBody) -> int:
        """Returns the tokens of the context that a prompt leaves to the answer where it is cut: all
        that it asks for, but no more than half of the context if it may get less."""
        asked = body.wanted_max_tokens or 1
        return min(asked, self._max_tokens // 2) if self._cuts_answers else asked

    async def render(self, body: ChatCompletionRequest, tool_use: ToolUse, *, is_long: bool) -> str:
        """Returns the text of a chat's prompt. A short request of which its template makes much is
        rendered once more, beside the event loop. Raises `BadRequest`."""
        render = partial(self._chat_prompt.render, body, tool_use)
        if not is_long and body.chat_template is None:
            try:
                return render(_QUICK_S)
            except BadRequest as error:
                if error.code != TOO_COSTLY:
                    raise
        return await long_work.run(True, partial(render, RENDER_S))

    async def encode(
        self,
        text: str,
        param: str,
        keep: KeptPart | None = None,
        *,
        is_long: bool,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Returns the tokens of `text`, which came in the field `param`: only those to `keep`,
        if that is given. Raises `BadRequest`, `Overloaded`."""
        if keep is None:
            self._check_length(text, param)
        if self._sanitizes and MARK in text:
            encode = partial(self._encode_pieces, text, keep)
        elif keep is None:
            encode = partial(self._tokenizer.encode, text, max_tokens=self._max_tokens)
        else:
            encode_part = (
                self._tokenizer.encode_start if keep.is_front else self._tokenizer.encode_end
            )
            encode = partial(encode_part, text, keep.num_tokens)
        encode = partial(encode, add_special_tokens=add_special_tokens)
        try:
            if not is_long and len(text) <= long_work.LONG_BODY:
                return encode()
            if len(text) > VERY_LONG:
                return await self._long_texts.run(len(text), encode)
            # Takes long and lets other threads go on, so that each has its own.
            return await asyncio.to_thread(encode)
        except TooManyTokens as error:
            raise too_long(self._max_tokens, f"{error.num_tokens} tokens", param) from None
        except TypeError:
            raise BadRequest("the text holds half a surrogate pair", param=param) from None

    def _encode_pieces(
        self, text: str, keep: KeptPart | None, *, add_special_tokens: bool
    ) -> list[int]:
        """Returns the tokens of a text whose pieces between marks are tokenised alone. Raises
        `TooManyTokens`."""
        first, *others = text.split(MARK)
        ids = self._tokenizer.encode(first, add_special_tokens=add_special_tokens)
        for part in self._tokenizer.encode_all(others):
            ids += part
        if keep is not None:
            return ids[: keep.num_tokens] if keep.is_front else ids[-keep.num_tokens :]
        if len(ids) > self._max_tokens:
            raise TooManyTokens(len(ids))
        return ids

    def _given(self, body: CompletionRequest, keep: KeptPart | None) -> list[str | list[int]]:
        """Returns the prompts as the client wrote them. Raises `BadRequest`."""
        prompts = body.prompts(self._max_tokens, keep)
        try:
            for prompt in prompts:
                if isinstance(prompt, list):
                    check_token_ids(prompt, self._vocab_size)
        except InvalidRequest as error:
            raise BadRequest(error.message, param=error.param, code=error.code) from None
        return prompts

    def _echo(self, prompt: str | list[int], token_ids: list[int], *, is_cut: bool) -> str:
        """Returns the text of a prompt. Token ids show their special tokens, because the client
        sent them; those of a text are the tokenizer's."""
        if isinstance(prompt, str) and not is_cut:
            return prompt
        return self._tokenizer.decode(token_ids, skip_special_tokens=isinstance(prompt, str))

    def _check_length(self, text: str, param: str) -> None:
        """Refuses a text that cannot fit for its length, before seconds are spent on it."""
        context, longest = self._max_tokens, self._tokenizer.max_token_length
        if len(text) > context * longest:
            raise too_long(context, f"at least {math.ceil(len(text) / longest)} tokens", param)
