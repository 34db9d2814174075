"""The feed-forward block of a mixture of experts.

    x ─┬─ router ─ which experts, how much each ─┐
       ├─ this rank's experts ───────────────────┴─(+)─ all-reduce ─▶ residual stream
       └─ shared expert, if there is one ──────────┘

Each rank has a slice of every expert, as of any feed-forward block, or some experts as a whole
(expert parallelism). Where ranks have the same tokens, these need not travel, and one all-reduce
completes the layer; else a `TokenExchange` brings them together and the sums back, and the shared
expert computes a rank's own. In recorded steps of few tokens the shared expert runs beside the
others, which leave the matrix units idle.

On one rank, experts whose method can do so compute few rows in three launches: the norm with the
router, the choice with the first GEMM, and the second GEMM adds to the residual stream. Beside a
shared expert the norm is in the router, too: that expert then begins with the choice, and the
others, which wait for all launches in front of them, wait less for it. A layer of Qwen3.5-35B-A3B
takes one row 56 us so, and 63 with a norm by itself (one H200). Where all weights are plain, both
GEMMs compute the shared expert, too, and nothing is on a stream of its own. Sources: Shazeer et al.
(arXiv 1701.06538); DeepSeekMoE (arXiv 2401.06066) for shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.layers.expert_methods.base import PROJECTIONS, ExpertLayer, ExpertPart, ExpertSizes
from engine.layers.expert_methods.choice import expert_method
from engine.layers.expert_methods.stacked import STACKED_NAMES, bias_weights
from engine.layers.feed_forward.expert_share import ExpertShare
from engine.layers.feed_forward.router import Router, RouterOptions
from engine.layers.feed_forward.shared_expert import SharedExpert
from engine.layers.linear import ReplicatedLinear, RowParallelLinear
from engine.layers.methods.registry import UnsupportedScheme
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import PairOutputs, PartialSum, UnnormedSum
from engine.layers.shard import CheckpointWeight, Shard, unread
from engine.layers.side_stream import SideStream, fork, is_recording, side_stream
from tandem_kernels.elementwise.gate_form import GateForm, has_gate

PROJECTION_NAMES = ("gate_proj", "up_proj", "down_proj")


class Experts(ExpertLayer):
    """`x` [T, H], weights [T, k] float32 and experts [T, k] int32 -> [T, H]: the weighted sum of
    each token's experts, of this rank's units alone. Which tensors hold them is the method's
    matter.

    Args:
        names: The checkpoint's names of gate, up and down; "": there is no gate.
        biases: Both projections have one.
        stacked: The checkpoint has the tensors of all experts in one; see
            `engine.layers.expert_methods.stacked`.
        gate: None: SiLU.
    """

    def __init__(
        self,
        share: ExpertShare,
        hidden_size: int,
        intermediate_size: int,
        shard: Shard,
        names: tuple[str, str, str] = PROJECTION_NAMES,
        *,
        biases: bool = False,
        stacked: bool = False,
        gate: GateForm | None = None,
    ) -> None:
        super().__init__()
        self.names, self.stacked, self.gate = names, stacked, gate
        modules = STACKED_NAMES if stacked else tuple(f"0.{name}" for name in names if name)
        self.method = expert_method(shard, shard.scheme(*modules), gate)
        self.fixed_order = shard.gemms.deterministic
        ranks, count = shard.place.expert_ranks, len(share.held)
        start, width = 0, intermediate_size
        if not ranks.are_whole:
            start, width = _units_of(shard, intermediate_size, self.method.unit)
        self.sizes = ExpertSizes(
            hidden_size,
            intermediate_size,
            start,
            width,
            share.total,
            share.held,
            has_gate(gate),
            ranks.size if ranks.are_whole else 1,
        )
        self.b13 = shard.parameter(count, 2 * width) if biases else None
        has_b2 = biases and (ranks.are_whole or ranks.rank == 0)
        self.b2 = shard.parameter(count, hidden_size) if has_b2 else None
        self.method.create(self, shard)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return self.method.apply(self, x, weights, experts)

    def unsummed(self, x: Tensor, weights: Tensor, experts: Tensor) -> PairOutputs:
        """Computes what `forward` sums, [T * k, H]; or the sums [T, H], where the method adds up
        this many rows itself."""
        if not self.method.leaves_sums(self, experts.numel()):
            return PairOutputs(self(x, weights, experts), None)
        parts = self.method.apply(self, x, weights, experts, summed=False)
        return PairOutputs(parts, experts)

    def add_routed(
        self,
        x: Tensor,
        logits: Tensor,
        slot_mapping: Tensor,
        residual: Tensor,
        options: RouterOptions,
    ) -> None:
        """Adds to the stream `residual` [T, H] what the experts that `logits` [T, E] choose make
        of `x` [T, H]. `slot_mapping` [T] int64; -1: padding."""
        self.method.add_routed(
            self,
            x,
            logits,
            slot_mapping,
            residual,
            options.top_k,
            renormalise=options.renormalise,
            scaling=options.scaling,
        )

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        if self.stacked:
            yield from self.method.stacked_weights(self, prefix)
            if self.b13 is not None:
                yield from bias_weights(self, prefix)
            return
        held = {expert: own for own, expert in enumerate(self.sizes.held)}
        for expert in range(self.sizes.total):
            own = held.get(expert, 0)
            for name, projection in zip(self.names, PROJECTIONS, strict=True):
                if not name:
                    continue
                part = ExpertPart(f"{prefix}.{expert}.{name}", own, projection)
                weights = self.method.checkpoint_weights(self, part)
                yield from weights if expert in held else map(unread, weights)


def _units_of(shard: Shard, intermediate_size: int, unit: int) -> tuple[int, int]:
    """Returns (start, count) of the units of every expert on this rank, for a method's `unit`."""
    try:
        return shard.part_of_units(intermediate_size, unit)
    except ValueError as error:
        raise UnsupportedScheme(
            f"{shard.prefix}: units of an expert stay together with their scales, and {error}: "
            "choose a smaller tensor_parallel_size, or --enable-expert-parallel"
        ) from error


