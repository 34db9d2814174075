"""Figures of others to hold ours against, by model shape and case.

All are of one H200, in bf16 unless a shape's name says how weights and cache are quantised. Peers
are vLLM 0.26.0 on the same kind of machine; for mixtures of experts with uniformly random routing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reference:
    """`peer` is vLLM, `must` and `goal` what we ask of ourselves, `floor` memory and matrix units
    alone; None where we do not know it.
    """

    peer: float | None = None
    must: float | None = None
    goal: float | None = None
    floor: float | None = None


_DECODES = "decode 1", "decode 16", "decode 64", "decode 256"


def _floors(*steps: float, **prompts: float) -> dict[str, Reference]:
    """Returns floors alone: of decode steps, and of prompts by "of_LENGTH"."""
    floors = dict(zip(_DECODES, steps, strict=True))
    floors |= {f"prefill {name.removeprefix('of_')} alone": ms for name, ms in prompts.items()}
    return {case: Reference(floor=ms) for case, ms in floors.items()}


REFERENCES = {
    "llama-3.1-8b": {
        "decode 1": Reference(4.87, 4.8, 4.3, 3.52),
        "decode 16": Reference(5.50, 5.4, 4.9, 4.0),
        "decode 64": Reference(7.58, 7.5, 6.8, 5.6),
        "decode 128": Reference(10.64, 10.5, 9.3, 7.7),
        "decode 256": Reference(17.93, 17.5, 15.8, 14.1),
        "prefill 2048 alone": Reference(50.5, 50.0, 47.0),
        "prefill 8192 alone": Reference(217.0, 217.0, 200.0),
        "prefill 32 x 2048": Reference(42.5, 43.0, 46.0),
        "prefill 12 x 8192": Reference(38.6, 38.6, 42.0),
        "throughput 256 x 2000/150": Reference(15.96, 15.9, 13.5),
    },
    "llama-3.1-8b-tp2": {
        "decode 1": Reference(3.51, 3.4, 3.0),
        "decode 16": Reference(3.93, 3.85, 3.4),
        "decode 64": Reference(4.90, 4.8, 4.3),
        "decode 256": Reference(10.22, 10.0, 9.0),
        "prefill 2048 alone": Reference(34.4, 33.0, 27.0),
        "prefill 8192 alone": Reference(132.0, 120.0, 110.0),
        "prefill 16 x 2048": Reference(72.1, 77.0, 82.0),
        "prefill 4 x 8192": Reference(66.0, 71.0, 76.0),
    },
    # Floors: a rank's weights and KV at 4.3 TB/s.
    "llama-3.1-70b-tp4": {
        "decode 1": Reference(12.39, 11.80, floor=8.2),
        "decode 16": Reference(12.67, 12.07, floor=8.6),
        "decode 64": Reference(15.77, 15.02, floor=9.6),
        "decode 200": Reference(24.98, 23.79, floor=12.4),
        "prefill 1500 alone": Reference(111.4, 106.1),
        "prefill 6000 alone": Reference(423.9, 403.7),
        "prefill 16 x 1500": Reference(14.74, 15.48),
        "prefill 6 x 6000": Reference(14.33, 15.05),
        "throughput 128 x 1000/200": Reference(12.39, 11.80),
    },
    "llama-3.1-8b-fp8-kv-fp8": {
        "decode 1": Reference(3.54, 3.4, 2.7),
        "decode 16": Reference(3.90, 3.8, 3.1),
        "decode 64": Reference(5.65, 5.5, 4.2),
        "decode 128": Reference(7.97, 7.7, 5.8),
        "decode 256": Reference(13.06, 12.5, 9.0),
        "throughput 256 x 2000/150": Reference(10.57, 10.3, 8.8),
    },
    "qwen3-30b-a3b": {
        "decode 1": Reference(4.23, 4.1, 2.8, 1.41),
        "decode 16": Reference(12.72, 12.3, 11.0, 9.65),
        "decode 64": Reference(19.03, 18.4, 17.2, 15.4),
        "decode 256": Reference(26.54, 25.6, 23.2, 20.4),
        "prefill 2048 alone": Reference(77.5, 60.0, 30.0),
        "prefill 8192 alone": Reference(158.6, 150.0, 128.0),
        "prefill 16 x 2048": Reference(61.9, 65.0, 80.0),
        "throughput 128 x 2000/150": Reference(7.48, 7.2, 6.0),
    },
    # Floors: weights, distinct experts of uniform routing, states read and written, and keys and
    # values of a context of 1024, at 4.4 TB/s.
    "qwen3.5-35b-a3b": {
        "decode 1": Reference(floor=1.37),
        "decode 16": Reference(floor=7.27),
        "decode 64": Reference(floor=15.8),
        "decode 256": Reference(floor=24.2),
    },
    "qwen3-30b-a3b-fp8-block": {
        "decode 1": Reference(4.32, 4.19, 3.24, 0.81),
        "decode 16": Reference(9.07, 8.80, 6.80, 5.10),
        "decode 64": Reference(13.07, 12.68, 9.80, 8.59),
        "decode 256": Reference(20.88, 20.25, 15.66, 13.47),
        "prefill 2048 alone": Reference(98.0, 95.1, 73.5),
        "prefill 16 x 2048": Reference(66.9, 70.2, 87.0),
        "throughput 128 x 2000/150": Reference(6.02, 5.84, 4.52),
    },
    "qwen3-30b-a3b-fp8": {"prefill 3000 alone": Reference(67.1)},
    "deepseek-v2-lite": {
        "decode 1": Reference(3.12, 3.0, 2.1, 1.17),
        "decode 16": Reference(8.08, 7.8, 7.0, 5.98),
        "decode 64": Reference(10.30, 10.0, 8.9, 7.74),
        "decode 256": Reference(12.73, 12.3, 10.9, 9.27),
        "prefill 2048 alone": Reference(81.6, 60.0, 28.0),
        "prefill 8192 alone": Reference(108.0, 105.0, 85.0),
        "prefill 16 x 2048": Reference(75.8, 78.0, 98.0),
        "throughput 128 x 2000/150": Reference(5.14, 5.0, 4.2),
    },
    "gpt-oss-20b-bf16": _floors(1.68, 8.51, 9.9, 11.2),
    "gpt-oss-20b": _floors(0.87, 2.76, 3.37, 4.71, of_2048=18.6, of_8192=81.8),
    "gpt-oss-120b": _floors(1.17, 6.53, 13.7, 17.55, of_2048=28.0, of_8192=123.0),
}
