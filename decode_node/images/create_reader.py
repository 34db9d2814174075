"""Makes a node's image reader from its settings."""

from __future__ import annotations

from decode_node.config import DecodeNodeSettings
from decode_node.images.fetch import AllowedHosts, ImageFetcher
from decode_node.images.image_pool import ImagePool
from decode_node.images.image_reader import ImageReader, ImageReadLimits
from engine.config import EngineConfig
from engine.node.image_settings import takes_images


def create_image_reader(settings: DecodeNodeSettings, config: EngineConfig) -> ImageReader:
    """Returns the reader; where the model sees no images it refuses them. Processes start with the
    first image."""
    limits = ImageReadLimits(config.images.max_images, settings.max_image_bytes)
    vision = config.model.vision
    if vision is None or not takes_images(config):
        return ImageReader(None, limits)
    pixels = vision.pixels.limited(config.images.max_image_tokens)
    pool = ImagePool(
        pixels,
        size=settings.image_workers,
        max_pixels=settings.max_image_pixels,
        timeout_s=settings.image_timeout_s,
    )
    hosts = AllowedHosts.of(settings.image_url_hosts)
    fetcher = None
    if hosts.names:
        fetcher = ImageFetcher(
            hosts, max_bytes=settings.max_image_bytes, timeout_s=settings.image_timeout_s
        )
    return ImageReader(pool, limits, fetcher)
