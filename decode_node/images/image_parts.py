"""Finds the images and videos of a chat, and puts them into its prompt.

messages ── `image_places` ──▶ (where, url) in order ── read, preprocessed ──▶ patches
prompt   ── the template writes one placeholder for each ── `expanded` ──▶ as many as it has tokens

A video becomes its pairs of frames, each with its tokens, and with the text that tells its time
where the model's family has such text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_node.images.videos.preprocess import VideoPixels
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.chat_messages import VideoPart
from edge.http.errors import BadRequest
from engine.images.image_input import ImagePixels, ImageSpan
from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import VisionSpec

Encode = Callable[[str], list[int]]
"""Makes tokens of a text, in which names of special tokens are these."""


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """An image or a video as a client sent it. `param` names the part of the body that it is."""

    param: str
    url: str
    is_video: bool = False


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with room for its images. `pixels`: one for each digest; `unexpanded`: the prompt
    with one placeholder for each image."""

    token_ids: list[int]
    spans: tuple[ImageSpan, ...] = ()
    pixels: tuple[ImagePixels, ...] = ()
    unexpanded: Sequence[int] = ()


NO_IMAGES = ImagePrompt([])


def image_places(body: ChatCompletionRequest) -> list[ImagePlace]:
    """Returns the images and videos of all messages, in order."""
    images = [part for message in body.messages for _, part in message.images()]
    return [
        ImagePlace(param, part.url, isinstance(part, VideoPart))
        for param, part in zip(body.image_params, images, strict=True)
    ]


def expanded(
    token_ids: list[int],
    images: Sequence[ImagePixels | VideoPixels],
    vision: VisionSpec,
    encode: Encode,
    param: str = "messages",
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Returns a prompt with each placeholder repeated for all tokens of its image or video, and
    where the images and pairs of frames are then. `param`: the part of the body that has them.
    Raises `BadRequest` unless there is a placeholder for each."""
    video = vision.video
    video_token = None if video is None else video.token_id
    places = [
        i for i, token in enumerate(token_ids) if token in (vision.image_token_id, video_token)
    ]
    wanted = [isinstance(image, VideoPixels) for image in images]
    if [token_ids[place] == video_token for place in places] != wanted:
        raise BadRequest(_misplaced(len(places), len(images), param), param=param)
    found: list[int] = []
    spans: list[ImageSpan] = []
    start = 0
    for place, image in zip(places, images, strict=True):
        found += token_ids[start:place]
        if isinstance(image, VideoPixels):
            assert video is not None
            tokens, pairs = _video_tokens(image, video, encode, len(found))
            found += tokens
            spans += pairs
        else:
            spans.append(vision.span(len(found), image))
            found += vision.tokens_of(image.rows, image.columns)
        start = place + 1
    found += token_ids[start:]
    return found, tuple(spans)


def _misplaced(num_places: int, num_images: int, param: str) -> str:
    """Returns why the images of a prompt cannot be put into it."""
    told = f"the prompt has {num_places} places for its {num_images} images and videos"
    if param != "messages":
        return f"{told}: it needs one placeholder for each"
    if num_places == num_images:
        told += ", in another order"
    return (
        f"{told}: the chat template moves or omits some, or a text has a placeholder's name in it"
    )


def _at(seconds: float, video: VideoSpec) -> str:
    """Returns what stands for a pair of frames."""
    whole = int(seconds)
    clock = f"{whole // 60:02}:{whole % 60:02}"
    return video.frame_text.format(time=seconds, whole=whole, clock=clock)


def _video_tokens(
    made: VideoPixels, video: VideoSpec, encode: Encode, offset: int
) -> tuple[list[int], list[ImageSpan]]:
    """Returns the tokens of a video in a prompt that has it from `offset` on, and where its pairs
    of frames are."""
    if video.frame_text:
        frames = video.gap.join(_at(seconds, video) for seconds in made.times)
        written = encode(video.opening + frames + video.closing)
    else:
        written = [video.frame_token_id] * len(made.times)
    if written.count(video.frame_token_id) != len(made.times):
        raise BadRequest(
            f"this model's tokenizer has no token {video.pad}, which its videos need",
            param="messages",
        )
    tokens: list[int] = []
    spans: list[ImageSpan] = []
    at_once = video.pairs_at_once
    for token in written:
        if token != video.frame_token_id:
            tokens.append(token)
            continue
        pair, place = made.pairs[len(spans) // at_once], len(spans) % at_once
        joins = not video.frame_text and bool(spans)
        time = int(len(spans) * made.step_s * video.ticks_per_second)
        size = pair.rows * pair.columns
        beside = min(at_once, len(made.times) - len(spans) + place) - 1
        spans.append(
            ImageSpan(
                offset + len(tokens),
                pair.rows,
                pair.columns,
                pair.digest,
                joins=joins,
                time=time,
                first=place * size,
                beside=beside * size,
            )
        )
        tokens += [token] * size
    return tokens, spans
