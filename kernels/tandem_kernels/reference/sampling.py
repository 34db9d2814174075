"""Turns logits into tokens and log-probabilities in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem_kernels.reference.gumbel import gumbel_noise
from tandem_kernels.reference.layouts import kernel_takes


@kernel_takes(logits="_ | _", rows="E: int", cols="E: int", values="E")
def add_sparse(logits: Tensor, rows: Tensor, cols: Tensor, values: Tensor) -> None:
    """Adds: `logits[rows[e], cols[e]] += values[e]` for each of E entries; the same place may
    repeat.

    Serves logit bias (finite values) and masking (-inf). `rows` and `cols` are int32 or int64.
    """
    logits.index_put_((rows.long(), cols.long()), values.to(logits.dtype), accumulate=True)


@kernel_takes(output_counts="_ | _: int32", penalty_rows="R: int32", token_ids="R: int")
def count_tokens(output_counts: Tensor, penalty_rows: Tensor, token_ids: Tensor) -> None:
    """Counts: `output_counts[penalty_rows[r], token_ids[r]] += 1`; a -1 on either side is skipped.

    Args:
        output_counts: [P, V] int32.
        penalty_rows: [R] int32, row of the penalty tables, -1: the request has no penalties.
        token_ids: [R] int64, -1: no token. A pair may repeat.
    """
    counted = (penalty_rows >= 0) & (token_ids >= 0)
    place = (penalty_rows[counted].long(), token_ids[counted].long())
    output_counts.index_put_(place, output_counts.new_ones(()), accumulate=True)


@kernel_takes(
    logits="S | V: float32",
    prompt_mask="Q | _: int32",
    output_counts="Q | V: int32",
    penalty_rows="S: int32",
    repetition="S: float32",
    presence="S: float32",
    frequency="S: float32",
    drafts="S _: int32",
)
def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    penalty_rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    drafts: Tensor,
) -> None:
    """Make tokens that occurred already less likely, in place.

    A token that occurs in the prompt or the output has its logit divided by `repetition` if
    positive and multiplied by it if not. Then a token of the output loses
    `presence + frequency * count`.

    Args:
        logits: [S, V] float32.
        prompt_mask: [P, ceil(V / 32)] int32; bit `v % 32` of word `v // 32` says that the
            prompt holds token v.
        output_counts: [P, V] int32, how often the output holds each token.
        penalty_rows: [S] int32, row of the two tables; -1 leaves the logits row alone.
        repetition: [S] float32, 1 is neutral.
        presence: [S] float32, 0 is neutral.
        frequency: [S] float32, 0 is neutral.
        drafts: [S, K] int32, tokens that the row of logits takes for output and that
            `output_counts` does not have; -1: none. A row may name a token several times.
    """
    chosen = (penalty_rows >= 0).nonzero().squeeze(1)
    if chosen.numel() == 0:
        return
    table_row = penalty_rows[chosen].long()
    counts = output_counts[table_row]
    for draft in drafts[chosen].long().unbind(1):
        counts.scatter_add_(1, draft.clamp(min=0)[:, None], (draft >= 0).int()[:, None])
    in_prompt = _unpacked(prompt_mask[table_row], logits.shape[1])

    scaled = logits[chosen]
    factor = repetition[chosen].unsqueeze(1).expand_as(scaled)
    factor = torch.where(in_prompt | (counts > 0), factor, 1.0)
    scaled = torch.where(scaled > 0, scaled / factor, scaled * factor)
    scaled -= frequency[chosen].unsqueeze(1) * counts
    scaled -= presence[chosen].unsqueeze(1) * (counts > 0)
    logits[chosen] = scaled


@kernel_takes(logits="S | _: float32", masks="_ | _: int32", entries="S: int32")
def mask_logits(logits: Tensor, masks: Tensor, entries: Tensor) -> None:
    """Sets the logits of tokens that a row may not choose to -inf, in place.

    Args:
        logits: [S, V] float32.
        masks: [P, ceil(V / 32)] int32; bit `v % 32` of word `v // 32` says that token v may be
            chosen.
        entries: [S] int32, row of `masks`; -1 leaves the logits row alone.
    """
    chosen = (entries >= 0).nonzero().squeeze(1)
    allowed = _unpacked(masks[entries[chosen].long()], logits.shape[1])
    for row, of_row in zip(chosen.tolist(), allowed, strict=True):
        logits[row] = torch.where(of_row, logits[row], -torch.inf)


def _unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Returns bit `v % 32` of word `v // 32` for each token v: [N, V] bool for `words` [N, W].

    NumPy does this ten times as fast as shifts.
    """
    bits = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits[:, :vocab_size]).bool()


