"""Gathering a step's inputs from rows, and bringing rows up to date, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_kernels.batch.batch_tables import RowTables, StepInputs


def prepare_inputs(
    idx_mapping: Tensor, query_start_loc: Tensor, rows: RowTables, out: StepInputs
) -> None:
    """Fill `out` for one step.

    Query token i of request r has position `num_computed[row] + i` and is the row's token of
    that position: a known one, or a draft. A position at or beyond `max_len + max_drafts` of the
    row reads some known token and gets slot -1, and so do all of a row that has `max_len` tokens
    computed: a row that runs on after its end changes nothing. The context lengths stop there
    too, so that attention stays inside the block table.

    Everything behind the last request (or token) is padding: length 0, position 0, slot -1.

    Args:
        idx_mapping: [R] int32, request of the step -> row; -1 is a padding request, which must
            have no query tokens.
        query_start_loc: [R + 1] int32.
        rows: State of all requests.
        out: Written completely, apart from the ids and block tables of padding.
    """
    live = idx_mapping >= 0
    row = idx_mapping.long().clamp(min=0)
    query_lens = query_start_loc.diff()
    num_tokens = int(query_start_loc[-1])
    request = torch.repeat_interleave(query_lens.long(), output_size=num_tokens)
    token = torch.arange(num_tokens, device=idx_mapping.device)
    token_row = row[request]

    computed, max_len = rows.num_computed[token_row], rows.max_len[token_row]
    place = computed + token - query_start_loc[request]
    inside = (computed < max_len) & (place < max_len + rows.max_drafts)
    position = place.clamp(max=rows.token_ids.shape[1] - 1).long()
    out.input_ids[:num_tokens] = rows.token_ids[token_row, position]
    out.positions[:num_tokens] = position
    block_size = rows.block_size
    block = torch.div(place, block_size, rounding_mode="floor")
    block = block.clamp(max=rows.block_table.shape[1] - 1)
    slot = rows.block_table[token_row, block].long() * block_size + place % block_size
    out.slot_mapping[:num_tokens] = torch.where(inside, slot, -1)
    out.positions[num_tokens:] = 0
    out.slot_mapping[num_tokens:] = -1

    num_reqs = idx_mapping.shape[0]
    limit = rows.max_len[row] + rows.max_drafts
    seq_len = torch.minimum(rows.num_computed[row] + query_lens, limit)
    out.seq_lens[:num_reqs] = torch.where(live, seq_len, 0)
    out.seq_lens[num_reqs:] = 0
    out.block_tables[:num_reqs] = rows.block_table[row]


def post_update(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    rows: RowTables,
    num_decodes: int = 0,
) -> None:
    """Advance rows by one step: the sampled tokens where there are any, and computed positions.

    The KV of drafts that were not accepted does not count as computed: the last known token is
    always still to be computed. A row with `max_len` tokens has nothing more to compute.

    Args:
        idx_mapping: [R] int32, request of the step -> row; -1 is skipped.
        query_start_loc: [R + 1] int32.
        sampled: [R, W] int64, the tokens for positions `total_len[row]` and on, then -1; only -1:
            the request sampled none.
        rows: `num_computed`, `total_len` and `token_ids` are updated. Tokens at or beyond
            `max_len` are dropped. Where there are `num_taken`, they become what the step has
            taken into states.
        num_decodes: Leading requests whose states have taken in what was computed before the
            step, and none of its tokens; those of others have taken in all.
    """
    live = idx_mapping >= 0
    row = idx_mapping[live].long()
    query_lens = query_start_loc.diff()[live]
    computed = rows.num_computed[row] + query_lens
    if rows.num_taken is not None:
        is_decode = torch.arange(len(idx_mapping), device=row.device)[live] < num_decodes
        rows.num_taken[row] = torch.where(is_decode, computed - query_lens, computed)
    for token in sampled[live].unbind(1):
        length, max_len = rows.total_len[row], rows.max_len[row]
        appended = (token >= 0) & (length < max_len)
        at = (row[appended], length[appended].long())
        rows.token_ids[at] = token[appended].to(rows.token_ids.dtype)
        rows.total_len[row] = length + appended.int()
    length, max_len = rows.total_len[row], rows.max_len[row]
    computed = torch.where(length < max_len, torch.minimum(computed, length - 1), max_len)
    rows.num_computed[row] = computed


def write_drafts(idx_mapping: Tensor, drafts: Tensor, vocab_size: int, rows: RowTables) -> None:
    """Put drafts behind the known tokens of rows, for the next step to compute.

    Args:
        idx_mapping: [R] int32, request of the step -> row; -1 is skipped.
        drafts: [R, K] int64, for positions `total_len[row]` and on; what no vocabulary has
            becomes token 0.
        vocab_size: Tokens that the model knows.
        rows: `token_ids` is written, as far as it goes.
    """
    live = idx_mapping >= 0
    row = idx_mapping[live].long()
    for k, draft in enumerate(drafts[live].unbind(1)):
        position = rows.total_len[row].long() + k
        inside = position < rows.token_ids.shape[1]
        token = torch.where((draft >= 0) & (draft < vocab_size), draft, 0)
        at = (row[inside], position[inside])
        rows.token_ids[at] = token[inside].to(rows.token_ids.dtype)


def write_pieces(
    addresses: Tensor, tables: Sequence[Tensor], packed: Tensor, num_pieces: int, longest: int
) -> None:
    """Write P pieces of words, each to its place in one of the tables.

    Args:
        addresses: [tables] int64, where the tables begin.
        tables: Flat int32, written. Pieces must not overlap there.
        packed: int32 words, on the device or in pinned memory of the host. First what describes
            the pieces, [P, 4] int64: table, its first word that is written, the piece's first
            word in `packed`, number of words. Then the pieces.
        longest: Words of the longest piece.
    """
    described = packed[: 8 * num_pieces].view(torch.int64).view(-1, 4)
    for table, first, start, count in described.tolist():
        assert count <= longest
        tables[table][first : first + count] = packed[start : start + count]


def copy_blocks(pages: Tensor, copies: Tensor) -> None:
    """Copy blocks of the KV cache: `pages[:, target] = pages[:, source]` for each of C pairs.

    Args:
        pages: [slots, blocks, bytes of a page] uint8, contiguous; written.
        copies: [C, 2] int32, pairs (source, target). No target is a source or a target of another
            pair. Those whose source is negative are none.
    """
    source, target = copies[copies[:, 0] >= 0].long().unbind(1)
    pages[:, target] = pages[:, source]
