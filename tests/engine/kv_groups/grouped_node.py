"""One engine, stepped in this process, or two that hand requests over; their transfer processes are
real."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import zmq

from engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from engine.contracts.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    KVTransferResult,
    PrefixAsk,
    SupplyFirstToken,
)
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.core.core import EngineCore
from engine.executor.abstract import Executor
from engine.executor.multiproc_executor import MultiprocExecutor
from engine.executor.uniproc_executor import UniprocExecutor
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams

TIMEOUT_S = 60.0


def engine_config(
    model: ModelConfig,
    *,
    block_size: int,
    num_blocks: int,
    tp_size: int = 1,
    chunk: int = 48,
    kv_transfer: KVTransferConfig | None = None,
    spreads_experts: bool = False,
) -> EngineConfig:
    return EngineConfig(
        engine_id=f"grouped-{secrets.token_hex(4)}",
        epoch=secrets.randbits(63),
        model=model,
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        parallel=ParallelConfig(
            tensor_parallel_size=tp_size, enable_expert_parallel=spreads_experts
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=chunk, async_scheduling=True
        ),
        kv_transfer=kv_transfer,
    )


@dataclass
class GroupedNode:
    """Runs one engine. `tokens[request id]`: what the engine has answered; `ended`: requests that
    have ended; `groups[request id]`: the data-parallel group that a prompt for a peer came to;
    `features[request id]`: what a drafter goes on with elsewhere.
    """

    config: EngineConfig
    core: EngineCore
    executor: Executor
    context: zmq.Context[zmq.Socket[bytes]] | None
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    results: list[KVTransferResult] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    features: dict[str, bytes] = field(default_factory=dict)
    asks: list[PrefixAsk] = field(default_factory=list)

    @classmethod
    def start(cls, config: EngineConfig) -> GroupedNode:
        context = None
        executor: Executor
        if config.parallel.num_ranks == 1:
            executor = UniprocExecutor(config)
        else:
            context = zmq.Context()
            executor = MultiprocExecutor(config, context)
        try:
            core = EngineCore(config, executor, lambda *_: None)
        except BaseException:
            # A context that is left to the garbage collector waits for its sockets for ever, in
            # the middle of some other test.
            executor.shutdown()
            if context is not None:
                context.destroy(linger=0)
            raise
        return cls(config, core, executor, context)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        kv: KVTransferParams | None = None,
        num_choices: int = 1,
        prefix_peer: str = "",
        group: int = -1,
    ) -> None:
        """Adds a request. Several choices are named `name.0`, `name.1` ..., unless the node only
        computes the prompt for another."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        names = tuple(f"{request_id}.{i}" for i in range(num_choices))
        if num_choices == 1 or (kv is not None and kv.do_remote_decode):
            names = ()
        self.tokens |= {name: [] for name in names or (request_id,)}
        self.core.handle(
            EngineCoreRequest(
                request_id=request_id,
                spec=RequestSpec(prompt, sampling, sibling_seeds=tuple(range(1, num_choices))),
                kv_transfer_params=kv,
                choice_ids=names,
                prefix_peer=prefix_peer,
                group=group,
            )
        )

    def step(self) -> EngineCoreOutputs:
        outputs = self.core.step()
        for output in outputs.outputs:
            assert not output.error
            if output.group >= 0:
                self.groups[output.request_id] = output.group
            self.tokens[output.request_id] += output.new_token_ids
            if output.draft_feature is not None:
                self.features[output.request_id] = output.draft_feature
            if output.siblings is not None:
                self.tokens[output.request_id] += output.siblings.token_ids
            if output.finish_reason:
                self.ended.add(output.request_id)
        self.results += outputs.kv_results
        self.asks += outputs.prefix_asks
        return outputs

    def check_empty(self) -> None:
        assert self.core.scheduler.check_empty() == []

    def shutdown(self) -> None:
        try:
            self.core.shutdown()
            self.executor.shutdown()
        finally:
            if self.context is not None:
                self.context.destroy()


def run_until(nodes: list[GroupedNode], is_done: object) -> None:
    """Steps `nodes` whenever something happens. Raises AssertionError when it takes too long."""
    assert callable(is_done)
    poller = zmq.Poller()
    for node in nodes:
        for source in node.executor.poll_sources:
            poller.register(source, zmq.POLLIN)
        if node.core.connector.fileno() >= 0:
            poller.register(node.core.connector.fileno(), zmq.POLLIN)
    deadline = time.monotonic() + TIMEOUT_S
    while not is_done():
        assert time.monotonic() < deadline, [node.core.scheduler.check_empty() for node in nodes]
        for node in nodes:
            node.step()
        poller.poll(20)


class TokenOracle(Protocol):
    """Knows the greedy answer to a prompt. A guess of it saves time, as far as it is right."""

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]: ...


def shown_by(chosen: Sequence[int], guess: Sequence[int]) -> list[int]:
    """Returns the beginning of the greedy answer that follows from what is most likely behind each
    beginning of a guess, of none at first: the guess as far as it is right, and the token behind.
    """
    right = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, guess, strict=False))
    return list(chosen[: 1 + len(list(right))])


def hand_over(
    prefill: GroupedNode,
    decode: GroupedNode,
    prompts: dict[str, list[int]],
    oracle: TokenOracle,
    num_choices: int = 1,
) -> None:
    """The test plays both node servers; afterwards nothing is held on either side."""
    names = {
        name: [f"{name}.{i}" for i in range(num_choices)] if num_choices > 1 else [name]
        for name in prompts
    }
    for name, prompt in prompts.items():
        transfer_id = secrets.token_hex(16)
        export = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
        peer = prefill.core.connector.peer_info
        assert peer is not None
        prefill.add(name, prompt, 1, export, num_choices)
        prefill.step()
        assert (name in prefill.groups) == peer.names_group
        pull = KVTransferParams(
            do_remote_prefill=True,
            transfer_id=transfer_id,
            peer=peer.group(prefill.groups.get(name, 0)),
        )
        decode.add(name, prompt, 24, pull, num_choices)
    waiting = set(prompts)

    def is_done() -> bool:
        for name in waiting & prefill.ended:
            waiting.remove(name)
            tokens = prefill.tokens[name]
            for choice, token in zip(names[name], tokens, strict=True):
                decode.tokens[choice].append(token)
            feature = prefill.features.get(name, b"")
            decode.core.handle(SupplyFirstToken(name, tokens[0], tokens[1:], feature))
        return all(decode.ended.issuperset(choices) for choices in names.values())

    run_until([prefill, decode], is_done)
    for name, prompt in prompts.items():
        for choice in names[name]:
            found = decode.tokens[choice]
            assert found == oracle.tokens(prompt, 24, found), choice
    nodes = [prefill, decode]
    run_until(nodes, lambda: not any(node.core.scheduler.check_empty() for node in nodes))