@kernel_takes(
    idx_mapping="L: int32",
    seq_lens="L: int32",
    floats="_ R: float32",
    top_k="R: int32",
    seeds="R: int64",
)
def pick_parameters(
    idx_mapping: Tensor, seq_lens: Tensor, floats: Tensor, top_k: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns what `sample` reads at L places, from tables of R rows.

    Args:
        idx_mapping: [L] int32, the row of each place; below 0 none's, which is drawn for as if it
            were row 0.
        seq_lens: [L] int32.
        floats: [P, R] float32, parameters of each row.
        top_k: [R] int32.
        seeds: [R] int64.

    Returns:
        [P, L], [L], [L] of each place's row, and `seq_lens` as int64.
    """
    rows = idx_mapping.clamp(min=0)
    of_rows = floats.index_select(1, rows), top_k.index_select(0, rows)
    return *of_rows, seeds.index_select(0, rows), seq_lens.long()


@kernel_takes(
    logits="S | _: float32",
    temperature="S: float32",
    top_k="S: int32",
    top_p="S: float32",
    min_p="S: float32",
    seeds="S: int64",
    positions="S: int64",
)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    has_filters: bool = True,
    fixed_order: bool = False,
) -> Tensor:
    """Draw one token per row by the Gumbel-max trick, keyed by (seed, position, token id).

    Filters apply in this order, each to what the one before left: temperature, min-p, top-k,
    top-p. Tokens of equal logit stay or go together, so a filter may keep a few tokens more
    than its number says, and no choice depends on the order of a sort. A row keeps at least
    its largest logit. NaN counts as -inf.

    Args:
        logits: [S, V] float32, not changed.
        temperature: [S] float32; 0 takes the largest logit, the lowest id among equals.
        top_k: [S] int32, keep the k largest; 0 is off.
        top_p: [S] float32, keep the smallest set of largest tokens with at least this
            probability; 1 is off.
        min_p: [S] float32, keep tokens at least `min_p` times as likely as the likeliest;
            0 is off.
        seeds: [S] int64.
        positions: [S] int64, index that the token will have in its sequence.
        has_filters: False promises that no row has a filter, and saves looking for one.
        fixed_order: Rows are reduced in one order, however many there are.

    Returns:
        [S] int64 token ids.
    """
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    tokens = logits.argmax(dim=-1)
    drawn = (temperature > 0).nonzero().squeeze(1)
    if drawn.numel() == 0:
        return tokens
    chosen = logits[drawn]
    inverse_t = temperature[drawn].reciprocal().unsqueeze(1)
    filtered = (top_k[drawn] > 0) | (top_p[drawn] < 1) | (min_p[drawn] > 0)
    some = filtered.nonzero().squeeze(1)
    if has_filters and some.numel() > 0:
        rows = drawn[some]
        floor = _filter_floor(chosen[some], inverse_t[some], top_k[rows], top_p[rows], min_p[rows])
        chosen[some] = chosen[some].masked_fill(chosen[some] < floor, -torch.inf)
    noisy = chosen * inverse_t + gumbel_noise(seeds[drawn], positions[drawn], logits.shape[1])
    tokens[drawn] = noisy.argmax(dim=-1)
    return tokens


@kernel_takes(
    logits="S | _: float32", temperature="S: float32", seeds="S: int64", positions="S: int64"
)
def sample_part(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token: int
) -> Tensor:
    """Draw one token per row from a part of the vocabulary, as `sample` does without filters.

    Args:
        logits: [S, v] float32, of tokens `first_token` and on; of whole rows the best of all parts
            is what `sample` draws.

    Returns:
        [S, 2] float32: how good the token is, and its id, which must be below 2^24.
    """
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    drawn = (temperature > 0).nonzero().squeeze(1)
    if drawn.numel() > 0:
        noise = gumbel_noise(seeds[drawn], positions[drawn], logits.shape[1], first_token)
        logits[drawn] = logits[drawn] * temperature[drawn].reciprocal().unsqueeze(1) + noise
    values, tokens = logits.max(dim=-1)
    return torch.stack((values, (tokens + first_token).float()), dim=1)


@kernel_takes(parts="_ _ 2: float32")
def best_of_parts(parts: Tensor) -> Tensor:
    """Returns the best tokens [S] int64 of what `sample_part` has found in R parts of the
    vocabulary, [R, S, 2], in order of their tokens: the lowest id among equals."""
    best = parts[:, :, 0].argmax(dim=0, keepdim=True)
    return parts[:, :, 1].gather(0, best).squeeze(0).long()


def _filter_floor(
    logits: Tensor, inverse_t: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns the smallest logit that a row's filters keep: [S, 1] for `logits` [S, V]."""
    vocab_size = logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True).values
    largest = ordered[:, :1]
    floor = largest + min_p.unsqueeze(1).log() / inverse_t
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()
    floor = torch.maximum(floor, ordered.gather(1, k.unsqueeze(1) - 1))

    weights = ((ordered - largest) * inverse_t).exp().masked_fill(ordered < floor, 0.0)
    mass = weights.double().cumsum(dim=-1)
    wanted = mass[:, -1:] * top_p.unsqueeze(1)
    # The first token at which the mass is reached; the tokens of its value all stay.
    last = (mass < wanted).sum(dim=-1, keepdim=True).clamp(max=vocab_size - 1)
    nucleus = torch.where(top_p.unsqueeze(1) < 1, ordered.gather(1, last), -torch.inf)
    return torch.maximum(floor, nucleus)


@kernel_takes(logits="S | _", token_ids="S |: int64")
def topk_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities of one chosen token and of the k likeliest.

    Args:
        logits: [S, V] before any processing.
        token_ids: [S] int64.
        k: 0 gives the chosen token alone.

    Returns:
        (ids [S, 1 + k] int64 with the chosen token first, their logprobs [S, 1 + k] float32,
        ranks [S] int64: 1 + how many tokens are likelier than the chosen one).
    """
    wide = logits.float()
    chosen = token_ids.unsqueeze(1)
    ids = torch.cat((chosen, wide.topk(k, dim=-1).indices), dim=1)
    values = wide.gather(1, ids)
    ranks = (wide > values[:, :1]).sum(dim=-1) + 1
    return ids, values - wide.logsumexp(dim=-1, keepdim=True), ranks
