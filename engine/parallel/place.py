"""The place of one rank in the parallel world."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore

from engine.config import EngineConfig, ParallelConfig
from engine.parallel.distributed import ParallelGroup, host_of, meet
from engine.parallel.peer_reducer import ReduceLimits
from engine.parallel.stage_link import StageLink
from engine.parallel.token_exchange import GatherScatter, Replicated, TokenExchange
from kv_transfer.stages import layers_of_stage

_CONNECT_TIMEOUT = timedelta(seconds=120)


def _alone() -> ParallelGroup:
    return ParallelGroup(0, 1)


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The place of one rank among those that share the experts of a layer.

    Attributes:
        are_whole: Each rank has whole experts, some of them; else a slice of every one.
        num_redundant: Copies of experts beyond one of each, on all ranks together, where experts
            move while the engine runs; None: they stay where they are.
    """

    rank: int
    size: int
    are_whole: bool = False
    num_redundant: int | None = None


@dataclass(frozen=True, slots=True)
class ParallelPlace:
    """The groups that one rank belongs to, and its layers. A group of size 1 does nothing.

    Attributes:
        layers: Global indices of the layers of this pipeline stage.
        tp: Ranks that split each layer's heads, feed-forward units and vocabulary.
        pp: Ranks with the other stages.
        ep: Ranks that share the experts; None: those of `tp`, a slice of every expert each.
        dp: Ranks that hold the same weights and other requests.
        exchange: See `token_exchange`; None: all ranks have the same tokens.
        movers: The ranks of `ep`, between which experts move; None: they stay where they are.
    """

    layers: range
    tp: ParallelGroup = field(default_factory=_alone)
    pp: StageLink = field(default_factory=StageLink)
    ep: ExpertRanks | None = None
    dp: ParallelGroup = field(default_factory=_alone)
    exchange: TokenExchange | None = None
    movers: ParallelGroup | None = None

    @property
    def with_fixed_experts(self) -> ParallelPlace:
        """Returns the place for layers whose experts never move, such as a drafter's."""
        ep = None if self.ep is None else replace(self.ep, num_redundant=None)
        return replace(self, ep=ep, movers=None)

    @property
    def token_exchange(self) -> TokenExchange:
        """Returns how tokens get to the ranks with their experts."""
        return self.exchange or Replicated()

    @property
    def expert_ranks(self) -> ExpertRanks:
        return self.ep or ExpertRanks(self.tp.rank, self.tp.size)

    def close(self) -> None:
        """Leaves all groups."""
        if self.movers is not None:
            self.movers.close()
        for group in (self.dp, self.pp, self.tp):
            group.close()


def take_place(
    config: EngineConfig, rank: int, device: torch.device, rendezvous: str, address: str
) -> ParallelPlace:
    """Meets the other ranks at `rendezvous` and returns the place of `rank`. Ranks are numbered
    group by group, and in each stage by stage. `address`: of this host, as in `rendezvous` unless
    given.

        rank       0 1 | 2 3      two data-parallel groups of two tensor-parallel ranks
        tp         0 1 | 2 3      share each layer
        dp         0 2 , 1 3      exchange tokens

    Raises:
        ConnectionError: Another rank is missing.
    """
    parallel = config.parallel
    size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    group, own = divmod(rank, parallel.group_size)
    stage, tp_rank = divmod(own, size)
    stores: dict[str, PrefixStore | None] = dict.fromkeys(("tp", "pp", "dp", "ep"))
    if parallel.num_ranks > size or parallel.eplb is not None:
        store = meet(rank, parallel.num_ranks, rendezvous, _CONNECT_TIMEOUT)
        numbers = {"tp": rank // size, "pp": group * size + tp_rank, "dp": own, "ep": 0}
        stores = {kind: PrefixStore(f"{kind}{number}", store) for kind, number in numbers.items()}

    def group_of(kind: str, number: int, count: int) -> ParallelGroup:
        fixed = config.device.deterministic
        return ParallelGroup(
            number, count, device, rendezvous, address=address, fixed_order=fixed,
            store=stores[kind],
        )  # fmt: skip

    tp = group_of("tp", tp_rank, size)
    pp = StageLink(stage, num_stages, device, stores["pp"], address or host_of(rendezvous), tp=tp)
    dp = group_of("dp", group, parallel.data_parallel_size)
    if device.type == "cuda" and parallel.all_reduce != "nccl":
        _share_memory(config, tp, dp)
    return ParallelPlace(
        layers_of_stage(config.model.num_layers, stage, num_stages),
        tp,
        pp,
        _expert_ranks(parallel, rank, tp_rank),
        dp,
        GatherScatter(dp) if dp.size > 1 else None,
        None if parallel.eplb is None else group_of("ep", rank, parallel.num_ranks),
    )


def _share_memory(config: EngineConfig, tp: ParallelGroup, dp: ParallelGroup) -> None:
    """Lets sums of `tp`, and the exchange of `dp`, go over memory that ranks share. Only those ask
    the spec for a width: not every model names one."""
    if tp.size == 1 and dp.size == 1:
        return
    all_reduce, num_rows = config.parallel.all_reduce, config.scheduler.max_num_batched_tokens
    dtype, width = getattr(torch, config.model.dtype), int(config.model.spec["hidden_size"])
    if tp.size > 1:
        limits = None if all_reduce == "auto" else ReduceLimits.parse(all_reduce)
        tp.share_memory(dtype, width, num_rows, limits)
    if dp.size > 1:
        dp.exchange_by_writes(dtype, width, num_rows)


def _expert_ranks(parallel: ParallelConfig, rank: int, tp_rank: int) -> ExpertRanks | None:
    """Returns who shares the experts of a layer: the ranks of all groups, or of one stage."""
    are_whole = parallel.enable_expert_parallel
    redundant = None if parallel.eplb is None else parallel.eplb.num_redundant_experts
    if parallel.data_parallel_size > 1:
        return ExpertRanks(rank, parallel.num_ranks, are_whole, redundant)
    size = parallel.tensor_parallel_size
    return ExpertRanks(tp_rank, size, True, redundant) if are_whole else None
