"""The limits of one engine's vision encoder: what it computes in a step, what it keeps, and which
requests it can never serve."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.request import Request


class ImageLimits:
    """Fixed by the configuration.

    Attributes:
        has_encoder: This engine encodes images.
        budget: Tokens of images that one step encodes at most.
        largest: Tokens of one image at most.
        capacity: Tokens of images whose embeddings are held at most.
        step_tokens: Tokens of a step at most.
        are_whole: A step computes all tokens of an image, or none.
    """

    def __init__(self, config: EngineConfig) -> None:
        images, scheduler = config.images, config.scheduler
        self._vision = config.model.vision
        self.largest = largest_image(config)
        self.has_encoder = config.model.vision is not None and images.has_encoder
        self.are_whole = config.model.vision is not None and config.model.vision.sees_whole
        decodes = scheduler.max_num_seqs * config.decode_query_len
        self.step_tokens = scheduler.max_num_batched_tokens
        self._most_whole = self.step_tokens - decodes
        """A step has room for this many tokens of one image, whatever it decodes."""
        self._is_chunked = scheduler.enable_chunked_prefill
        wanted = images.encoder_budget or scheduler.max_num_batched_tokens
        self.budget = max(wanted, self.largest)
        self.capacity = max(images.cache_tokens or 4 * self.budget, self.budget)

    def refusal(self, request: Request) -> str:
        """Returns why the request's images can never be computed; empty when they can."""
        images = request.spec.images
        if not images:
            return ""
        if not self.has_encoder:
            params = request.kv_transfer_params
            return "" if params is not None and params.do_remote_prefill else NO_ENCODER
        if not self._is_chunked:
            return "images need chunked prefill; start the engine with --enable-chunked-prefill"
        if any(image.digest not in request.pixels for image in images):
            return "the pixels of an image of the prompt are missing; send the request again"
        assert self._vision is not None
        if not all(self._vision.is_of(image, request.pixels[image.digest]) for image in images):
            return "an image of the prompt has another size than its pixels; send the request again"
        largest = max(image.num_encoded for image in images)
        if largest > self.budget:
            return (
                f"an image of the prompt has {largest} tokens and the encoder here computes at "
                f"most {self.budget} in a step; send a smaller image, or give all nodes the same "
                f"--max-image-tokens"
            )
        if self.are_whole and max(image.num_tokens for image in images) > self._most_whole:
            return (
                f"this model computes each image at once, and a step has {self._most_whole} tokens "
                f"for it here; start the engine with a larger --max-num-batched-tokens"
            )
        return ""

    def is_stranded(self, request: Request, num_computed_tokens: int) -> bool:
        """Returns whether the request would have to be computed here from images that this engine
        cannot encode."""
        return not self.has_encoder and request.spec.has_images_behind(num_computed_tokens)


def largest_image(config: EngineConfig) -> int:
    """Returns the most tokens that are encoded at once, of one image or of pairs of frames that see
    each other; 0: the model sees none."""
    vision = config.model.vision
    if vision is None:
        return 0
    most = vision.pixels.limited(config.images.max_image_tokens).max_tokens
    if vision.video is not None and config.images.max_videos:
        most *= vision.video.pairs_at_once
    return min(most, config.model.max_model_len)


NO_ENCODER = (
    "the prompt has images and this node has no vision encoder; a prefill node must compute it, or "
    "start this node with --image-encoder"
)
