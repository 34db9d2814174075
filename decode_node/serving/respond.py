"""Responds to a request whose choices are prepared, with a body or a stream."""

from __future__ import annotations

from starlette.responses import Response

from decode_node.answer.answer import Answer, AnswerOptions
from decode_node.answer.choice import Choice
from decode_node.answer.journal import JournalWriter, Resume
from decode_node.answer.running.aborts import AbortableRuns, OpenAnswers
from decode_node.answer.sse import (
    EventStreamResponse,
    JournaledResponse,
    JsonResponse,
    Liveness,
)
from decode_node.disagg.prefill_headers import prefill_headers
from decode_node.disagg.proxy import DisaggProxy
from decode_node.metrics import DecodeMetrics
from decode_node.serving.read_request import ReadRequest
from decode_node.serving.request_context import RequestContext
from edge.http import headers as names
from edge.http.answers.load_report import load_headers


class Responder:
    """Has requests computed by `proxy`. `answers` knows those that are being given; `liveness`:
    how streams show that they live."""

    def __init__(
        self,
        proxy: DisaggProxy,
        answers: OpenAnswers,
        metrics: DecodeMetrics,
        liveness: Liveness,
    ) -> None:
        self._proxy = proxy
        self._answers = answers
        self._metrics = metrics
        self._liveness = liveness

    def response(
        self, read: ReadRequest, choices: list[Choice], context: RequestContext
    ) -> Response:
        """Returns what runs the choices once it is sent. Raises `Overloaded`."""
        self._proxy.check_room(len(choices))
        body, form, resume = read.body, read.form, context.resume
        if resume is not None:
            form.take_over(resume)
        journal = None
        if context.wants_journal:
            journal = _journal(resume, read, choices)
        options = AnswerOptions(
            include_usage=body.include_usage and not form.repeats,
            usage_sent=resume is not None and resume.is_usage_sent,
            wants_timeline=context.wants_timeline,
            wants_metrics=bool(body.include_metrics),
        )
        own = filter(None, (body.request_id, body.rid))
        known_as = {*own, context.request_id, form.id}
        early, is_aborted = context.early, context.is_aborted
        runs = AbortableRuns(self._proxy, known_as, early, is_aborted=is_aborted)
        answer = Answer(runs, self._answers, choices, form, self._metrics, journal, options)

        def headers() -> dict[str, str]:
            known = prefill_headers(choices[0].record)
            known |= load_headers(context.load_format, self._proxy)
            return known if journal is None else known | {names.JOURNAL: str(journal.first_number)}

        if journal is not None:
            return JournaledResponse(
                answer.stream if body.stream else answer.stream_body,
                form,
                headers,
                self._liveness,
                is_whole=not body.stream,
            )
        if body.stream:
            liveness = self._liveness.with_keepalives(context.wants_keepalives)
            return EventStreamResponse(answer.stream, form, headers, liveness)
        return JsonResponse(answer.body, form, headers)


def _journal(resume: Resume | None, read: ReadRequest, choices: list[Choice]) -> JournalWriter:
    keeps_logprobs = not read.body.stream
    if resume is not None:
        return JournalWriter(resume.num_entries, keeps_logprobs=keeps_logprobs)
    journal = JournalWriter(keeps_logprobs=keeps_logprobs)
    seeds = [choice.request.spec.sampling.seed for choice in choices]
    journal.start(read.form.created, seeds, read.prompt_digest)
    return journal
