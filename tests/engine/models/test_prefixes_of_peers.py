"""Prefixes of models with windows, states and rows of several tokens, from a node that computed
them. The test plays both node servers; transfer processes are real, and are killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.contracts.messages import PrefixAnswer
from engine.models.checkpoint import load_model_config
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, run_until
from tests.engine.models.parity_cases import VOCAB
from tests.engine.models.reference_models import FAMILIES, save_checkpoint

NUM_TOKENS = 12
_PEER = "prefill/10.0.0.1:1"


class Conversation:
    """Its turns come to one of two nodes, of which the second has `tp_size` ranks. One may ask the
    other for what it lacks."""

    def __init__(self, folder: Path, stack: ExitStack, tp_size: int, block_size: int) -> None:
        model = load_model_config(folder)
        self.nodes: list[GroupedNode] = []
        for ranks in (1, tp_size):
            kv = KVTransferConfig(kv_role="kv_producer", shares_prefixes=True, pulls_always=True)
            config = engine_config(
                model, block_size=block_size, num_blocks=400, tp_size=ranks, kv_transfer=kv
            )
            self.nodes.append(GroupedNode.start(config))
            stack.callback(self.nodes[-1].shutdown)
        self.tokens = [(3 + i * i * 7) % VOCAB for i in range(97)]
        self._num_turns = 0

    def turn(self, place: int) -> list[int]:
        """Returns a node's answer to what was said so far."""
        name = self._add(self.nodes[place])
        return self._answer(place, name)

    def turn_that_asks(self, place: int, meanwhile: Callable[[], None] | None = None) -> list[int]:
        """Does the same with what the other node has. `meanwhile` comes when that was told."""
        node, peer = self.nodes[place], self.nodes[1 - place]
        name = self._add(node, _PEER)
        run_until([node], lambda: node.asks)
        ask = node.asks.pop()
        group, transfer_id, count = peer.core.scheduler.remote.offer(ask.chains)
        told = peer.core.connector.peer_info
        assert count and told is not None
        params = KVTransferParams(
            do_remote_prefill=True,
            transfer_id=transfer_id,
            peer=told.group(group),
            is_prefix=True,
        )
        node.core.handle(PrefixAnswer(name, ask.number, params, count))
        if meanwhile is not None:
            meanwhile()
        return self._answer(place, name)

    def _add(self, node: GroupedNode, peer: str = "") -> str:
        self._num_turns += 1
        name = f"turn-{self._num_turns}"
        node.add(name, self.tokens, NUM_TOKENS, prefix_peer=peer)
        return name

    def _answer(self, place: int, name: str) -> list[int]:
        """Returns it when nobody holds anything any more."""
        nodes = self.nodes
        run_until(nodes, lambda: name in nodes[place].ended)
        run_until(nodes, lambda: not any(node.core.scheduler.check_empty() for node in nodes))
        return nodes[place].tokens[name]


def counter(node: GroupedNode, name: str) -> float:
    return node.core.stats().kv_transfer[name]


@pytest.mark.parametrize(
    ("family", "tp_size", "block_size"),
    [
        ("qwen3_next", 2, 16),
        ("lfm3", 1, 16),  # short convolutions beside windows
        ("deepseek_v4", 2, 4),  # a prefix ends at multiples of 128 tokens
        ("gemma2", 1, 16),
    ],
)
def test_a_conversation_that_moves_brings_its_prefix(
    family: str, tp_size: int, block_size: int, tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    with ExitStack() as stack:
        talk = Conversation(tmp_path, stack, tp_size, block_size)
        first, second = talk.nodes
        talk.tokens += [*talk.turn(0), *range(20)]
        alone = talk.turn(0)
        assert talk.turn_that_asks(1) == alone
        stats = second.core.stats()
        assert (stats.prompt_tokens_pulled, stats.prompt_tokens_computed) == (128, 1)
        assert counter(second, "bytes") > 0

        talk.tokens += [*alone, *range(20)]
        alone = talk.turn(1)
        assert second.core.stats().prefix_cache_hits >= 128, "what came is found here"
        assert first.core.scheduler.reset_prefix_cache()
        (pid, *_) = second.core.connector.process_pids
        os.kill(pid, signal.SIGSTOP)

        def kill() -> None:
            run_until([first], lambda: counter(first, "live_transfers"))
            os.kill(pid, signal.SIGKILL)

        assert talk.turn_that_asks(0, kill) == alone, "its peer was killed during the pull"
        assert counter(first, "prefix_pull_failures") == 1
        assert first.core.stats().prompt_tokens_pulled == 0

        assert first.core.scheduler.reset_prefix_cache()
        run_until([second], lambda: counter(second, "processes_ready") == tp_size)
        assert talk.turn_that_asks(0) == alone
        assert first.core.stats().prompt_tokens_pulled >= 128


def test_the_first_block_of_a_window_comes_whole(tmp_path: Path) -> None:
    """The token behind the prefix sees two tokens of it, and one behind a shorter prefix all."""
    save_checkpoint(FAMILIES["gemma2"], tmp_path)
    with ExitStack() as stack:
        talk = Conversation(tmp_path, stack, tp_size=1, block_size=16)
        second = talk.nodes[1]
        assert second.core.config.kv_layout.groups[1].first_token_seen(32) == 14
        talk.tokens = talk.tokens[:33]
        assert talk.turn(0) == talk.turn_that_asks(1)
        assert second.core.stats().prompt_tokens_pulled == 32
        talk.tokens = [*talk.tokens[:16], 5, 6, 7]
        assert talk.turn(0) == talk.turn(1)
        assert second.core.stats().prefix_cache_hits == 16
