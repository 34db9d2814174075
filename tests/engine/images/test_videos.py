"""Answers about videos are those of transformers, token for token: pairs of frames are encoded
alone, wherever a step cuts them, and have positions in time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.contracts.errors import InvalidRequest
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.images.image_input import ImageSpan, position_delta
from engine.images.image_limits import ImageLimits
from engine.images.positions import prompt_positions
from engine.kv_cache.block_hash import image_keys
from tests.engine.images.test_vision_parity import config_of, engine_of
from tests.engine.images.video_prompts import VideoPrompt, clip, reference_greedy, video_prompt
from tests.engine.images.vision_checkpoints import save_checkpoint

COUNT = 12
KINDS = ["qwen2_5", "qwen3", "qwen3_5_moe", "glm4v", "glm46v", "gemma4", "gemma4_small"]
KINDS += ["gemma4_patches", "muse", "minimax_m3"]


def prompts(kind: str) -> list[VideoPrompt]:
    """Returns prompts with one and two videos. What transformers 5.24 gives text behind a video of
    Qwen2.5-VL overlaps its times; so these end before its sides do."""
    tick = 1.5 if kind == "qwen2_5" else 0.0
    first, second = clip(kind, 3, 3, 4, 1, tick), clip(kind, 2, 2, 5, 2, tick)
    return [video_prompt(kind, [first], 3), video_prompt(kind, [second, first], 4)]


def spec_of(asked: VideoPrompt, count: int = COUNT) -> RequestSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return RequestSpec(asked.tokens, sampling, images=asked.spans)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(kind, tmp_path)
    engine = engine_of(folder, budget=24, encoder_budget=54)
    asked = prompts(kind)
    for turn in range(2):
        for index, one in enumerate(asked):
            name = f"{turn}.{index}"
            engine.add(EngineCoreRequest(request_id=name, spec=spec_of(one), pixels=one.pixels))
        engine.finish()
    for index, one in enumerate(asked):
        expected = reference_greedy(folder, kind, one, COUNT)
        assert engine.tokens[f"0.{index}"] == engine.tokens[f"1.{index}"] == expected
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.images is not None and stats.images.num_encoded_tokens == 3 * 12 + 2 * 10
    assert engine.scheduler.check_empty() == []


def span(offset: int, rows: int, columns: int, joins: bool = False, time: int = 0) -> ImageSpan:
    return ImageSpan(offset, rows, columns, bytes(32), 0, joins, time)


def test_positions_of_pairs_without_text_between_them() -> None:
    """Two tokens of text, three pairs of one row of two tokens, and a picture behind text."""
    spans = [span(2, 1, 2), span(4, 1, 2, True, 3), span(6, 1, 2, True, 6), span(9, 2, 1)]
    expected = [
        [0, 1, 2, 2, 5, 5, 8, 8, 9, 10, 10],
        [0, 1, 2, 2, 2, 2, 2, 2, 9, 10, 11],
        [0, 1, 2, 3, 2, 3, 2, 3, 9, 10, 10],
    ]
    np.testing.assert_array_equal(prompt_positions(spans), expected)
    assert position_delta(spans) == 12 - 11


def test_places_among_pairs_are_in_hashes() -> None:
    spans = [ImageSpan(0, 1, 4, bytes(32), first=first, beside=8) for first in (0, 4, 8, 4)]
    found = [image_keys([one], 0, 4) for one in spans]
    assert len(set(found)) == 3 and found[1] == found[3]


@pytest.mark.parametrize("change", [{"beside": 4}, {"first": 4, "beside": 12}, {"columns": 3}])
def test_spans_of_another_size_than_their_pixels_end(
    change: dict[str, int], tmp_path: Path
) -> None:
    """Whatever node sends them: the tower would have other embeddings than their tokens."""
    kind = "minimax_m3"
    asked = video_prompt(kind, [clip(kind, 1, 1, 4, 1)], 3)
    wrong = msgspec.structs.replace(asked.spans[0], **change)
    spec = RequestSpec(asked.tokens, SamplingParams(max_tokens=1), images=(wrong,))
    config = config_of(save_checkpoint(kind, tmp_path))
    request = Request(EngineCoreRequest(request_id="0", spec=spec, pixels=asked.pixels))
    assert "another size" in ImageLimits(config).refusal(request)


def test_times_are_in_hashes() -> None:
    """Blocks of equal tokens and frames differ where their times do."""
    found = [image_keys([span(0, 1, 4), span(4, 1, 4, True, time)], 4, 4) for time in (1, 2, 1)]
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    "spans",
    [
        (span(0, 1, 2, True, 1),),
        (span(0, 1, 2), span(3, 1, 2, True, 1)),
        (span(0, 1, 2, False, 1),),
        (span(0, 1, 2), span(2, 1, 2, True, -1)),
        (span(0, 1, 2), span(2, 1, 2, True, 9)),
    ],
)
def test_spans_that_are_no_video_are_refused(spans: tuple[ImageSpan, ...]) -> None:
    spec = RequestSpec([1] * 20, SamplingParams(), images=spans)
    with pytest.raises(InvalidRequest):
        spec.check()
