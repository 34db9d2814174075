"""Independent meanings of the operations: float64, one element at a time, no shared code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import KVPages, PagedKV
from tandem_kernels.elementwise.gate_form import GateForm


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Returns ‖out - expected‖ / ‖expected‖ in float64; NaN never passes a comparison."""
    difference = (out.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pair (d, d + D/2) of each head of `x` [T, H, D] by `angles` [T, D/2]."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double()).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def rope_angles(max_len: int, head_dim: int) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    return torch.arange(max_len).double().unsqueeze(1) * frequency


def cos_sin_cache(angles: Tensor) -> Tensor:
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


@dataclass
class PagedBatch:
    """A ragged batch whose pages are scattered and whose unused places hold NaN."""

    q: Tensor
    kv_cache: PagedKV
    metadata: AttentionMetadata
    keys: list[Tensor]
    values: list[Tensor]
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def expected(self, width: int | None = None) -> Tensor:
        """Computes [T, Hq, Dv] float64 by softmax over each query token's own context; `width`: of
        values that are the first numbers of keys."""
        shape = (*self.q.shape[:2], width or self.values[0].shape[2])
        out = torch.zeros(shape, dtype=torch.float64, device=self.q.device)
        bounds = self.metadata.query_start_loc.tolist()
        for r, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            start, end = bounds[r], bounds[r + 1]
            if start == end or keys.shape[1] == 0:
                continue
            group = self.q.shape[1] // keys.shape[0]
            position = torch.arange(keys.shape[1], device=self.q.device)
            own = position[keys.shape[1] - (end - start) :].unsqueeze(1)
            unseen = position > own
            if self.metadata.window is not None:
                unseen |= position <= own - self.metadata.window
            for head in range(self.q.shape[1]):
                queries = self.q[start:end, head].double()
                scores = queries @ keys[head // group].double().T * self.scale
                if self.softcap:
                    scores = self.softcap * (scores / self.softcap).tanh()
                scores = scores.masked_fill_(unseen, -math.inf)
                peak = scores.max(-1, keepdim=True).values
                weights = (scores - peak).exp()
                total = weights.sum(-1, keepdim=True)
                if self.sinks is not None:
                    total += (self.sinks[head].double() - peak).exp()
                out[start:end, head] = weights / total @ values[head // group].double()
        return out


def paged_batch(
    seq_lens: list[int],
    query_lens: list[int],
    *,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spare_blocks: int = 3,
    window: int | None = None,
    page_padding: int = 0,
    value_dim: int | None = None,
) -> PagedBatch:
    """Makes random requests; the leading ones with one query token count as decodes. What no query
    sees through `window` is NaN, and entries of tables before it name a block that is all NaN.
    `page_padding`: unused numbers behind each block. `value_dim`: where values are narrower than
    keys.
    """
    blocks_of = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(blocks_of) + spare_blocks
    shape, value_dim = (num_blocks, num_kv_heads, block_size, -1), value_dim or head_dim
    keys_end = num_kv_heads * block_size * head_dim
    page = keys_end + num_kv_heads * block_size * value_dim
    pages = torch.full((num_blocks, page + page_padding), math.nan, dtype=dtype, device=device)
    planes = KVPages(pages[:, :keys_end].view(shape), pages[:, keys_end:page].view(shape))
    kv_cache: PagedKV = planes
    if value_dim == head_dim:
        kv_cache = pages[:, :page].view(num_blocks, 2, *shape[1:])
    null, *free = torch.randperm(num_blocks).tolist()
    # A wrong entry behind a request's last block must never be followed.
    tables = torch.full((len(seq_lens), max(blocks_of) + 2), 2**30, dtype=torch.int32)
    keys, values = [], []
    for r, seq_len in enumerate(seq_lens):
        k, v = (
            torch.randn(num_kv_heads, seq_len, width, device=device).to(dtype)
            for width in (head_dim, value_dim)
        )
        first = 0 if window is None else max(0, seq_len - query_lens[r] - window + 1)
        tables[r, : first // block_size] = null
        for b in range(first // block_size, blocks_of[r]):
            tables[r, b] = free.pop()
            begin = max(first, b * block_size)
            place = begin - b * block_size
            for plane, own in ((planes.k, k), (planes.v, v)):
                piece = own[:, begin : (b + 1) * block_size]
                plane[tables[r, b], :, place : place + piece.shape[1]] = piece
        keys.append(k)
        values.append(v)
    num_decodes = next((r for r, n in enumerate(query_lens) if n != 1), len(query_lens))
    q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, device=device).to(dtype)
    metadata = AttentionMetadata(
        block_tables=tables.to(device),
        query_start_loc=cumulative(query_lens).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        window=window,
    )
    return PagedBatch(q, kv_cache, metadata, keys, values, head_dim**-0.5)


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[list[int], list[int]],
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Computes [T, H, V] and the logarithms of sums [H, T] of each query token and head alone."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    sums = torch.full(q.shape[1::-1], -math.inf, dtype=torch.float64, device=q.device)
    first_query = first_key = 0
    for num_queries, num_keys in zip(*lengths, strict=True):
        for i in range(num_queries):
            seen = num_keys - num_queries + i + 1 if causal else num_keys
            token, keys = first_query + i, slice(first_key, first_key + seen)
            for head in range(q.shape[1]) if seen > 0 else ():
                scores = k[keys, head].double() @ q[token, head].double() * scale
                out[token, head] = scores.softmax(0) @ v[keys, head].double()
                sums[head, token] = scores.logsumexp(0)
        first_query, first_key = first_query + num_queries, first_key + num_keys
    return out, sums


def cumulative(lengths: list[int]) -> Tensor:
    """Returns [0, a, a + b, ...] int32."""
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)


def _rotl(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF


def murmur3(words: list[int], seed: int = 0x9747B28C) -> int:
    """Computes MurmurHash3 x86 32 of 32-bit words, without the length in the finaliser."""
    h = seed
    for word in words:
        k = (word * 0xCC9E2D51) & 0xFFFFFFFF
        k = (_rotl(k, 15) * 0x1B873593) & 0xFFFFFFFF
        h = (_rotl(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def hash_of(seed: int, position: int, token_id: int) -> int:
    low, high = 0xFFFFFFFF, 32
    words = [seed & low, (seed >> high) & low, position & low, (position >> high) & low]
    return murmur3([*words, token_id])


def gumbel(seed: int, position: int, token_id: int) -> float:
    uniform = (hash_of(seed, position, token_id) + 0.5) / 2**32
    return -math.log(-math.log1p(-uniform))


def filtered_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Returns what is left of a distribution after min-p, top-k, top-p, equal logits kept
    together."""
    scaled = [x / temperature for x in logits]
    peak = max(scaled)
    weights = [math.exp(x - peak) for x in scaled]
    if min_p > 0:
        weights = [w if w >= min_p * (1 - 1e-12) else 0.0 for w in weights]
    if top_k > 0:
        smallest = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [w if w >= smallest else 0.0 for w in weights]
    if top_p < 1:
        total, reached, smallest = math.fsum(weights), 0.0, 0.0
        for w in sorted(weights, reverse=True):
            reached, smallest = reached + w, w
            if reached >= top_p * total:
                break
        weights = [w if w >= smallest else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def sample(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    if temperature == 0:
        return max(range(len(logits)), key=lambda t: (logits[t], -t))
    kept = filtered_probabilities(logits, temperature, top_k, top_p, min_p)
    noisy = [
        logits[t] / temperature + gumbel(seed, position, t) if p > 0 else -math.inf
        for t, p in enumerate(kept)
    ]
    return max(range(len(logits)), key=noisy.__getitem__)


def route_token(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    sigmoid: bool = False,
    renormalise: bool = True,
    scaling: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> dict[int, float]:
    """Maps the experts of one token, best first, to their weights; in float64 and lists."""
    wide = logits.double()
    scores = (wide.sigmoid() if sigmoid else wide.softmax(-1)).tolist()
    by = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
    size = len(by) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    best = 1 if bias is None else 2
    groups.sort(key=lambda group: -sum(sorted((by[e] for e in group), reverse=True)[:best]))
    allowed = [e for group in groups[:top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -by[e])[:top_k]
    total = sum(scores[e] for e in chosen) if renormalise else 1.0
    return {e: scores[e] / total * scaling for e in chosen}


def experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    chosen: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    form: GateForm | None = None,
    rounded: Callable[[Tensor], Tensor] = lambda row: row,
) -> Tensor:
    """Computes [T, H] float64, one pair at a time.

    Args:
        rounded: What the inputs of both projections, [K] float64, become.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, of_token in enumerate(chosen.tolist()):
        for place, expert in enumerate(of_token):
            if expert >= 0:
                both = w13[expert].double() @ rounded(x[token].double())
                if b13 is not None:
                    both += b13[expert].double()
                if form == GateForm("relu_squared"):
                    hidden = rounded(both.clip(0.0) ** 2)
                else:
                    hidden = rounded(_activated(*both.chunk(2), form))
                down = w2[expert].double() @ hidden
                if b2 is not None:
                    down += b2[expert].double()
                out[token] += weights[token, place].double() * down
    return out


def _activated(gate: Tensor, up: Tensor, form: GateForm | None) -> Tensor:
    match form:
        case None:
            return gate / (1 + (-gate).exp()) * up
        case GateForm("gelu_tanh"):
            return gelu(gate, approximate="tanh") * up
        case GateForm("limited", limit):
            return (gate / (1 + (-gate).exp())).clip(None, limit) * up.clip(-limit, limit)
        case GateForm("capped", limit):
            gate = gate.clip(None, limit)
            return gate / (1 + (-gate).exp()) * up.clip(-limit, limit)
        case GateForm(_, limit, alpha):
            gate, up = gate.clip(None, limit), up.clip(-limit, limit) + 1
            return gate / (1 + (-alpha * gate).exp()) * up


def e4m3_groups(row: Tensor) -> Tensor:
    """Rounds [K] float64 to numbers of e4m3, each 128 of which share a scale."""
    parts = []
    for group in row.split(128):
        largest = float(group.abs().max())
        scale = largest / 448 if largest > 0 else 1.0
        exact = group / scale
        step = torch.exp2(exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
        parts.append((exact / step).round() * step * scale)
    return torch.cat(parts)
