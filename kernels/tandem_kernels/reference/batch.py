"""Gathering a step's inputs from rows, and bringing rows up to date, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.batch_tables import RowTables, StepInputs


def prepare_inputs(
    idx_mapping: Tensor, query_start_loc: Tensor, rows: RowTables, out: StepInputs
) -> None:
    """Fill `out` for one step.

    Query token i of request r has position `num_computed[row] + i` and is the row's token of
    that position. A position at or beyond the row's `max_len` reads some known token and gets
    slot -1: a row that runs on after its end changes nothing. The context lengths stop at
    `max_len` too, so that attention stays inside the row's blocks.

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

    position = rows.num_computed[token_row] + token - query_start_loc[request]
    inside = position < rows.max_len[token_row]
    position = position.clamp(max=rows.token_ids.shape[1] - 1).long()
    out.input_ids[:num_tokens] = rows.token_ids[token_row, position]
    out.positions[:num_tokens] = position
    block_size = rows.block_size
    block = torch.div(position, block_size, rounding_mode="floor")
    block = block.clamp(max=rows.block_table.shape[1] - 1)
    slot = rows.block_table[token_row, block].long() * block_size + position % block_size
    out.slot_mapping[:num_tokens] = torch.where(inside, slot, -1)
    out.positions[num_tokens:] = 0
    out.slot_mapping[num_tokens:] = -1

    num_reqs = idx_mapping.shape[0]
    seq_len = torch.minimum(rows.num_computed[row] + query_lens, rows.max_len[row])
    out.seq_lens[:num_reqs] = torch.where(live, seq_len, 0)
    out.seq_lens[num_reqs:] = 0
    out.block_tables[:num_reqs] = rows.block_table[row]


def post_update(
    idx_mapping: Tensor, query_start_loc: Tensor, sampled: Tensor, rows: RowTables
) -> None:
    """Advance rows by one step: computed positions, and the sampled token where there is one.

    Args:
        idx_mapping: [R] int32, request of the step -> row; -1 is skipped.
        query_start_loc: [R + 1] int32.
        sampled: [R] int64, token for position `total_len[row]`; -1: the request sampled none.
        rows: `num_computed`, `total_len` and `token_ids` are updated. A token at or beyond
            `max_len` is dropped.
    """
    live = idx_mapping >= 0
    row = idx_mapping[live].long()
    rows.num_computed[row] += query_start_loc.diff()[live]
    token = sampled[live]
    length = rows.total_len[row]
    appended = (token >= 0) & (length < rows.max_len[row])
    row, length, token = row[appended], length[appended], token[appended]
    rows.token_ids[row, length.long()] = token.to(rows.token_ids.dtype)
    rows.total_len[row] = length + 1


def apply_staged_writes(
    base: Tensor, row_ids: Tensor, starts: Tensor, cu_lens: Tensor, values: Tensor
) -> None:
    """Write E ragged pieces: `base[row_ids[e], starts[e]:][:n] = values[cu_lens[e]:cu_lens[e+1]]`.

    Args:
        base: [rows, C], written.
        row_ids: [E] int32.
        starts: [E] int32, first column of each piece.
        cu_lens: [E + 1] int32, bounds of the pieces in `values`.
        values: Same dtype as `base`. Pieces must not overlap in `base`.
    """
    lens = cu_lens.diff().long()
    edit = torch.repeat_interleave(lens, output_size=values.shape[0])
    column = torch.arange(values.shape[0], device=base.device) - cu_lens[edit] + starts[edit]
    base[row_ids[edit].long(), column] = values
