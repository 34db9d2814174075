"""Gathering a step's inputs from rows, and bringing rows up to date: what every step does by NumPy,
which takes a third of torch's time for so few numbers, and the rest in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem_kernels.batch.batch_tables import GroupTables, RowTables, StepInputs
from tandem_kernels.reference.layouts import ROWS, STEP, kernel_takes


@kernel_takes(
    idx_mapping="R: int32",
    query_start_loc="R+1: int32",
    groups={"rows": ROWS, "inputs": STEP, "addresses": "G 3: int64", "sizes": "G 2: int32"},
)
def prepare_inputs(idx_mapping: Tensor, query_start_loc: Tensor, groups: GroupTables) -> None:
    """Fill the inputs of all `groups` for one step, of which they share all but slots and blocks.

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
        groups: Inputs are written completely, apart from the ids and block tables of padding.
    """
    tokens = _prepare_tokens(idx_mapping, query_start_loc, groups.rows[0], groups.inputs[0])
    for rows, out in zip(groups.rows, groups.inputs, strict=True):
        _prepare_blocks(tokens, rows, out)


class _Tokens(NamedTuple):
    """Says where a step's tokens are, whatever holds their KV.

    Attributes:
        rows: [R], of the requests.
        row: [T], of the tokens.
        place: [T], in their rows.
        inside: [T] bool, those that have a slot.
    """

    rows: NDArray[Any]
    row: NDArray[Any]
    place: NDArray[Any]
    inside: NDArray[Any]


def _prepare_tokens(
    idx_mapping: Tensor, query_start_loc: Tensor, rows: RowTables, out: StepInputs
) -> _Tokens:
    """Fills what groups share."""
    starts = query_start_loc.numpy()
    request_row = idx_mapping.numpy()
    row = np.maximum(request_row, 0)
    query_lens = np.diff(starts)
    num_tokens, num_reqs = int(starts[-1]), len(row)
    computed, max_len = rows.num_computed.numpy()[row], rows.max_len.numpy()[row]
    limit = max_len + rows.max_drafts

    def of_tokens(numbers: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(numbers, query_lens)

    token_row = of_tokens(row)
    place = np.arange(num_tokens) + of_tokens(computed - starts[:-1])
    inside = of_tokens(computed < max_len) & (place < of_tokens(limit))
    token_ids, positions = rows.token_ids.numpy(), out.positions.numpy()
    position = np.minimum(place, token_ids.shape[1] - 1)
    out.input_ids.numpy()[:num_tokens] = token_ids[token_row, position]
    positions[:num_tokens] = position
    positions[num_tokens:] = 0
    seq_lens = out.seq_lens.numpy()
    seq_lens[:num_reqs] = np.where(request_row >= 0, np.minimum(computed + query_lens, limit), 0)
    seq_lens[num_reqs:] = 0
    return _Tokens(row, token_row, place, inside)


def _prepare_blocks(tokens: _Tokens, rows: RowTables, out: StepInputs) -> None:
    """Fills slots and block tables of a group."""
    place, num_tokens = tokens.place, len(tokens.place)
    block_table, slot_mapping = rows.block_table.numpy(), out.slot_mapping.numpy()
    block = np.minimum(place // rows.block_size, block_table.shape[1] - 1)
    slot = block_table[tokens.row, block] * np.int64(rows.block_size) + place % rows.block_size
    slot_mapping[:num_tokens] = np.where(tokens.inside, slot, -1)
    slot_mapping[num_tokens:] = -1
    out.block_tables.numpy()[: len(tokens.rows)] = block_table[tokens.rows]


@kernel_takes(idx_mapping="R: int32", query_start_loc="R+1: int32", sampled="R _: int64", rows=ROWS)
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
    request_row = idx_mapping.numpy()
    live = request_row >= 0
    row = request_row[live]
    query_lens = np.diff(query_start_loc.numpy())[live]
    num_computed, total_len = rows.num_computed.numpy(), rows.total_len.numpy()
    computed, max_len = num_computed[row] + query_lens, rows.max_len.numpy()[row]
    if rows.num_taken is not None:
        is_decode = np.nonzero(live)[0] < num_decodes
        rows.num_taken.numpy()[row] = np.where(is_decode, computed - query_lens, computed)
    token_ids, length = rows.token_ids.numpy(), total_len[row]
    for token in sampled.numpy()[live].T:
        appended = (token >= 0) & (length < max_len)
        token_ids[row[appended], length[appended]] = token[appended]
        length = length + appended
    total_len[row] = length
    num_computed[row] = np.where(length < max_len, np.minimum(computed, length - 1), max_len)


@kernel_takes(idx_mapping="R: int32", drafts="R _ |: int64", rows=ROWS)
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


@kernel_takes(addresses="_: int64", tables="_: int32", packed="_ @8: int32")
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


@kernel_takes(pages="_ _ | _", copies="_ 2: int32")
def copy_blocks(pages: Tensor, copies: Tensor) -> None:
    """Copy blocks of the KV cache: `pages[:, target] = pages[:, source]` for each of C pairs.

    Args:
        pages: [slots, blocks, bytes of a page] uint8, contiguous; written.
        copies: [C, 2] int32, pairs (source, target). No target is a source or a target of another
            pair. Those whose source is negative are none.
    """
    source, target = copies[copies[:, 0] >= 0].long().unbind(1)
    pages[:, target] = pages[:, source]
