"""Tests how many kernels attention to latents has, without launching any."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tandem_kernels.attention import latent_decode, latent_decode_ahead, latent_decode_few
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.device import KNOWN_GPUS, as_on
from tandem_kernels.gemm.small_m_shapes import MAX_ROWS

MOST = 300


class Kernel:
    """Takes note of what it would be compiled for."""

    def __init__(self) -> None:
        self.variants = set[tuple[tuple[str, Any], ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*_: Any, **constants: Any) -> None:
            self.variants.add(tuple(sorted(constants.items())))

        return launch


@pytest.mark.parametrize("query_len", [1, 3, 6])
@pytest.mark.parametrize(("heads", "sizes"), [(128, (8, 8)), (128, (512, 64)), (16, (512, 64))])
def test_each_power_of_two_of_decodes_has_one_kernel(
    query_len: int, heads: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warming up runs powers of two alone, and the most: what another number needs would be
    compiled while requests wait."""
    latent, rope = sizes
    given = {"dtype": torch.bfloat16, "device": "meta"}
    whole = torch.empty(MOST * query_len, heads, latent, **given)
    turned = torch.empty(MOST * query_len, heads, rope, **given)
    cache, tables = torch.empty(1, 64, latent + rope, **given), torch.zeros(MOST, 1).int()
    decodes, joins = Kernel(), Kernel()
    monkeypatch.setattr(latent_decode, "latent_decode_kernel", decodes)
    monkeypatch.setattr(latent_decode_ahead, "latent_decode_ahead_kernel", decodes)
    monkeypatch.setattr(latent_decode_few, "latent_decode_few_kernel", decodes)
    monkeypatch.setattr(latent_decode, "merge_kernel", joins)
    warmed = [*(1 << power for power in range(MOST.bit_length())), MOST]
    found = []
    with as_on(KNOWN_GPUS["h200"]):
        for counts in (warmed, range(1, MOST + 1)):
            for count in counts:
                # Whether kernels begin early depends on the number of tokens itself.
                if count * query_len > MAX_ROWS or count in warmed:
                    lens = tables[:count, 0]
                    metadata = AttentionMetadata(
                        tables[:count], lens, lens, count, query_len, 64,
                        decode_query_len=query_len,
                    )  # fmt: skip
                    q, r = whole[: count * query_len], turned[: count * query_len]
                    latent_decode.latent_decode(q, r, cache, metadata, 1.0, torch.empty_like(q))
            found.append((len(decodes.variants), len(joins.variants)))
    assert found[0] == found[1]