class LatentProjections(nn.Module):
    """Projects what routed experts read, [T, H] -> [T, L], and their sum. A norm of the sum needs
    it whole: ranks add up their parts first, and then each projects a part of its norm.

    Args:
        names: The checkpoint's names of the projections, and of the norm; "": there is none.
    """

    def __init__(
        self, hidden_size: int, size: int, eps: float, shard: Shard, names: tuple[str, str, str]
    ) -> None:
        super().__init__()
        inward, outward, norm = self.names = names
        self.group = shard.tp
        self.into = ReplicatedLinear(hidden_size, size, shard.at(inward))
        self.norm = RMSNorm(size, eps, shard) if norm else None
        self.out = (RowParallelLinear if norm else ReplicatedLinear)(
            size, hidden_size, shard.at(outward)
        )

    def outward(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum over its group, [T, H], of such a part [T, L]."""
        if self.norm is None:
            # A sum of what ranks have projected is what their sum would be.
            whole: Tensor = self.out(x)
            return whole
        assert isinstance(self.out, RowParallelLinear)
        normed = self.norm(self.group.all_reduce(x) if len(x) else x)
        count = normed.shape[1] // self.group.size
        return self.out.partial(normed.narrow(1, self.out.start, count))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        inward, outward, norm = (f"{prefix}.{name}" for name in self.names)
        yield from self.into.checkpoint_weights(inward)
        yield from self.out.checkpoint_weights(outward)
        if self.norm is not None:
            yield from self.norm.checkpoint_weights(norm)


class SparseMLP(nn.Module):
    """Adds the routed experts' and the shared expert's output to the residual stream.

    Args:
        norm: Of what is added; None: none.
        input_norm: Of what experts read, where the router reads another norm; None: both read the
            same.
        latents: Project what experts read, and their sum; None: neither is.

    Attributes:
        leaves_sums: The sum over a token's experts may be left to what reads it.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: SharedExpert | None,
        shard: Shard,
        *,
        norm: RMSNorm | None = None,
        input_norm: RMSNorm | None = None,
        latents: LatentProjections | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.latents = latents
        self.experts = experts
        self.shared = shared
        self.norm, self.input_norm = norm, input_norm
        self.group = shard.tp
        self.exchange = shard.place.token_exchange
        is_one_rank = shard.tp.size == 1 and shard.place.exchange is None
        self.leaves_sums = is_one_rank and norm is None and latents is None
        self.is_alone = self.leaves_sums and shared is None
        self.fused_rows = shard.gemms.fused_router_rows if self.leaves_sums else 0
        self.beside_rows = shard.gemms.beside_rows
        if self.beside_rows > 0 and shard.device.type == "cuda":
            side_stream(shard.device)

    def forward(self, stream: ResidualStream, norm: RMSNorm | None, slot_mapping: Tensor) -> None:
        """Computes the block of the norm of the stream, [T, H]; None: of the stream itself.
        `slot_mapping` [T] int64; -1: padding, which no expert computes."""
        if norm is not None and self._adds_normed(stream, norm, slot_mapping):
            return
        if norm is None or not self._adds_itself(stream, norm, slot_mapping):
            self._add(stream.read(norm), stream, slot_mapping)

    def _adds_normed(self, stream: ResidualStream, norm: RMSNorm, slot_mapping: Tensor) -> bool:
        """Computes the block with a shared expert, and the norm in its router. Returns whether it
        has done so, which depends on the number of rows alone, as graphs are recorded."""
        rows, shared, router = stream.settled(), self.shared, self.router
        if rows is None or shared is None or self.input_norm is not None:
            return False
        if len(rows) > min(self.fused_rows, self.beside_rows) or not router.takes_rows(rows):
            return False
        logits, normed = router.normed_logits(rows, norm)
        experts = self.experts
        weights = shared.plain_weights(experts.gate)
        if weights is None or not experts.method.takes_beside(experts):
            self._add_sums(normed, shared, stream, slot_mapping, logits)
            return True
        shares, chosen = router.choose_by(logits, slot_mapping)
        parts, beside = experts.method.apply_beside(experts, normed, shares, chosen, weights)
        stream.add(PairOutputs(parts, chosen, beside, shared.gate_of(normed)))
        return True

    def _adds_itself(self, stream: ResidualStream, norm: RMSNorm, slot_mapping: Tensor) -> bool:
        """Computes the block with the norm in its router, and in three launches if experts choose
        for themselves. Returns whether it has done so: that depends on the number of rows alone, as
        graphs are recorded."""
        rows, router = stream.settled() if self.is_alone else None, self.router
        if rows is None or len(rows) > self.fused_rows or self.input_norm is not None:
            return False
        if not router.norms_rows(rows):
            return False
        experts, options = self.experts, router.options
        logits, normed = router.normed_logits(rows, norm)
        if router.leaves_choice(rows) and experts.method.takes_logits(
            experts, len(rows), options.top_k
        ):
            experts.add_routed(normed, logits, slot_mapping, rows, options)
            return True
        pairs = experts.unsummed(normed, *router.choose_by(logits, slot_mapping))
        stream.add(pairs.parts if pairs.experts is None else pairs)
        return True

    def _add(self, x: Tensor, stream: ResidualStream, slot_mapping: Tensor) -> None:
        """Computes the block of the normed `x`, [T, H]."""
        if self.is_alone:
            pairs = self.unsummed(x, slot_mapping)
            stream.add(pairs.parts if pairs.experts is None else pairs)
            return
        is_few = len(x) <= self.beside_rows
        if self.shared is not None and is_few and self.leaves_sums:
            self._add_sums(x, self.shared, stream, slot_mapping)
            return
        if self.shared is not None and is_few and is_recording(x):
            side = SideStream(x.device)
            with side.beside():
                shared = self.shared(x)
            out = self.routed(x, slot_mapping)
            side.join()
            out.add_(shared)
        else:
            out = self.routed(x, slot_mapping)
            if self.shared is not None:
                self.shared.add_to(out, x)
        if self.norm is not None:
            stream.add(UnnormedSum(self.group.all_reduce(out), self.norm.form))
            return
        waits = self.group.fuses_norm
        stream.add(PartialSum(out, self.group) if waits else self.group.all_reduce(out))

    def _add_sums(
        self,
        x: Tensor,
        shared: SharedExpert,
        stream: ResidualStream,
        slot_mapping: Tensor,
        logits: Tensor | None = None,
    ) -> None:
        """Leaves all sums of `x` [T, H] to what reads the stream. `logits` [T, E]: the router's;
        None: they are still to be computed."""
        side = fork(x, self.beside_rows)
        with side.beside():
            beside, gate = shared.ungated(x)
        if logits is None:
            pairs = self.unsummed(x, slot_mapping)
        else:
            pairs = self.experts.unsummed(x, *self.router.choose_by(logits, slot_mapping))
        side.join()
        stream.add(replace(pairs, beside=beside, gate=gate))

    def take_part(self) -> None:
        """Computes what other ranks' tokens ask of this rank's experts, in a step in which it has
        none itself."""
        weight = self.router.weight
        no_slots = torch.empty(0, dtype=torch.int64, device=weight.device)
        self.routed(weight.new_empty((0, weight.shape[1])), no_slots)

    def unsummed(self, x: Tensor, slot_mapping: Tensor, given: Tensor | None = None) -> PairOutputs:
        """Returns what `routed` sums, of the stream's rows `x` [T, H]; where it `leaves_sums`.
        `given` [T, H]: experts read these, and `x` is what the router's own norm gives."""
        if given is not None:
            return self.experts.unsummed(given, *self.router.choose(x, slot_mapping))
        given = x if self.input_norm is None else self.input_norm(x)
        return self.experts.unsummed(given, *self.router(x, slot_mapping))

    def routed(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        """Returns this rank's part of the sum over its group, [T, H], of `x` [T, H]."""
        tokens, slots = self.exchange.gather(x, slot_mapping)
        chosen = self.router(tokens, slots)
        given = tokens if self.input_norm is None else self.input_norm(tokens)
        if self.latents is not None:
            given = self.latents.into(given)
        out = self.exchange.combine(self.experts(given, *chosen), len(x))
        return out if self.latents is None else self.latents.outward(out)
