"""Takes the pictures of the status page in docs/images from a running cluster:

python -m tests.browser.pictures http://127.0.0.1:8000 docs/images
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser.chromium import Chromium, Page, find_chromium, running_browser

_DESK = 1280, 1430
_PHONE = 390, 844
_GAP = 24


async def take(devtools: str, url: str, folder: Path) -> None:
    async with Chromium.connect(devtools) as browser:
        for scheme in ("light", "dark"):
            async with browser.page() as page:
                await _open(page, url, scheme, *_DESK, 1)
                _save(folder / f"status-{scheme}.png", _image(await page.picture()))
        halves = []
        for scheme, where in (("light", "now-title"), ("dark", "requests")):
            async with browser.page() as page:
                await _open(page, url, scheme, *_PHONE, 1.5)
                if where == "requests":
                    await page.ask(f"document.getElementById('{where}').scrollIntoView()")
                halves.append(_image(await page.picture()))
        both = Image.new("RGB", (2 * halves[0].width + _GAP, halves[0].height), "white")
        for place, half in enumerate(halves):
            both.paste(half, (place * (half.width + _GAP), 0))
        _save(folder / "status-phone.png", both)


async def _open(page: Page, url: str, scheme: str, width: int, height: int, scale: float) -> None:
    await page.prefer(color_scheme=scheme)
    await page.screen(width, height, scale)
    await page.open(f"{url}/status")
    await page.until("document.querySelectorAll('#list li').length >= 5")


def _image(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def _save(path: Path, image: Image.Image) -> None:
    """Saves with the 256 most frequent colours, which are those of the page as they are."""
    counted = sorted(image.getcolors(image.width * image.height), reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in counted for part in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(url: str, folder: str) -> None:
    binary = find_chromium()
    if binary is None:
        sys.exit("there is no browser here: make chromium")
    with (
        tempfile.TemporaryDirectory() as profile,
        running_browser(binary, Path(profile)) as devtools,
    ):
        asyncio.run(take(devtools, url, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
