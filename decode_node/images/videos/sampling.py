"""Which frames of a video are taken, as each family's reference processor in transformers does.

even_steps    `fps` a second, at equal steps from the first        Qwen2.5-VL
even_ends     `fps` a second, from the first to the last           Qwen3-VL, Qwen3.5
even_pairs    the same in whole pairs                              Muse Glimmer
seconds       one for each 1 / `fps` seconds                       GLM-4.1V, 4.5V
paced         fewer a second the longer the video is               GLM-4.6V
count         as many of every video, at equal steps               Gemma 4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from engine.images.video_spec import Sampling, VideoSpec

_PACES = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""Pairs of frames a second, of videos of at most this many seconds."""
_MAX_PACED, _MAX_PACED_S = 640, 2400


def sampled(video: VideoSpec, total: int, rate: float, per_pair: int) -> list[int]:
    """Returns the indices of the frames that are taken, in order; some may come twice.

    Args:
        total: Frames of the file, at least one.
        rate: Frames of the file in a second.
        per_pair: Frames that a tower takes at once.
    """
    found = _SAMPLERS[video.sampling](video, total, rate, per_pair)
    if len(found) > video.max_frames:
        places = np.linspace(0, len(found) - 1, video.max_frames).round().astype(int)
        found = [found[place] for place in places]
    return found


def _even_steps(video: VideoSpec, total: int, rate: float, per_pair: int) -> list[int]:
    most = min(video.max_frames, total) // per_pair * per_pair
    wanted = min(max(total / rate * video.fps, video.min_frames), most)
    count = max(1, math.floor(wanted / per_pair) * per_pair)
    return [index * total // count for index in range(count)]


def _even_ends(video: VideoSpec, total: int, rate: float, per_pair: int) -> list[int]:
    count = min(max(int(total / rate * video.fps), video.min_frames), video.max_frames, total)
    return _spread(0, total - 1, count, is_rounded=True)


def _even_pairs(video: VideoSpec, total: int, rate: float, per_pair: int) -> list[int]:
    count = min(int(total * video.fps / rate), video.max_frames, total)
    count = min(max(1, count // per_pair) * per_pair, total)
    # As torch has places of equal distance: from both ends, in float32.
    last, index = np.float32(total - 1), np.arange(count)
    step = last / np.float32(max(1, count - 1))
    from_first = step * index.astype(np.float32)
    from_last = last - step * (count - 1 - index).astype(np.float32)
    places: list[int] = np.where(index < count // 2, from_first, from_last).astype(int).tolist()
    return places if count > 1 else [0]


def _seconds(video: VideoSpec, total: int, rate: float, per_pair: int) -> list[int]:
    last, duration = total - 1, total / rate
    if duration <= video.max_duration:
        count = max(1, math.floor(duration * video.fps))
        return _once(min(last, math.ceil(i * rate / video.fps)) for i in range(count))
    count = int(video.max_duration * video.fps)
    if count >= total:
        return _once(range(total))
    times = np.linspace(0, duration, count)
    return _once(min(last, math.ceil(time * rate)) for time in times.tolist())


def _paced(video: VideoSpec, total: int, rate: float, per_pair: int) -> list[int]:
    duration = total / rate
    effective = min(duration, _MAX_PACED_S)
    pace = next(pace for longest, pace in _PACES if effective <= longest)
    count = max(1, min(int(effective * pace * per_pair), _MAX_PACED))
    found = _spread(0, total - 1, count)
    if total >= count:
        found = _at_pace(total, rate, per_pair * pace, int(duration))
        if len(found) < count:
            found = _spread(found[0], found[-1], count)
        elif len(found) > count:
            found = _spread(0, total - 1, count)
    return _once(found)


def _at_pace(total: int, rate: float, pace: float, end_s: int) -> list[int]:
    """Returns the first frame behind each step of time, until `end_s`."""
    found, due, frame_s = [], 0.0, 1 / rate
    for index in range(total):
        if index * frame_s >= due:
            due += 1 / pace
            found.append(index)
            if due >= end_s:
                break
    return found


def _spread(first: int, last: int, count: int, *, is_rounded: bool = False) -> list[int]:
    places = np.linspace(first, last, count)
    found: list[int] = (places.round() if is_rounded else places).astype(int).tolist()
    return found


def _once(indices: Iterable[int]) -> list[int]:
    """Returns each index once, and the last one again where their number is odd."""
    found = list(dict.fromkeys(indices))
    return [*found, found[-1]] if len(found) % 2 else found


def _count(video: VideoSpec, total: int, rate: float, per_pair: int) -> list[int]:
    count = min(video.max_frames, total)
    return [index * total // count for index in range(count)]


_SAMPLERS: dict[Sampling, Callable[[VideoSpec, int, float, int], list[int]]] = {
    "even_steps": _even_steps,
    "even_ends": _even_ends,
    "even_pairs": _even_pairs,
    "seconds": _seconds,
    "paced": _paced,
    "count": _count,
}
