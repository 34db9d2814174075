"""Sizes and patches of images are those of each family's reference processor, on odd sizes, and
within the limits that an operator sets."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from decode_node.images.fit import fitted
from decode_node.images.preprocess import MAX_ASPECT, preprocess
from engine.images.image_input import ImagePixels
from engine.images.vision_spec import PixelSpec
from engine.models.vision.tower import shade_table
from tests.decode_node.images.test_preprocess import encode, picture

AREA = PixelSpec(patch_size=14, min_pixels=56 * 56, max_pixels=28 * 28 * 60)
LONGEST = PixelSpec(patch_size=14, fit="longest", longest_edge=280)
SQUARE = PixelSpec(
    patch_size=14, merge_size=4, fit="square", longest_edge=112, resample="bilinear",
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
)  # fmt: skip
PATCHES = PixelSpec(patch_size=14, fit="patches", longest_edge=14 * 40, max_patches=300)
FILL = PixelSpec(
    patch_size=16, merge_size=3, fit="fill", most_tokens=70, mean=(0.5,) * 3, std=(0.5,) * 3
)  # fmt: skip
NEAREST = PixelSpec(patch_size=14, fit="nearest", most_tokens=60, resample="lanczos")
GLM = PixelSpec(patch_size=14, min_pixels=6272, max_pixels=47_040, keeps_token=True)
ODD = [
    (1, 200),
    (3, 599),
    (37, 53),
    (27, 27),
    (28, 560),
    (561, 29),
    (113, 112),
    (281, 280),
    (300, 7),
]


def whole(found: ImagePixels, pixels: PixelSpec) -> np.ndarray:
    """Returns the picture, [3, height, width] float32, as a tower has it."""
    merge, size = pixels.merge_size, pixels.patch_size
    patches = np.frombuffer(found.patches, np.uint8).reshape(-1, 3, size, size)
    normal = shade_table(pixels).numpy()[np.arange(3)[:, None, None], patches]
    cut = normal.reshape(found.rows, found.columns, merge, merge, 3, size, size)
    height, width = found.rows * pixels.unit, found.columns * pixels.unit
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, height, width)


def pixtral() -> Callable[[Image.Image], np.ndarray]:
    size = {"longest_edge": LONGEST.longest_edge}
    reference = PixtralImageProcessorPil(size=size, patch_size={"height": 28, "width": 28})
    return lambda image: reference(images=[image], return_tensors="np")["pixel_values"][0]


def gemma() -> Callable[[Image.Image], np.ndarray]:
    reference = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    return lambda image: reference(images=[image], return_tensors="np")["pixel_values"][0]


def gemma4() -> Callable[[Image.Image], np.ndarray]:
    reference = Gemma4ImageProcessorPil(max_soft_tokens=70)

    def made(image: Image.Image) -> np.ndarray:
        """Returns what the model makes of shades, [3, height, width]."""
        found = reference(images=[image], return_tensors="np")
        places = found["image_position_ids"][0]
        columns, rows = places.max(0) + 1
        patches = 2 * (found["pixel_values"][0][: rows * columns] - 0.5)
        cut = patches.reshape(rows, columns, 16, 16, 3)
        return cut.transpose(4, 0, 2, 1, 3).reshape(3, rows * 16, columns * 16)

    return made


@pytest.mark.parametrize(("pixels", "make"), [(LONGEST, pixtral), (SQUARE, gemma), (FILL, gemma4)])
def test_pictures_are_those_of_the_reference_processor(
    pixels: PixelSpec, make: Callable[[], Callable[[Image.Image], np.ndarray]]
) -> None:
    reference = make()
    for index, (width, height) in enumerate(ODD):
        image = picture(width, height, index)
        found = preprocess(encode(image, "PNG"), pixels, 10_000_000)
        assert np.array_equal(whole(found, pixels), reference(image)), (width, height)


def test_patches_of_glm_are_those_of_the_reference_processor() -> None:
    sizes = {"shortest_edge": 2 * GLM.min_pixels, "longest_edge": 2 * GLM.max_pixels}
    reference = Glm46VImageProcessorPil(size=sizes)
    shades = shade_table(GLM).numpy()
    for index, (width, height) in enumerate(ODD):
        image = picture(width, height, index)
        found = preprocess(encode(image, "PNG"), GLM, 10_000_000)
        expected = reference(images=[image], return_tensors="np")
        patches = np.frombuffer(found.patches, np.uint8).reshape(-1, 3, 1, 14, 14)
        normal = shades[np.arange(3)[:, None, None, None], patches]
        frames = np.repeat(normal, 2, axis=2).reshape(len(patches), -1)
        assert [1, 2 * found.rows, 2 * found.columns] == expected["image_grid_thw"][0].tolist()
        assert np.array_equal(frames, expected["pixel_values"]), (width, height)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((224, 224), (224, 224, 224, 224)),
        ((37, 53), (37, 53, 56, 56)),
        ((1, 1), (1, 1, 28, 28)),
        ((100, 7000), (100, 7000, 112, 7000)),
        ((8192, 256), (7168, 224, 7168, 224)),
        ((3591, 3591), (1795, 1795, 1820, 1820)),
    ],
)
def test_sizes_for_moonvit(size: tuple[int, int], expected: tuple[int, int, int, int]) -> None:
    """As `navit_resize` of transformers 5.24's processor for Kimi K2.5 has them, whose module needs
    torchvision."""
    pixels = PixelSpec(patch_size=14, fit="patches", longest_edge=7168, max_patches=16_384)
    assert fitted(*size, pixels) == expected


def test_sizes_for_muse() -> None:
    """As `smart_resize` of its processor in transformers 5.24 has them, which needs torchvision."""
    pixels = PixelSpec(patch_size=14, fit="nearest", most_tokens=4096)
    sizes = [(120, 90), (360, 640), (20, 300), (1080, 1920), (9, 300), (3000, 40), (4000, 6000)]
    found = [fitted(*size, pixels)[:2] for size in sizes]
    expected = [(112, 84), (364, 644), (28, 308), (1092, 1932), (28, 308), (3024, 56)]
    assert found == [*expected, (1456, 2184)]


def test_black_is_added_to_an_image_that_keeps_its_size() -> None:
    image = picture(53, 37, 3)
    found = preprocess(encode(image, "PNG"), PATCHES, 10_000_000)
    assert (found.rows, found.columns) == (2, 2)
    size = PATCHES.patch_size
    patches = np.frombuffer(found.patches, np.uint8).reshape(2, 2, 2, 2, 3, size, size)
    shown = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(56, 56, 3)
    with Image.open(io.BytesIO(encode(image, "PNG"))) as opened:
        assert np.array_equal(shown[:37, :53], np.asarray(opened))
    assert not shown[37:].any() and not shown[:, 53:].any()


@pytest.mark.parametrize("pixels", [AREA, LONGEST, SQUARE, PATCHES, GLM, FILL, NEAREST])
@pytest.mark.parametrize("limit", [0, 1, 17])
def test_sizes_are_whole_tokens_and_within_limits(pixels: PixelSpec, limit: int) -> None:
    chance = random.Random(limit)
    pixels = pixels.limited(limit)
    for _ in range(2000):
        height = chance.choice([chance.randint(1, 60), chance.randint(1, 6000)])
        width = chance.randint(-(-height // 20), height * 20)
        if max(height, width) > MAX_ASPECT * min(height, width):
            continue
        size = fitted(height, width, pixels)
        rows, rest = divmod(size.padded_height, pixels.unit)
        columns, more = divmod(size.padded_width, pixels.unit)
        assert rest == more == 0 and 0 < size.height <= size.padded_height
        assert 0 < size.width <= size.padded_width
        is_thin = pixels.fit == "area" and 1 in (rows, columns)
        assert 0 < rows * columns <= pixels.max_tokens or is_thin, (height, width, size)
