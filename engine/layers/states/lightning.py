"""Lightning attention: linear attention whose heads forget at a pace of their own, whatever they
read. A request keeps one state, whatever its length.

    x ─┬─ q, k, v ─ norms and rotation, or SiLU ─ update and read the state ─ norm ─(×)─ o ─(+)
       └─ g ─ sigmoid ───────────────────────────────────────────────────────────┘

It is Mamba 2 with a group for each head, where v is x, k is B, q is C, each step is 1 and nothing
is passed on: `ops.mamba_scan` computes it. Heads are split over ranks, and so are the groups that
are normed together; ranks beyond their number norm a group together. Sources: Qin et al., Lightning
Attention-2 (arXiv 2401.04658); MiniMax-01 (arXiv 2501.08313), as transformers' `modeling_minimax`
has it; Ring-linear (arXiv 2510.19338), as published with Ring 2.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, repeated
from engine.layers.methods.base import ColumnPart, LinearPart
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.states.group_norm import means_over_ranks
from engine.layers.states.state_pages import StateInputs, states_of_pages
from kv_transfer.planes import heads_of_rank
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import KeptInputs

_STEP_OF_ONE = math.log(math.e - 1)
"""Its softplus is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSizes:
    """The sizes of a layer, over all ranks.

    Attributes:
        groups: Of neighbouring heads, which are normed together.
        eps: Of that norm.
        pace: Multiplies what a token makes each head forget.
        by_head: The checkpoint has query, key and value of a head behind each other.
        head_eps: Of norms of queries and keys, which then rotate; 0: SiLU is taken of them, and of
            values.
        head_order: See `engine.rope.Rotary.head_order`.
    """

    heads: int
    head_dim: int
    groups: int
    eps: float
    pace: float
    by_head: bool = False
    head_eps: float = 0.0
    head_order: tuple[int, ...] | None = None


