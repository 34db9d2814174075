"""A dense feed-forward block and a mixture of experts beside each other. Source: Gemma 4 (Google,
2026).

    x ─┬─ norm ─ dense ─────────── norm ─┐
       ├─ norm ─ router ─┐              (+)─ norm ─▶ residual stream
       └─ norm ─ experts ┴──────── norm ─┘

In recorded steps of few tokens the dense block runs beside the experts, as a shared expert does.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from engine.layers.feed_forward.mlp import DenseMLP
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import PairOutputs, UnnormedSum
from engine.layers.side_stream import fork
from tandem_kernels.elementwise.norm_forms import PairedExperts


class PairedMLP(nn.Module):
    """Adds the norm of the sum of what both blocks make of the stream, each with a norm of its own.

    Args:
        sparse: Norms its inputs itself.
        norms: Of what the dense block gives, and of what the experts give.
        norm: Of their sum.
    """

    def __init__(
        self, dense: DenseMLP, sparse: SparseMLP, norms: tuple[RMSNorm, RMSNorm], norm: RMSNorm
    ) -> None:
        super().__init__()
        self.dense, self.sparse = dense, sparse
        self.dense_norm, self.sparse_norm = norms
        self.norm = norm

    def forward(self, stream: ResidualStream, norm: RMSNorm | None, slot_mapping: Tensor) -> None:
        """Computes the blocks; `norm` is that of what the dense one reads. `slot_mapping` [T]
        int64; -1: padding, which no expert computes."""
        sparse, given = self.sparse, (norm, self.sparse.router.norm, self.sparse.input_norm)
        if sparse.leaves_sums and self.dense.input_form is None and all_there(given):
            x, routing, to_experts = stream.normed_by(*given)
            side = fork(x, sparse.beside_rows)
            with side.beside():
                dense = self.dense.partial(x)
            pairs = sparse.unsummed(routing, slot_mapping, to_experts)
            side.join()
        else:
            dense = self.dense.partial(stream.read_rows(norm, self.dense.input_form))
            routed = sparse.routed(stream.read(None), slot_mapping)
            if sparse.group.size > 1:
                both = sparse.group.all_reduce(torch.cat((dense, routed)))
                dense, routed = both[: len(dense)], both[len(dense) :]
            pairs = PairOutputs(routed, None)
        apart = self.dense_norm.form, self.sparse_norm.form
        paired = PairedExperts(pairs.parts, pairs.experts, *apart)
        stream.add(UnnormedSum(dense, self.norm.form, paired))


def all_there(norms: tuple[RMSNorm | None, ...]) -> TypeGuard[tuple[RMSNorm, ...]]:
    return None not in norms
