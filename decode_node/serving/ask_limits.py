"""The operator's bounds on what one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.protocol.generation_body import GenerationBody
from edge.http.errors import BadRequest
from engine.sampling_params import DEFAULT_MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class AskLimits:
    """Bounds the answers to one request, and the likely tokens told for each place."""

    max_choices: int = 64
    max_logprobs: int = DEFAULT_MAX_LOGPROBS

    def check(self, body: GenerationBody, num_prompts: int) -> None:
        """Raises `BadRequest` for too many answers or log probabilities."""
        n = body.num_choices
        if n < 1 or n * num_prompts > self.max_choices:
            raise BadRequest(
                f"n times the number of prompts must be 1 to {self.max_choices}, not "
                f"{n} times {num_prompts}",
                param="n",
            )
        if body.num_beams * num_prompts > self.max_choices:
            raise BadRequest(
                f"best_of times the number of prompts must be at most {self.max_choices}, not "
                f"{body.num_beams} times {num_prompts}",
                param="best_of",
            )
        for name, asked in (
            ("logprobs", body.wanted_logprobs),
            ("prompt_logprobs", body.prompt_logprobs),
        ):
            if asked is not None and not 0 <= asked <= self.max_logprobs:
                param = body.param_name(name)
                raise BadRequest(
                    f"{param} must be between 0 and {self.max_logprobs}, not {asked}", param=param
                )