class LightningAttention(nn.Module):
    """Adds lightning attention to the residual stream.

    Args:
        norm: Of what is added; None: none.
        drafting: Rows, and tokens of a decode at most, in an engine that drafts.
    """

    decays: Tensor
    steps: Tensor
    unit: Tensor
    skip: Tensor
    taps: Tensor

    def __init__(
        self,
        hidden_size: int,
        sizes: LightningSizes,
        shard: Shard,
        *,
        norm: RMSNorm | None = None,
        drafting: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.sizes, self.norm, self.group = sizes, norm, shard.tp
        self.hidden_size = hidden_size
        self.fixed_order = shard.gemms.deterministic
        self.first_head, self.heads = shard.part(sizes.heads)
        self.groups = heads_of_rank(sizes.groups, shard.tp.rank, shard.tp.size)
        self.inner = self.heads * sizes.head_dim
        self.channels = 3 * self.inner
        total = sizes.heads * sizes.head_dim
        gate = ColumnPart(self.first_head * sizes.head_dim, self.inner, total)
        # The parts of values, keys and queries are only counted here: see `checkpoint_weights`.
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, (gate, gate, gate, gate), shard, names=("qkv_proj", "g_proj")
        )
        self.norm_weight = shard.parameter(self.inner)
        self.q_weight = self.k_weight = None
        if sizes.head_eps:
            self.q_weight, self.k_weight = (
                shard.parameter(sizes.head_dim, dtype=torch.float32) for _ in range(2)
            )
        self.o_proj = RowParallelLinear(total, hidden_size, shard.at("o_proj"))
        like = torch.empty(0, dtype=shard.dtype, device=shard.device)
        for name, value in self._constants(like).items():
            self.register_buffer(name, value, persistent=False)
        self.kept: KeptInputs | None = None
        if drafting is not None:
            self.kept = KeptInputs.allocate(*drafting, self.channels, self.heads, like)

    def _constants(self, like: Tensor) -> dict[str, Tensor]:
        """Returns what `ops.mamba_scan` and `ops.causal_conv` are given in place of weights."""
        sizes = self.sizes
        own = range(self.first_head + 1, self.first_head + 1 + self.heads)
        paces = [-8 * head / sizes.heads * math.log(2) + math.log(sizes.pace) for head in own]
        wide = like.float()
        return {
            "decays": wide.new_tensor(paces),
            "steps": like.new_zeros((1, self.heads)),
            "unit": wide.new_full((self.heads,), _STEP_OF_ONE),
            "skip": wide.new_zeros(self.heads),
            "taps": like.new_ones((self.channels, 1)),
        }

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: Tensor, inputs: StateInputs
    ) -> None:
        """Attends for the normed `x`: [T, H]; `kv_cache`: [N, bytes of a page] uint8."""
        metadata, kept, sizes = inputs.metadata, self.kept, self.sizes
        projected = self.in_proj(x)
        mixed, gate = projected[:, : self.channels], projected[:, self.channels :]
        if sizes.head_eps:
            self._rotate(mixed, inputs)
        if kept is not None or not sizes.head_eps:
            # A convolution over one input adds the rows of tokens that are pending, and SiLU.
            mixed = ops.causal_conv(
                mixed,
                self.taps,
                mixed.new_empty((len(kv_cache), self.channels, 0)),
                metadata,
                activates=not sizes.head_eps,
                kept=None if kept is None else kept.convolved,
            )
        read = ops.mamba_scan(
            mixed,
            self.steps.expand(len(x), -1),
            self.decays,
            self.unit,
            self.skip,
            self.views(kv_cache),
            metadata,
            self.fixed_order,
            None if kept is None else kept.gates,
        ).flatten(1)
        means = means_over_ranks(read, gate, self.groups, sizes.groups, self.group, is_behind=True)
        given = self.norm_weight, sizes.eps, self.groups.count, means
        normed = ops.gated_group_norm(read, gate, *given, is_behind=True)
        self.o_proj.add_to(stream, normed, self.norm)

    def _rotate(self, mixed: Tensor, inputs: StateInputs) -> None:
        """Norms and rotates keys and queries of `mixed`, [T, values, keys and queries]."""
        places = inputs.places
        assert places is not None
        dim = self.sizes.head_dim
        for start, weight in ((self.inner, self.k_weight), (2 * self.inner, self.q_weight)):
            heads = mixed[:, start : start + self.inner].view(len(mixed), self.heads, dim)
            # Nothing is written to a cache: there are no keys beside these.
            nothing = heads[:, :0]
            pages = heads.new_empty((1, 2, 1, 1, dim))
            ops.rope_and_cache(
                heads, nothing, nothing, places.positions, places.cos_sin_cache, pages,
                inputs.slot_mapping, weight, weight, self.sizes.head_eps,
            )  # fmt: skip

    def views(self, kv_cache: Tensor) -> Tensor:
        """Returns the states [N, heads, head_dim, head_dim] float32 in the pages."""
        dim = self.sizes.head_dim
        return states_of_pages(kv_cache, (self.heads, dim, dim))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors."""
        sizes = self.sizes
        total = sizes.heads * sizes.head_dim
        for part in self._projected(prefix):
            yield from self.in_proj.method.checkpoint_weights(self.in_proj, part)
        first = self.first_head * sizes.head_dim
        yield CheckpointWeight(f"{prefix}.g_norm.weight", self.norm_weight, (total,), 0, first)
        # Queries are scaled where their norm has a weight.
        for weight, name, factor in (
            (self.q_weight, "q_norm", sizes.head_dim**-0.5), (self.k_weight, "k_norm", 1.0),
        ):  # fmt: skip
            if weight is not None:
                yield self._head_norm(f"{prefix}.{name}.weight", weight, factor)
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")

    def _head_norm(self, name: str, weight: Tensor, factor: float) -> CheckpointWeight:
        order = self._order()

        def fill(stored: Tensor) -> None:
            weight.copy_(stored.float()[order.to(stored.device)] * factor)

        return CheckpointWeight(name, weight, tuple(weight.shape), fill=fill)

    def _order(self) -> Tensor:
        """Returns which element of a checkpoint's head is element i of ours, [head_dim]."""
        order = self.sizes.head_order
        return torch.arange(self.sizes.head_dim) if order is None else torch.tensor(order)

    def _projected(self, prefix: str) -> Iterator[LinearPart]:
        """Yields values, keys and queries, of one tensor, and gates."""
        dim, hidden_size, total = self.sizes.head_dim, self.hidden_size, self.sizes.heads
        name, shape = f"{prefix}.qkv_proj", (3 * total * dim, hidden_size)
        kinds = (2, torch.arange(dim)), (1, self._order()), (0, self._order())
        if self.sizes.by_head:
            head = torch.arange(self.heads)[:, None] * (3 * dim)
            own = torch.cat([(head + kind * dim + order).flatten() for kind, order in kinds])
            rows = slice(0, self.channels)
            yield LinearPart(name, shape, 0, self.first_head * 3 * dim, rows, own)
        else:
            for place, (kind, order) in enumerate(kinds):
                rows = slice(place * self.inner, (place + 1) * self.inner)
                start = (kind * total + self.first_head) * dim
                yield LinearPart(name, shape, 0, start, rows, repeated(order, self.heads))
        rows = slice(self.channels, self.channels + self.inner)
        start = self.first_head * dim
        yield LinearPart(f"{prefix}.g_proj", (total * dim, hidden_size), 0, start, rows)
