"""Says requests for tokens as completions, whose prompt is one list of ids."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr

from decode_node.protocol.bodies.bad_words import EncodeAll
from decode_node.protocol.completions import CompletionRequest
from edge.http.errors import BadRequest
from engine.contracts.sampling_params import SamplingParams
from engine.models.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults


class CompletionOfAnother(CompletionRequest):
    """A request of another API as the completion that it amounts to."""

    _image_urls: tuple[tuple[str, str], ...] = PrivateAttr(())

    @classmethod
    def with_images(
        cls, image_urls: tuple[tuple[str, str], ...], **fields: Any
    ) -> CompletionOfAnother:
        """Returns one whose prompt has a placeholder for each image."""
        body = cls.model_construct(**fields)
        body._image_urls = image_urls
        return body

    @property
    def image_urls(self) -> tuple[tuple[str, str], ...]:
        return self._image_urls

    @property
    def may_have_no_tokens(self) -> bool:
        return True

    def check_supported(self) -> None:
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs are not part of a stream; ask for the whole answer"
            raise BadRequest(message, param="prompt_logprobs")
        super().check_supported()

    def sampling(
        self, encode: EncodeAll, defaults: SamplingDefaults = NO_DEFAULTS
    ) -> SamplingParams:
        """Returns the same without the model's defaults: who trains on the tokens has to know how
        they were drawn. Raises `InvalidRequest`."""
        return super().sampling(encode)
