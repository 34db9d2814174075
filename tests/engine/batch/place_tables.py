"""Places that tests make up."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch.places import Places


def places_of(decodes: list[tuple[int, list[int]]], others: list[int], known: int = 9) -> Places:
    """Decodes as (row, its last token and drafts), all equally long, and `others`: rows of prefills
    that end. Every row has `known` tokens."""
    width = len(decodes[0][1]) if decodes else 1
    rows = np.array([row for row, _ in decodes for _ in range(width)] + others, np.int32)
    seq_lens = [known + place for _ in decodes for place in range(width)] + [known] * len(others)
    input_ids = [token for _, tokens in decodes for token in tokens] + [0] * len(others)
    return Places(
        num_decodes=len(decodes),
        decode_query_len=width,
        rows=rows,
        max_seq_lens=np.array(seq_lens, np.int32) + width - 1,
        idx_mapping=torch.from_numpy(rows),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        input_ids=torch.tensor(input_ids, dtype=torch.int32),
        has_exact_lens=width == 1,
    )
