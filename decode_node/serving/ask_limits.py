"""The operator's bounds on what one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.protocol.bodies.generation_body import GenerationBody
from edge.http.errors import BadRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import DEFAULT_MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class AskLimits:
    """Bounds the answers to one request, and the likely tokens returned for each place."""

    max_choices: int = 64
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    max_answer_logprobs: int = 1 << 22

    def check(self, body: GenerationBody, num_prompts: int) -> None:
        """Raises `BadRequest` for too many answers or log probabilities."""
        for param, count in (("n", body.num_choices), ("best_of", body.num_beams)):
            if not 1 <= count <= self.max_choices:
                message = f"{param} must be 1 to {self.max_choices} (--max-choices), not {count}"
                raise BadRequest(message, param=param)
            if count * num_prompts > self.max_choices:
                raise self._too_many(param, count, num_prompts)
        for name, asked in (
            ("logprobs", body.wanted_logprobs),
            ("prompt_logprobs", body.prompt_logprobs),
        ):
            if asked is not None and not 0 <= asked <= self.max_logprobs:
                param = body.param_name(name)
                raise BadRequest(
                    f"{param} must be between 0 and {self.max_logprobs}, not {asked}", param=param
                )

    def _too_many(self, param: str, count: int, num_prompts: int) -> BadRequest:
        """Returns the refusal of too many prompts. `param` is the field with `count`, the answers
        to each."""
        limit = f"one request has {self.max_choices} answers at most (--max-choices)"
        if count == 1:
            return BadRequest(f"prompt has {num_prompts} prompts, and {limit}", param="prompt")
        message = f"{param} is {count} for each of {num_prompts} prompts, and {limit}"
        return BadRequest(message, param=param)

    def check_answer(self, body: GenerationBody, spec: RequestSpec, num_prompts: int) -> None:
        """Raises `BadRequest` for an answer that would have too many log probabilities as a whole,
        if it became as long as it may. A stream has none of them for long."""
        asked, of_prompt = spec.sampling.logprobs, spec.sampling.prompt_logprobs
        if body.stream or (asked is None and of_prompt is None):
            return
        count = 0 if asked is None else spec.sampling.max_tokens * (asked + 1)
        if of_prompt is not None:
            count += spec.num_own_prompt_tokens * (of_prompt + 1)
        count *= body.num_choices * num_prompts
        if count > self.max_answer_logprobs:
            param = body.param_name("prompt_logprobs" if asked is None else "logprobs")
            raise BadRequest(
                f"{param}: the answer may have {count} log probabilities, for all tokens of all "
                f"answers together, and one answer has {self.max_answer_logprobs} at most; ask "
                f"for a stream, or lower {param}, max_tokens or n",
                param=param,
            )
