"""Takes the outputs of one request from the engine, and keeps room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from decode_node.answer.choice import Choice
from decode_node.disagg.credits import Claim
from decode_node.disagg.proxy import OnEnd
from decode_node.observe.timeline import PrefillRecord
from edge.http.event_loop import long_work
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import RequestOutput

Take = Callable[[Choice, RequestOutput], None]
"""Takes the outputs of an answer, in the order of each choice. It does not wait."""


class Delivery:
    """Takes the outputs of one request from the engine, which has one choice or several, and gives
    them to `take`, having kept room for them.

    1. `begin`  the request has room
    2. `give`   each output, in the midst of the engine's call
    3. `until_ended` returns behind the last, or raises what went wrong; from then on nothing is
                given
    """

    def __init__(self, request: GenerationRequest, choices: Sequence[Choice], take: Take) -> None:
        names = request.choice_ids or (request.request_id,)
        self.prefill: PrefillRecord = choices[0].record.prefill
        for choice in choices:
            choice.record.prefill = self.prefill
        self._choices = dict(zip(names, enumerate(choices), strict=True))
        self._num_prompt_tokens = len(request.spec.prompt_token_ids)
        self._num_running = len(names)
        self._take = take
        self._has_ended = False
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, claim: Claim, on_end: OnEnd) -> None:
        self._claim = claim
        self._on_end = on_end

    def give(self, output: RequestOutput | Exception) -> None:
        """Takes an output in the midst of others': what goes wrong is this request's alone."""
        if self._has_ended:
            return
        try:
            if isinstance(output, Exception):
                raise output
            index, choice = self._choices[output.request_id]
            record = choice.record
            record.on_output(output)
            self._claim.grow_to(self._num_prompt_tokens + len(record.new_token_ids), index)
            if output.finish_reason is not None:
                self._claim.end_choice(index)
                self._on_end(record, output)
                self._num_running -= 1
            self._take(choice, choice.checked(output))
        except Exception as error:
            self._has_ended = True
            self._end.set_exception(error)
        else:
            if not self._num_running:
                self._has_ended = True
                self._end.set_result(None)

    async def until_ended(self) -> None:
        """Is awaited once, and returns when it is the turn of what follows an answer: its last
        token is with the client, those of others may not be. Raises what `give` has met."""
        try:
            await self._end
        finally:
            self._has_ended = True
            del self._end  # Its error holds the frames that it has passed, which hold this.
        await long_work.pause(is_begun=True)

    def end_unbegun(self) -> None:
        """Ends choices that have not ended, and of which nothing comes any more: with what another
        node gave of them, if that has not come yet."""
        self._has_ended = True
        for name, (_, choice) in self._choices.items():
            outputs: Iterable[RequestOutput]
            outputs = [RequestOutput(name, [], "", finish_reason="abort")]
            if choice.when_aborted is not None and not choice.record.num_output_tokens:
                outputs = choice.when_aborted()
            for output in outputs:
                if choice.record.finish_reason is None:
                    choice.record.on_output(output)
                    self._take(choice, choice.checked(output))
