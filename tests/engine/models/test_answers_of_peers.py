"""Answers of models with states, which prefill nodes take from the decode nodes that gave them. The
test plays all node servers; transfer processes are real, and one is killed.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.contracts.messages import PrefixAnswer, SupplyFirstToken
from engine.kv_cache.groups import state_stride
from engine.models.checkpoint import load_model_config
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, run_until
from tests.engine.models.parity_cases import VOCAB
from tests.engine.models.reference_models import FAMILIES, save_checkpoint
from tests.engine.models.test_prefixes_of_peers import counter

_NUM_TOKENS = 20
_NUM_SAID = 6
_PEER = "decode/10.0.0.1:1"


class MovingConversation:
    """Its turns come to one of two decode nodes, with a prefill node that knows no earlier turn."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        model = load_model_config(folder)
        self.nodes: list[GroupedNode] = []
        for role in ("kv_producer", "kv_consumer", "kv_consumer"):
            kv = KVTransferConfig(kv_role=role, shares_prefixes=True, pulls_always=True)
            config = engine_config(model, block_size=16, num_blocks=400, kv_transfer=kv)
            self.nodes.append(GroupedNode.start(config))
            stack.callback(self.nodes[-1].shutdown)
        self.prefill, *self.decodes = self.nodes
        self.tokens = [(3 + i * i * 7) % VOCAB for i in range(80)]
        self._num_turns = 0

    def turn(
        self,
        place: int,
        holder: GroupedNode | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> int:
        """Lets a decode node answer, whose prefill node may ask `holder` for the earlier turns:
        one node alone gives the same answer. `meanwhile` comes when the holder has answered.
        Returns how many tokens came from there."""
        self._num_turns += 1
        name, prefill, decode = f"turn-{self._num_turns}", self.prefill, self.decodes[place]
        alone = self._answer_of_one_node()
        before = prefill.core.stats().prompt_tokens_pulled
        self._add(name, decode, _PEER if holder is not None else "")
        if holder is not None:
            self._answer_ask(name, holder)
        if meanwhile is not None:
            meanwhile()
        run_until(self.nodes, lambda: name in prefill.ended)
        (first,) = prefill.tokens[name]
        decode.core.handle(SupplyFirstToken(name, first, [], b""))
        run_until(self.nodes, lambda: name in decode.ended)
        run_until(self.nodes, lambda: not any(n.core.scheduler.check_empty() for n in self.nodes))
        assert [first, *decode.tokens[name]] == alone
        self.tokens += [*alone, *range(_NUM_SAID)]
        return prefill.core.stats().prompt_tokens_pulled - before

    def _answer_of_one_node(self) -> list[int]:
        name = f"alone-{self._num_turns}"
        self.prefill.add(name, self.tokens, _NUM_TOKENS)
        run_until([self.prefill], lambda: name in self.prefill.ended)
        run_until([self.prefill], lambda: not self.prefill.core.scheduler.check_empty())
        assert self.prefill.core.scheduler.reset_prefix_cache()
        return self.prefill.tokens[name]

    def _add(self, name: str, decode: GroupedNode, peer: str) -> None:
        transfer_id, told = secrets.token_hex(16), self.prefill.core.connector.peer_info
        assert told is not None
        export = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
        pull = KVTransferParams(do_remote_prefill=True, transfer_id=transfer_id, peer=told.group(0))
        self.prefill.add(name, self.tokens, 1, export, prefix_peer=peer)
        decode.add(name, self.tokens, _NUM_TOKENS, pull)

    def _answer_ask(self, name: str, holder: GroupedNode) -> None:
        run_until([self.prefill], lambda: self.prefill.asks)
        ask = self.prefill.asks.pop()
        group, transfer_id, count = holder.core.scheduler.remote.offer(ask.chains)
        told = holder.core.connector.peer_info
        assert told is not None
        peer = told.group(group)
        params = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, peer=peer, is_prefix=True
        )
        self.prefill.core.handle(PrefixAnswer(name, ask.number, params, count))


@pytest.mark.parametrize("family", ["kimi_linear", "granite_hybrid"])
def test_a_conversation_that_changes_decode_nodes_brings_its_answers(
    family: str, tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    with ExitStack() as stack:
        talk = MovingConversation(tmp_path, stack)
        prefill, (first, second) = talk.prefill, talk.decodes
        stride = state_stride(prefill.core.config.kv_layout.groups)

        def held() -> int:
            """Returns the tokens up to the last place in the answer that was just given."""
            end = (len(talk.tokens) - _NUM_SAID - 1) // stride * stride
            assert end > len(talk.tokens) - _NUM_SAID - _NUM_TOKENS
            return end

        assert talk.turn(0) == 0
        end = held()
        assert talk.turn(1, first) == end
        (pid, *_) = second.core.connector.process_pids
        os.kill(pid, signal.SIGSTOP)

        def kill() -> None:
            run_until([prefill], lambda: counter(prefill, "live_transfers"))
            os.kill(pid, signal.SIGKILL)

        assert talk.turn(0, second, kill) == 0
        assert counter(prefill, "prefix_pull_failures") == 1
        end = held()
        assert talk.turn(1, first) == end
