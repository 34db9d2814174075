"""Forms the bodies of /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from decode_node.answer.choice import Choice, ChoiceResult
from decode_node.answer.event import event
from decode_node.answer.format import FormatOptions, ResponseFormat
from decode_node.answer.logprobs import TokenTexts, generate_logprobs
from decode_node.observe.timeline import Timeline
from decode_node.protocol.tokens.generate import (
    GenerateChoice,
    GenerateLogprobs,
    Generation,
    Placeholder,
)
from decode_node.protocol.usage import PromptLogprobList, Usage
from engine.contracts.outputs import TokenLogprobs
from engine.frontend.output_processor import RequestOutput


class GenerateFormat(ResponseFormat):
    """Forms bodies of /inference/v1/generate. `has_text`: they tell text, too."""

    id_prefix = "generate-tokens"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: TokenTexts,
        options: FormatOptions,
        *,
        has_text: bool,
    ) -> None:
        super().__init__(request_id, model, tokenizer, options)
        self._has_text = has_text
        self._has_begun = False

    def events(
        self, choice: Choice, output: RequestOutput, timeline: Timeline | UnsetType = UNSET
    ) -> list[bytes]:
        if not (output.token_ids or output.finished or (self._has_text and output.text)):
            return []
        item = GenerateChoice(
            index=choice.index,
            text=output.text if self._has_text else UNSET,
            token_ids=output.token_ids,
            logprobs=self._logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        of = None if self._has_begun else choice
        self._has_begun = True
        return [event(self._encode([item], self._chunk_usage(choice), timeline, of))]

    def resume(self, choice: Choice, output: RequestOutput) -> None:
        self._has_begun = True

    def usage_events(self, usage: Usage, timeline: Timeline | UnsetType) -> list[bytes]:
        return [event(self._encode([], usage, timeline))]

    def body(
        self, results: Sequence[ChoiceResult], usage: Usage, timeline: Timeline | UnsetType
    ) -> bytes:
        first = results[0]
        items = [
            GenerateChoice(
                index=result.choice.index,
                text=result.text if self._has_text else UNSET,
                token_ids=result.token_ids,
                logprobs=self._logprobs(result.logprobs),
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
            )
            for result in results
        ]
        told = self._prompt_logprobs(first)
        return self._encode(items, usage, timeline, first.choice, told)

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> GenerateLogprobs | None:
        if not logprobs:
            return None
        are_named, has_text = self._options.has_named_logprobs, self._has_text
        return generate_logprobs(self._tokenizer, logprobs, are_named=are_named, has_text=has_text)

    def _placeholders(self, choice: Choice) -> dict[str, list[Placeholder]] | UnsetType:
        images = choice.request.spec.images
        if not images or not self._options.return_token_ids:
            return UNSET
        return {"image": [Placeholder(offset=one.offset, length=one.num_tokens) for one in images]}

    def _encode(
        self,
        choices: list[GenerateChoice],
        usage: Usage | UnsetType | None,
        timeline: Timeline | UnsetType,
        prompt_of: Choice | None = None,
        prompt_logprobs: PromptLogprobList | UnsetType = UNSET,
    ) -> bytes:
        """Returns a body, or a chunk. `prompt_of`: it tells the prompt of this choice."""
        return self._encoder.encode(
            Generation(
                request_id=self.id,
                created=self.created,
                model=self.model,
                output_mode="text" if self._has_text else "tokens",
                choices=choices,
                usage=usage,
                prompt_token_ids=UNSET if prompt_of is None else self._prompt_ids(prompt_of),
                mm_placeholders=UNSET if prompt_of is None else self._placeholders(prompt_of),
                prompt_logprobs=prompt_logprobs,
                timeline=timeline,
            )
        )
