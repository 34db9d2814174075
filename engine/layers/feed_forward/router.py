"""The router of a mixture of experts: which experts each token goes to, and how much each counts.

Some experts choose for themselves (`Router.leaves_choice`): the router then computes the norm of
the rows and the logits alone. Sources: Shazeer et al. (arXiv 1701.06538) for the top k of a
softmax; DeepSeek-V3 (arXiv 2412.19437, 2.1.2) for sigmoid scores, a bias that counts in the choice
alone, and groups of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.feed_forward.expert_share import ExpertShare
from engine.layers.float32_sums import float32_sums
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from tandem_kernels import ops
from tandem_kernels.experts.router_shapes import norms_rows, takes_router

_WHOLE_NUMBERS = frozenset({"I32", "I64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Says how a router chooses; see `tandem_kernels.reference.experts.route_tokens`."""

    top_k: int
    sigmoid: bool = False
    renormalise: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    has_bias: bool = False
    has_logit_bias: bool = False
    has_scales: bool = False
    root_softplus: bool = False
    table_size: int = 0

    @property
    def is_plain(self) -> bool:
        """Returns whether the experts chosen are those of the largest logits, with weights of the
        softmax alone."""
        other = self.sigmoid or self.root_softplus or self.table_size > 0
        return not (other or self.has_bias or self.has_scales) and self.num_groups == 1


class Router(nn.Module):
    """[T, H] -> (weights [T, k] float32, experts [T, k] int32, as this rank numbers its own). Whole
    on every rank, in float32 from the logits on.

    Args:
        share: Of the experts; None: all are on this rank.
        norm: Of what it reads; None: that is normed already.

    Attributes:
        own_numbers: See `tandem_kernels.reference.experts.route_tokens`; overwritten where experts
            move.
        loads: [slots of this rank] int64, to which routed tokens are added; None: they are not
            counted.
    """

    bias: nn.Parameter | None
    logit_bias: nn.Parameter | None
    scales: nn.Parameter | None
    table: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        options: RouterOptions,
        shard: Shard,
        share: ExpertShare | None = None,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.options, self.norm = options, norm
        self.own_numbers = None if share is None else share.own_numbers(shard.device)
        self.loads: Tensor | None = None
        self.gemms = shard.gemms
        self.weight = shard.parameter(num_experts, hidden_size)
        self.bias, self.logit_bias, self.scales = (
            shard.parameter(num_experts, dtype=torch.float32) if has_one else None
            for has_one in (options.has_bias, options.has_logit_bias, options.has_scales)
        )
        self.table = None
        if options.table_size:
            size = options.table_size, options.top_k
            self.table = shard.parameter(*size, dtype=torch.int32)

    def forward(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses for `x` [T, H]; `slot_mapping` [T] int64, or with a table the ids of tokens; -1:
        padding."""
        return self.choose(x if self.norm is None else self.norm(x), slot_mapping)

    def choose(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses for `x` [T, H] that has been through the router's own norm."""
        return self._chosen(self._logits(x), self.logit_bias, slot_mapping)

    def choose_by(self, logits: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses by `logits` [T, E] as `normed_logits` gives them."""
        return self._chosen(logits, None, slot_mapping)

    def _chosen(
        self, logits: Tensor, logit_bias: Tensor | None, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor]:
        options = self.options
        return ops.route_tokens(
            logits,
            slot_mapping,
            self.bias,
            options.top_k,
            sigmoid=options.sigmoid,
            renormalise=options.renormalise,
            scaling=options.scaling,
            num_groups=options.num_groups,
            top_groups=options.top_groups,
            logit_bias=logit_bias,
            expert_scales=self.scales,
            own_numbers=self.own_numbers,
            loads=self.loads,
            root_softplus=options.root_softplus,
            table=self.table,
        )

    def norms_rows(self, x: Tensor) -> bool:
        """Returns whether `normed_logits` takes rows [T, H], by which `choose_by` then chooses."""
        may_fuse = self.norm is None and not self.gemms.deterministic
        return may_fuse and norms_rows(x, self.weight)

    def takes_rows(self, x: Tensor) -> bool:
        """Returns whether `normed_logits` takes rows [T, H] of a block with a shared expert: fewer
        than `norms_rows` says."""
        return self.norm is None and takes_router(x, self.weight)

    def leaves_choice(self, x: Tensor) -> bool:
        """Returns whether `normed_logits` takes rows [T, H], by which experts are then chosen as
        this would."""
        uncounted = self.own_numbers is None and self.loads is None
        return self.options.is_plain and uncounted and takes_router(x, self.weight)

    def normed_logits(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Computes few rows [T, H] of the residual stream -> (logits [T, E], with their bias, and
        the normed rows)."""
        return ops.normed_router(x, norm.weight, norm.eps, self.weight, self.logit_bias)

    def _logits(self, x: Tensor) -> Tensor:
        sums = float32_sums(x, self.weight, self.gemms)
        return F.linear(x.float(), self.weight.float()) if sums is None else sums

    def checkpoint_weights(
        self, weight: str, bias: str, logit_bias: str, scales: str, norm: str, table: str
    ) -> Iterator[CheckpointWeight]:
        for parameter, name in (
            (self.weight, weight),
            (self.bias, bias),
            (self.logit_bias, logit_bias),
            (self.scales, scales),
        ):
            if parameter is not None:
                yield CheckpointWeight(name, parameter, tuple(parameter.shape))
        if self.table is not None:
            shape, count = tuple(self.table.shape), len(self.weight)
            yield CheckpointWeight(table, self.table, shape, stored=_WHOLE_NUMBERS, below=count)
        if self.norm is not None:
            yield self.norm.scaled_weight(norm)
