"""Reads what a checkpoint says of its vision tower, and of how images are prepared.

preprocessor_config.json          how images are prepared
video_preprocessor_config.json    how videos are, where not as images
processor_config.json             both, under `image_processor` and `video_processor`, as
                                  transformers 5 writes it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.images.vision_spec import PixelSpec, Resample
from engine.models.config.json_file import read_json
from engine.models.specs.base import UnsupportedField

_Section = TypeVar("_Section")
_SHADE = 1 / 255
RESAMPLES: dict[Resample, int] = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
"""Ways of resizing, as Pillow numbers them."""


class Size(msgspec.Struct, frozen=True):
    """`size` of a processor: what a family has of it."""

    shortest_edge: int | None = None
    longest_edge: int | None = None
    height: int | None = None
    width: int | None = None
    max_height: int | None = None
    max_width: int | None = None


class Processor(msgspec.Struct):
    """How images are prepared. None: as the family has it.

    Attributes:
        size: MiniMax-M3's lists two numbers, which nothing reads.
        media_proc_cfg: All of it, in Kimi's own form.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_patches: int | None = None
    size: Size | list[int] = Size()
    rescale_factor: float = _SHADE
    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[float, float, float] | None = None
    resample: int | None = None
    do_pan_and_scan: bool | None = None
    max_soft_tokens: int | None = None
    max_image_tokens: int | None = None
    pooling_kernel_size: int | None = None

    @property
    def sides(self) -> Size:
        """Returns `size` where it has names."""
        return self.size if isinstance(self.size, Size) else Size()

    media_proc_cfg: dict[str, Any] = {}


class VideoProcessor(Processor):
    """How videos are prepared. None: as the family has it, or images are."""

    patch_size: int | None = None
    merge_size: int | None = None
    temporal_patch_size: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_duration: int | None = None
    cap_pixels_per_frame: bool | None = None
    processor_class: str | None = None
    video_processor_type: str | None = None
    max_video_frame_tokens: int | None = None
    vision_segment_max_frames: int | None = None
    frame_timestamp_format: str | None = None


class _Processors(msgspec.Struct):
    image_processor: Processor = msgspec.field(default_factory=Processor)
    video_processor: VideoProcessor | None = None
    processor_class: str | None = None


class Rope(msgspec.Struct):
    """`rope_parameters` of a tower."""

    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True)
class TextSizes:
    """The decoder behind a tower.

    Attributes:
        head_dim, rotary_dim: Numbers of a head, and how many of them turn.
    """

    hidden_size: int
    head_dim: int
    rotary_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class TowerFile:
    """A checkpoint with a tower. `whole`: what its config.json says."""

    folder: Path
    architecture: str
    whole: Mapping[str, Any]
    text: TextSizes

    def section(self, kind: type[_Section], published: Mapping[str, str] | None = None) -> _Section:
        """Returns `vision_config`. Raises `UnsupportedField`.

        Args:
            published: Names that a checkpoint may have for fields of `kind`.
        """
        names = published or {}
        said = {names.get(name, name): value for name, value in self.whole["vision_config"].items()}
        found = self.convert("vision_config", said, kind)
        side = getattr(found, "patch_size", None)
        refuse({"patch_size": side is not None and side < 1}, found)
        return found

    def convert(self, field: str, said: Any, kind: type[_Section]) -> _Section:
        """Returns a part of config.json. Raises `UnsupportedField`."""
        try:
            return msgspec.convert(said, kind)
        except msgspec.ValidationError as error:
            raise UnsupportedField(field, f"a vision tower of which {error}") from error

    def number(self, name: str, default: int) -> int:
        """Returns a field of the whole model. Raises `UnsupportedField`."""
        found = self.whole.get(name)
        return default if found is None else self.convert(name, found, int)

    def processor(self) -> Processor:
        """Returns how images are prepared. Raises `CheckpointError`, `UnsupportedField`."""
        path = self.folder / "preprocessor_config.json"
        if path.is_file():
            said = read_json(path, Processor)
        elif (path := self.folder / "processor_config.json").is_file():
            said = read_json(path, _Processors).image_processor
        else:
            said = Processor()
        if said.rescale_factor != _SHADE:
            raise UnsupportedField("rescale_factor", f"shades of {said.rescale_factor}")
        return said

    def video_processor(self) -> VideoProcessor:
        """Returns how videos are prepared: as images are, where no file says more. Raises
        `CheckpointError`."""
        both = self.folder / "processor_config.json"
        if both.is_file():
            processors = read_json(both, _Processors)
            if (said := processors.video_processor) is not None:
                said.processor_class = said.processor_class or processors.processor_class
                return said
        for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
            if (path := self.folder / name).is_file():
                return read_json(path, VideoProcessor)
        return VideoProcessor()

    def shades(self, said: Processor, pixels: PixelSpec) -> PixelSpec:
        """Returns `pixels` with the processor's shades and way of resizing. Raises
        `UnsupportedField`."""
        names: dict[int | None, Resample] = {None: pixels.resample}
        names |= {number: name for name, number in RESAMPLES.items()}
        if said.resample not in names:
            raise UnsupportedField("resample", f"images resized by Pillow's {said.resample}")
        return msgspec.structs.replace(
            pixels,
            mean=said.image_mean or pixels.mean,
            std=said.image_std or pixels.std,
            resample=names[said.resample],
        )


def refuse(faults: Mapping[str, bool], section: Any) -> None:
    """Raises `UnsupportedField` for the first field of `vision_config` that is a fault."""
    for name, is_wrong in faults.items():
        if is_wrong:
            value = getattr(section, name)
            raise UnsupportedField(f"vision_config.{name}", f"a vision tower with {value!r}")


def is_uneven(size: int, parts: int) -> bool:
    """Returns whether a size cannot be cut into this many equal parts."""
    return parts < 1 or size % parts != 0


def is_odd_head(hidden_size: int, num_heads: int) -> bool:
    """Returns whether heads cannot turn by rows and columns alike."""
    return is_uneven(hidden_size, 4 * num_heads)


def token_ids(folder: Path, texts: tuple[str, str], default: tuple[int, int]) -> tuple[int, int]:
    """Returns the ids of two special tokens. `default`: where the tokenizer's file is silent."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return default
    added = read_json(path, _Tokens).added_tokens_decoder
    found = {token.content: int(index) for index, token in added.items()}
    first, second = (found.get(text, index) for text, index in zip(texts, default, strict=True))
    return first, second


class _Token(msgspec.Struct):
    content: str


class _Tokens(msgspec.Struct):
    added_tokens_decoder: dict[str, _Token] = {}
