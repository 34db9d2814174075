"""Describes a step's requests to layers that keep a state of each request.

A state is right for one place of a sequence, and a decode with drafts computes tokens of which only
the accepted ones count. How many those are is known on the device alone, behind the last layer. So
what a step computes of a decode goes into its states one step later:

    places           0 ........ taken ........ computed ........ computed + query_len
                     | in the    | right, and    | this step's last token
                     | state     | pending       | and its drafts

    1. the state in the block is that behind the first `num_taken` tokens of the row
    2. a step takes the pending tokens in and writes the state: now it is that behind `computed`
    3. it goes on with its own tokens, which read the state and change nothing that stays
    4. it keeps the inputs of these by row, as they lie: the next step finds the pending ones there
    5. `ops.post_update` notes `num_taken`, once for all layers

A step reads and writes each state once, as without drafts, whatever their number. Keeping the
state behind each token instead writes it `query_len` times: at four tokens 2.5 times the bytes.
The order in which a state takes tokens in is the same as one by one, and so are its bits.

Blocks therefore never have a token that may be wrong: prompts are taken in at once, so what is
copied behind a block's end or sent to another node is a state that all of its tokens are in.

A kind of layer follows this with two things. Its operations take `PendingTokens` of the metadata
and rows of inputs (`KeptInputs`), and their reference says what they do in these terms. And it has
a `KeptInputs` for each layer, by row, where the engine drafts. `causal_conv` does both for
convolutions, and gives the operation behind it the pending tokens' rows as well:

    rows of what it returns     decode 0: [ most | query_len ]  decode 1: [ most | query_len ]  ...
                                             └ the last of `most` rows are the pending tokens
    then those of prompts, each `num_decodes * most` rows further than among the step's tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Says of each row which of its tokens its states have not taken in.

    Attributes:
        rows: [R] int32, row of each request; negative: padding.
        num_taken: [rows] int32, tokens that the row's states have taken in; 0: they are zeros,
            whatever lies in their block.
        most: Tokens of a decode at most, and so pending ones.
    """

    rows: Tensor
    num_taken: Tensor
    most: int


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Ragged batch of R requests, each with one block that holds its state.

    The first `num_decodes` requests have `decode_query_len` tokens each. Without pending tokens a
    request whose tokens are the first of its sequence (`seq_lens` equals their number) begins with
    a state of zeros, whatever its block holds: blocks are not cleared when they change hands.

    Attributes:
        blocks: [R] int32, block of each request. Nothing is read or written for `seq_lens` 0.
        query_start_loc: [R + 1] int32, request r owns tokens
            `query_start_loc[r] : query_start_loc[r + 1]`.
        seq_lens: [R] int32, tokens of the sequence with those of this step; 0: a padding request.
        num_decodes: Leading requests with `decode_query_len` tokens each.
        pending: Of decodes, in an engine that drafts; None: all tokens are taken in at once.
    """

    blocks: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_decodes: int
    decode_query_len: int = 1
    pending: PendingTokens | None = None

    @property
    def num_pending_rows(self) -> int:
        """Returns the rows that `causal_conv` returns besides those of the step's tokens."""
        return 0 if self.pending is None else self.num_decodes * self.pending.most

    def rows_of_step(self, lines: Tensor) -> Tensor:
        """Returns the rows [T, C] of the step's own tokens among `lines` [T + num_pending_rows, C],
        for layers whose convolution is all that they keep."""
        if self.pending is None or self.num_decodes == 0:
            return lines
        most, count = self.pending.most, self.num_decodes
        num_lines = count * (most + self.decode_query_len)
        decodes = lines[:num_lines].view(count, -1, lines.shape[1])[:, most:].flatten(0, 1)
        return torch.cat((decodes, lines[num_lines:]))

    def prompts(self) -> StateMetadata:
        """Returns the requests behind the decodes alone."""
        first = self.num_decodes
        return StateMetadata(
            self.blocks[first:], self.query_start_loc[first:], self.seq_lens[first:], 0
        )


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """Keeps of a layer what the last tokens of each row give it, as some of them are pending.

    Attributes:
        convolved: [rows, most, C], inputs of its convolution, token p at p % most.
        gates: [rows, 2 * most, G], what else its state takes in of a token, at p % (2 * most): a
            step writes its own while programs still read pending ones.
    """

    convolved: Tensor
    gates: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, most: int, channels: int, gates: int, like: Tensor
    ) -> KeptInputs:
        """Returns room for decodes of `most` tokens, of the dtype of `like` and on its device."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        return cls(zeros(num_rows, most, channels), zeros(num_rows, 2 * most, gates))
