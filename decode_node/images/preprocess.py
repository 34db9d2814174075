"""Makes of an encoded image what a vision tower is given. Pure: bytes in, patches out.

    1. format, by its first bytes     PNG, JPEG, WebP; of a moving one the first picture
    2. size, before it is decoded     pixels and sides
    3. decoded, turned as EXIF says, made RGB
    4. resized                        both sides multiples of a token's (`decode_node.images.fit`)
    5. cut into patches               those of a token together

The same steps, and the same rounding, as the reference processor of transformers.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from decode_node.images.fit import fitted
from engine.images.image_input import ImagePixels, image_digest
from engine.images.vision_spec import PixelSpec

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_ASPECT = 200
"""The longer side divided by the shorter. Qwen's and GLM's processors take no more either."""


_RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}

Image.MAX_IMAGE_PIXELS = None
"""Sizes are checked here, against the operator's limit."""


class ImageError(ValueError):
    """The image cannot be taken. Says why, and what to send instead."""


def preprocess(data: bytes, pixels: PixelSpec, max_pixels: int) -> ImagePixels:
    """Returns an encoded image's patches. `max_pixels`: of the image as it is sent. Raises
    `ImageError`."""
    image = decoded(data, max_pixels)
    size = fitted(image.height, image.width, pixels)
    resized = np.asarray(image.resize((size.width, size.height), _RESAMPLING[pixels.resample]))
    bottom, right = size.padded_height - size.height, size.padded_width - size.width
    if bottom or right:
        resized = np.pad(resized, ((0, bottom), (0, right), (0, 0)))
    patches = patches_of(resized, pixels)
    rows, columns = size.padded_height // pixels.unit, size.padded_width // pixels.unit
    return ImagePixels(image_digest(rows, columns, patches), rows, columns, patches)


def decoded(data: bytes, max_pixels: int) -> Image.Image:
    """Returns a picture in RGB, as it is to be seen. Raises `ImageError`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_size(image.width, image.height, max_pixels)
            image.load()
            turned = ImageOps.exif_transpose(image)
            return turned.convert("RGB")
    except UnidentifiedImageError:
        raise ImageError("is no PNG, JPEG or WebP image") from None
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("takes too much memory to decode; send a smaller one") from None
    except (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError) as error:
        raise ImageError(f"cannot be decoded ({type(error).__name__}); send it whole") from None


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raises `ImageError` for pictures that are too large, or too long for their width."""
    if width * height > max_pixels:
        raise ImageError(
            f"has {width} x {height} pixels, more than the {max_pixels} that are taken here; send "
            f"a smaller one"
        )
    if width < 1 or height < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(
            f"is {width} x {height}: one side may be at most {MAX_ASPECT} times the other"
        )


def patches_of(image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], pixels: PixelSpec) -> bytes:
    """Cuts [height, width, 3] into patches, in the order that `ImagePixels` says."""
    size, merge = pixels.patch_size, pixels.merge_size
    height, width, _ = image.shape
    cut = image.reshape(height // pixels.unit, merge, size, width // pixels.unit, merge, size, 3)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).tobytes()
