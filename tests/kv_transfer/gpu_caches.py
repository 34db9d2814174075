"""KV caches on a GPU with known contents, computed by a stream that may be slow."""

from __future__ import annotations

import numpy as np
import torch
from kv_caches import UNTOUCHED, ByteArray, RankCache, head_dim, prompt_kv

from kv_transfer.layout import KVLayout, attention_group

SLOW_CYCLES = 40_000_000
"""About 20 ms of a GPU."""


def gpu_layout(*, tp_size: int = 1, block_size: int = 16, num_kv_heads: int = 8) -> KVLayout:
    """Returns a layout large enough that 64 blocks of half of its heads take more than torch puts
    together with anything else: a process cannot map one allocation twice."""
    group = attention_group(
        layers=range(8),
        heads=num_kv_heads,
        head_dim=128,
        dtype="bfloat16",
        block_size=block_size,
    )
    return KVLayout(groups=(group,), tp_size=tp_size, model_hash="model")


class GpuRankCache(RankCache):
    """One rank's cache on a GPU.

    `slow_cycles`: the stream does nothing for so long before it writes a layer.
    """

    slow_cycles = 0

    def _allocate(self) -> None:
        size = (
            self.layout.num_layers,
            self.num_blocks,
            2,
            self.heads.count,
            self.layout.groups[0].block_size,
            head_dim(self.layout),
        )
        torch.cuda.empty_cache()
        fill = int.from_bytes(bytes([UNTOUCHED] * 2), "little", signed=True)
        self._words = torch.full(size, fill, dtype=torch.int16, device="cuda")
        self._uploads = torch.cuda.Stream()
        self._kept: list[torch.Tensor] = []
        self.current_stream = lambda: torch.cuda.current_stream().cuda_stream
        torch.cuda.synchronize()

    @property
    def tensor(self) -> torch.Tensor:
        return self._words

    def write(self, seed: int, layer: int, tokens: range, block_ids: list[int]) -> None:
        """Returns before it is written."""
        if len(tokens) == 0:
            return
        values = prompt_kv(seed, layer, self.heads, tokens, self.layout).view(np.int16)
        places = np.array([divmod(token, self.layout.groups[0].block_size) for token in tokens])
        with torch.cuda.stream(self._uploads):  # an upload waits for its stream
            on_device = torch.from_numpy(values).permute(2, 0, 1, 3).contiguous().cuda()
            blocks = torch.tensor(np.array(block_ids)[places[:, 0]]).cuda()
            offsets = torch.tensor(places[:, 1]).cuda()
        self._kept += [on_device, blocks, offsets]
        if self.slow_cycles:
            torch.cuda._sleep(self.slow_cycles)
        self._words[layer, blocks, :, :, offsets] = on_device

    def pages_of(self, slot: int, block_ids: list[int]) -> ByteArray:
        found = self._words[slot, torch.tensor(block_ids, device="cuda")].cpu().numpy()
        return found.reshape(len(block_ids), -1).view(np.uint8)

    def close(self) -> None:
        torch.cuda.synchronize()
        del self._words
        self._kept.clear()
