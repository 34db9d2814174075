"""Makes a node's image reader from its settings."""

from __future__ import annotations

from decode_node.config import DecodeNodeSettings
from decode_node.images.fetch import AllowedHosts, ImageFetcher
from decode_node.images.image_pool import ImagePool
from decode_node.images.image_reader import ImageReader, ReadLimits
from engine.config import EngineConfig
from engine.node.settings.image_settings import takes_images


def create_image_reader(settings: DecodeNodeSettings, config: EngineConfig) -> ImageReader:
    """Returns the reader; where the model sees no images it refuses them, or passes over them.
    Processes start with the first image."""
    vision, hosts = config.model.vision, AllowedHosts.of(settings.image_url_hosts)
    images = ReadLimits(
        config.images.max_images,
        settings.max_image_bytes,
        _fetcher(hosts, settings.max_image_bytes, settings.image_timeout_s),
    )
    if vision is None or not takes_images(config):
        return ImageReader(None, images, passes_over=settings.unseen_images == "say")
    video = vision.video
    if video is not None:
        video = video.limited(
            max_frames=settings.max_video_frames, max_tokens=settings.max_video_tokens
        )
    pool = ImagePool(
        vision.pixels.limited(config.images.max_image_tokens),
        size=settings.image_workers,
        max_pixels=settings.max_image_pixels,
        timeout_s=settings.image_timeout_s,
        video=video,
        video_timeout_s=settings.video_timeout_s,
    )
    videos = ReadLimits(
        config.images.max_videos,
        settings.max_video_bytes,
        _fetcher(hosts, settings.max_video_bytes, settings.video_timeout_s),
    )
    return ImageReader(pool, images, videos)


def _fetcher(hosts: AllowedHosts, max_bytes: int, timeout_s: float) -> ImageFetcher | None:
    if not hosts.names:
        return None
    return ImageFetcher(hosts, max_bytes=max_bytes, timeout_s=timeout_s)
