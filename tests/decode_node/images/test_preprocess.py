"""Patches are those of the reference processor, bit for bit, and what cannot be taken is named."""

from __future__ import annotations

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from decode_node.images.preprocess import ImageError, preprocess
from engine.images.vision_spec import PixelSpec
from engine.models.vision.tower import shade_table

SPEC = PixelSpec(patch_size=14, min_pixels=56 * 56, max_pixels=28 * 28 * 60)
LARGE = 10_000_000


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def picture(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    """Returns smooth shades with noise, so that every way of resizing differs."""
    numbers = np.random.default_rng(seed)
    small = numbers.integers(0, 256, (max(2, height // 9), max(2, width // 9), 4), dtype=np.uint8)
    image = Image.fromarray(small, "RGBA").resize((width, height), Image.Resampling.BILINEAR)
    return image.convert(mode)


def many() -> list[tuple[str, bytes]]:
    chance = random.Random(3)
    found = []
    modes = {"PNG": ["RGB", "RGBA", "L", "P", "LA", "1", "CMYK"], "JPEG": ["RGB", "L", "CMYK"]}
    for index in range(54):
        form = ("PNG", "JPEG", "WEBP")[index % 3]
        mode = chance.choice(modes.get(form, ["RGB", "RGBA"]))
        mode = "RGB" if form == "PNG" and mode == "CMYK" else mode
        size = chance.choice([(1, 1), (28, 28), (13, 200), (211, 14), (90, 91), (300, 160)])
        size = size if index % 4 == 0 else (chance.randint(3, 260), chance.randint(3, 260))
        image = picture(*size, index, mode)
        found.append((f"{form}-{mode}-{size}", encode(image, form)))
    return found


def test_patches_are_those_of_the_reference_processor() -> None:
    size = {"shortest_edge": SPEC.min_pixels, "longest_edge": SPEC.max_pixels}
    reference = Qwen2VLImageProcessorPil(size=size)
    shades = shade_table(SPEC).numpy()
    grids = set()
    for name, data in many():
        found = preprocess(data, SPEC, LARGE)
        opened = Image.open(io.BytesIO(data))
        expected = reference(images=[opened.convert("RGB")], return_tensors="np")
        patches = np.frombuffer(found.patches, np.uint8).reshape(-1, 3, 1, 14, 14)
        normal = shades[np.arange(3)[:, None, None, None], patches]
        whole = np.repeat(normal, 2, axis=2).reshape(len(patches), -1)
        assert np.array_equal(whole, expected["pixel_values"]), name
        assert [1, 2 * found.rows, 2 * found.columns] == expected["image_grid_thw"][0].tolist()
        grids.add((found.rows, found.columns))
    assert len(grids) > 20


def test_digests_tell_images_apart() -> None:
    images = [encode(picture(60, 60, seed), "PNG") for seed in (1, 2)]
    first, second = (preprocess(data, SPEC, LARGE) for data in images)
    assert first.digest != second.digest
    assert first == preprocess(images[0], SPEC, LARGE)
    again = encode(picture(60, 60, 1), "WEBP", lossless=True)
    assert preprocess(again, SPEC, LARGE).digest == first.digest


def test_turned_as_its_exif_says() -> None:
    image = picture(120, 56, 4)
    exif = Image.Exif()
    exif[0x0112] = 6
    found = preprocess(encode(image, "PNG", exif=exif), SPEC, LARGE)
    turned = preprocess(encode(image.rotate(-90, expand=True), "PNG"), SPEC, LARGE)
    assert found == turned


def _bomb() -> bytes:
    """Returns a PNG that says 60,000 x 60,000 and holds nothing."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    return start + struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 9) + b"IDAT" + bytes(9)


WHOLE = encode(picture(90, 90, 9), "PNG")
WRONG = [
    (b"", "no PNG, JPEG or WebP"),
    (b"GIF89a" + bytes(40), "no PNG, JPEG or WebP"),
    (encode(picture(20, 20, 1), "BMP"), "no PNG, JPEG or WebP"),
    (encode(picture(20, 20, 1), "TIFF"), "no PNG, JPEG or WebP"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no PNG, JPEG or WebP"),
    (WHOLE[: len(WHOLE) // 2], "cannot be decoded"),
    (WHOLE[:3000] + bytes(600) + WHOLE[3600:], "cannot be decoded"),
    (_bomb(), "60000 x 60000 pixels"),
    (encode(picture(201, 1, 1), "PNG"), "200 times"),
]


@pytest.mark.parametrize(("data", "words"), WRONG)
def test_what_cannot_be_taken_is_named(data: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        preprocess(data, SPEC, LARGE)


def test_any_bytes_are_an_image_or_refused() -> None:
    """Damages a whole image in many places: nothing but `ImageError` comes out."""
    chance = random.Random(1)
    for whole in (WHOLE, encode(picture(64, 64, 2), "JPEG"), encode(picture(64, 64, 2), "WEBP")):
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(chance.randint(1, 20)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            try:
                preprocess(bytes(data), SPEC, LARGE)
            except ImageError as error:
                assert 10 < len(str(error)) < 200
